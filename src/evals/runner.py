"""One run: one method, one model, one benchmark, one budget; resumed, never repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from evals.benchmark import Item, Session, Task
from evals.loggers import make_logger
from evals.meters import meter_name
from evals.records import RunDir, RunError, digest, environment, read_json, readable, write_json
from qevict.budget import Budget, Geometry, Layout, all_of
from qevict.fields import check_mapping
from qevict.hf.cache import BACKENDS, DTYPES, TierCache, geometry_of
from qevict.hf.loading import load_config, load_model, load_tokenizer, resolve
from qevict.policy import Policy

FIELDS = {
    "seed": (int,), "progress": (bool,), "results_dir": (str,), "method_name": (str,),
    "cache.dtype": (str,), "cache.basis": (str,), "cache.decode": (str,),
    "model.path": (str,), "model.revision": (str, type(None)), "model.dtype": (str,), "model.device": (str,),
}  # fmt: skip
PATHS = ("data", "templates", "exemplars", "files", "haystack")  # of tasks: what they lead to is in the fingerprint


@dataclass(frozen=True)
class Plan:
    """Everything that is known before weights are read: a configuration that cannot work ends here."""

    config: DictConfig
    name: str
    method: str
    policy: Policy
    budget: Budget
    task: Task
    tokenizer: object
    items: list[Item]


def device_of(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.split(":")[0]


def check_budget(policy: Policy, g: Geometry, budget: Budget, lengths: Iterable[tuple[int, int]]) -> None:
    """Refuse a budget that some sequence of (prompt, total) tokens would not fit: at the end of its prompt or, unless it may grow,
    only later."""

    def layout(prompt: int, total: int, seen: int) -> Layout:
        return policy.layout(g, dataclasses.replace(budget, max_new_tokens=total - prompt), prompt, seen)

    each = {(prompt, total, seen) for prompt, total in lengths for seen in ((prompt,) if budget.once else (prompt, total))}
    all_of(functools.partial(layout, *one) for one in each)


def plan(config: DictConfig) -> Plan:
    """Check a configuration against the model's sizes and the prompts, and name the run.

    Raises:
        ValueError: anything that could not run, in one sentence.
    """
    model = config.model
    check_mapping(config, FIELDS)
    if config.backend.name not in BACKENDS:
        raise ValueError(f"backend={config.backend.name}: choose one of {', '.join(BACKENDS)}")
    if config.logger.name not in ("none", "wandb"):
        raise ValueError(f"logger.name={config.logger.name}: choose none or wandb")
    policy = instantiate(config.method)
    task = instantiate(config.task)
    unlimited = policy.unlimited  # a method that keeps everything has no budget to choose
    if unlimited:
        asked = {"fraction": 1.0}
    elif config.budget_bytes is None and config.budget_tokens is None:
        asked = {"fraction": config.budget}
    else:
        asked = {"nbytes": config.budget_bytes, "tokens": config.budget_tokens}
    cache = config.cache
    # how much may be generated is known sample by sample
    budget = Budget(**asked, basis=cache.basis, max_new_tokens=1, decode=cache.decode)
    hub_config = load_config(model.path, model.revision)
    if cache.dtype not in DTYPES:
        raise ValueError(f"cache.dtype={cache.dtype}: choose one of {', '.join(DTYPES)}")
    geometry = geometry_of(hub_config.get_text_config(), DTYPES[cache.dtype])
    policy.codec(geometry)
    tokenizer = _tokenizer(model.path, model.revision)
    items = task.items(tokenizer, hub_config.get_text_config().max_position_embeddings)
    check_budget(policy, geometry, budget, {(i.prompt, i.total) for i in items})
    method = OmegaConf.to_container(config.method, resolve=True)
    _, source = resolve(model.path, model.revision)
    if source.kind == "hub":
        source = dataclasses.replace(source, sha=getattr(hub_config, "_commit_hash", None))
    about = OmegaConf.to_container(config.task, resolve=True)
    about = {k: v for k, v in about.items() if k not in PATHS} | task.fingerprint()
    identity = {
        "method": method,
        "budget": dataclasses.asdict(budget),
        "cache": OmegaConf.to_container(config.cache, resolve=True),
        "model": {"source": dataclasses.asdict(source), "dtype": model.dtype, "device": device_of(model.device)},
        "task": about,
        "seed": config.seed,
        "backend": config.backend.name,
    }
    name = config.method_name
    amount = "full" if unlimited else budget
    folder = f"{readable(name, Path(model.path).name, task.name, amount, f's{config.seed}')}-{digest(identity)}"
    return Plan(config, folder, name, policy, budget, task, tokenizer, items)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str, revision: str | None):
    return load_tokenizer(path, revision)


@functools.lru_cache(maxsize=1)
def _model(path: str, revision: str | None, dtype: str, device: str):
    """Loaded once for all runs of a process."""
    return load_model(path, revision, dtype, device)


def run(config: DictConfig, announce=print, stopping=lambda: False) -> dict:
    """Do what is left of a run and return its metrics (also in ``metrics.json``); ``path`` is the run directory.

    ``announce`` gets lines for people; ``stopping`` is asked between samples, True ends the run with KeyboardInterrupt.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    job = plan(config)
    torch.manual_seed(config.seed)
    folder = RunDir(config.results_dir, job.name, OmegaConf.to_yaml(config, resolve=True))
    try:
        if folder.damaged:
            announce(f"{job.name}: damaged lines of samples.jsonl dropped ({folder.damaged}), their samples are done again")
        todo = [item for item in job.items if not _finished(folder.finished.get(item.id), item)]
        done = folder.path / "metrics.json"
        before = read_json(done)
        if not todo and before is not None:
            mirrored = "" if config.logger.name == "none" else f" (logger={config.logger.name} gets what is run, not what is there)"
            announce(f"{job.name}: finished before, nothing to do{mirrored}")
            extra = before  # what is computed from the samples is computed again: the formulas may be newer than the run
        else:
            extra = _work(job, folder, todo, announce, stopping)
        rows = [folder.finished[item.id] for item in job.items]
        metrics = extra | {
            "method": job.method,
            "model": Path(config.model.path).name,
            "task": job.task.name,
            "budget": job.budget.fraction,
            "budget_asked": str(job.budget),
            "decode": job.budget.decode,
            **job.task.summary(rows),
            "card": job.task.card(),
        }
        write_json(done, metrics)
        if not metrics["n"]:
            raise RunError(f"all {len(rows)} samples failed, the first: {rows[0]['error']}; the same command tries them again")
        folder.status("done", len(job.items))
        return metrics | {"path": str(folder.path)}
    except BaseException as error:
        with contextlib.suppress(OSError, RunError):  # a full disk also fails the note about it
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            folder.status(state, len(job.items), f"{type(error).__name__}: {error}")
        raise
    finally:
        folder.close()


def _finished(row: dict | None, item: Item) -> bool:
    """Failed samples are tried again; a row of another prompt is not this sample's, nor is one without its score."""
    if row is None or row.get("status") != "ok" or row.get("prompt_sha") != item.sha or not isinstance(row.get("task"), str):
        return False
    return isinstance(row.get("score", ""), int | float | None)


def open_session(job: Plan, folder: RunDir) -> tuple[Session, str]:
    """Load the model and note in the run what it starts on. Returns also the backend that decodes."""
    config = job.config
    model, source = _model(config.model.path, config.model.revision, config.model.dtype, config.model.device)

    def new_cache(budget: Budget) -> TierCache:
        return TierCache(model, job.policy, budget, DTYPES[config.cache.dtype], config.backend.name)

    env = environment(model.device, dataclasses.asdict(source))
    used = new_cache(job.budget).decoder(model.device)
    folder.add_environment(env | {"calibration": job.policy.calibration_id(model), "backend": used})
    return Session(model, job.tokenizer, job.budget, new_cache), used


def _work(job: Plan, folder: RunDir, todo: list[Item], announce, stopping) -> dict:
    config = job.config
    folder.status("running", len(job.items))
    session, used = open_session(job, folder)
    model = session.model
    # on a run of its own: the meter slows it down, and it warms up the timed ones
    space = job.task.meter(session, job.items)
    logger = make_logger(config, job.name, folder.path)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True, disable=not config.progress) as bar:
        track = bar.add_task(job.name, total=len(job.items), completed=len(job.items) - len(todo))
        rows = job.task.rows(session, todo)
        for _ in todo:
            if stopping():
                raise KeyboardInterrupt
            row = next(rows)
            folder.append(row)
            folder.status("running", len(job.items))
            logger.log(row)
            bar.advance(track)
    failed = [r for r in folder.finished.values() if r["status"] != "ok"]
    if failed:
        announce(f"{job.name}: {len(failed)} of {len(folder.finished)} samples failed, the first: {failed[0]['error']}")
    logger.finish(job.task.summary(list(folder.finished.values())))
    return {
        "backend": used,
        "meter": meter_name(model.device),
        "workspace_bytes_prefill": space["prefill"],
        "workspace_bytes_decode": space["decode"],
        "workspace_bytes_peak": max((v for v in space.values() if v is not None), default=None),
    }
