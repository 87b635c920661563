"""One run: one method, one model, one benchmark, one budget; resumed, never repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from evals.decode import eos_ids, generate, measure_workspace
from evals.loggers import make_logger
from evals.meters import meter_name
from evals.metrics import summarize
from evals.records import RunDir, RunError, digest, environment, read_json, readable, write_json
from evals.sample import Prompt, Sample, render
from qevict.budget import Budget, Geometry
from qevict.fields import check_mapping
from qevict.hf.cache import DTYPES, TierCache, geometry_of
from qevict.hf.loading import load_config, load_model, load_tokenizer, resolve
from qevict.policy import Policy

FIELDS = {
    "seed": (int,), "progress": (bool,), "results_dir": (str,), "method_name": (str,),
    "cache.dtype": (str,), "cache.basis": (str,), "cache.decode": (str,),
    "model.path": (str,), "model.revision": (str, type(None)), "model.dtype": (str,), "model.device": (str,),
}  # fmt: skip
WORKSPACE_STEPS = 10  # decode steps whose workspace is measured; covers a routing event of the default methods


@dataclass(frozen=True)
class Plan:
    """Everything that is known before weights are read: a configuration that cannot work ends here."""

    config: DictConfig
    name: str
    method: str
    policy: Policy
    budget: Budget
    benchmark: object
    geometry: Geometry
    tokenizer: object
    samples: list[tuple[Sample, Prompt]]


def device_of(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.split(":")[0]


def plan(config: DictConfig) -> Plan:
    """Check a configuration against the model's sizes and the prompts, and name the run.

    Raises:
        ValueError: anything that could not run, in one sentence.
    """
    model = config.model
    check_mapping(config, FIELDS)
    if config.backend.name != "reference":
        raise ValueError(f"backend={config.backend.name}: choose reference")
    if config.logger.name not in ("none", "wandb"):
        raise ValueError(f"logger.name={config.logger.name}: choose none or wandb")
    policy = instantiate(config.method)
    benchmark = instantiate(config.task)
    unlimited = policy.unlimited  # a method that keeps everything has no budget to choose
    if unlimited:
        asked = {"fraction": 1.0}
    elif config.budget_bytes is None and config.budget_tokens is None:
        asked = {"fraction": config.budget}
    else:
        asked = {"nbytes": config.budget_bytes, "tokens": config.budget_tokens}
    cache = config.cache
    budget = Budget(**asked, basis=cache.basis, max_new_tokens=config.task.max_new_tokens, decode=cache.decode)
    hub_config = load_config(model.path, model.revision)
    dtype = config.cache.dtype
    if dtype not in DTYPES:
        raise ValueError(f"cache.dtype={dtype}: choose one of {', '.join(DTYPES)}")
    geometry = geometry_of(hub_config.get_text_config(), DTYPES[dtype])
    policy.codec(geometry)
    tokenizer = _tokenizer(model.path, model.revision)
    limit = hub_config.get_text_config().max_position_embeddings
    samples = [(s, render(s, tokenizer, benchmark.protocol)) for s in benchmark.samples(tokenizer)]
    for sample, prompt in samples:
        need = len(prompt) + sample.max_new_tokens
        if need > limit:
            raise ValueError(
                f"sample {sample.id} needs {need} tokens ({len(prompt)} prompt + {sample.max_new_tokens} new), "
                f"{model.path} has {limit} positions: lower task.length or use a model with a longer context"
            )
    for length in {min(len(p.context) for _, p in samples), max(len(p.context) for _, p in samples)}:
        policy.layout(geometry, budget, length, length)
    method = OmegaConf.to_container(config.method, resolve=True)
    _, source = resolve(model.path, model.revision)
    if source.kind == "hub":
        source = dataclasses.replace(source, sha=getattr(hub_config, "_commit_hash", None))
    task = OmegaConf.to_container(config.task, resolve=True) | benchmark.fingerprint()
    identity = {
        "method": method,
        "budget": dataclasses.asdict(budget),
        "cache": OmegaConf.to_container(config.cache, resolve=True),
        "model": {"source": dataclasses.asdict(source), "dtype": model.dtype, "device": device_of(model.device)},
        "task": task,
        "seed": config.seed,
        "backend": config.backend.name,
    }
    name = config.method_name
    amount = "full" if unlimited else budget
    folder = f"{readable(name, Path(model.path).name, benchmark.name, amount, f's{config.seed}')}-{digest(identity)}"
    return Plan(config, folder, name, policy, budget, benchmark, geometry, tokenizer, samples)


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
            announce(f"{job.name}: {folder.damaged} damaged lines of samples.jsonl dropped, their samples are done again")
        todo = [(s, p) for s, p in job.samples if not _finished(folder.finished.get(s.id), p)]
        done = folder.path / "metrics.json"
        before = read_json(done)
        if not todo and before is not None:
            announce(f"{job.name}: finished before, nothing to do")
            return before | {"path": str(folder.path)}
        extra = _work(job, folder, todo, announce, stopping)
        rows = [folder.finished[s.id] for s, _ in job.samples]
        metrics = {
            "method": job.method,
            "model": Path(config.model.path).name,
            "task": job.benchmark.name,
            "budget": job.budget.fraction,
            "budget_asked": str(job.budget),
            "decode": job.budget.decode,
            **summarize(rows),
            **extra,
        }
        write_json(done, metrics)
        if not metrics["n"]:
            raise RunError(f"all {len(rows)} samples failed, the first: {rows[0]['error']}; the same command tries them again")
        folder.status("done", len(job.samples))
        return metrics | {"path": str(folder.path)}
    except BaseException as error:
        with contextlib.suppress(OSError, RunError):  # a full disk also fails the note about it
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            folder.status(state, len(job.samples), f"{type(error).__name__}: {error}")
        raise
    finally:
        folder.close()


def _finished(row: dict | None, prompt: Prompt) -> bool:
    """Failed samples are tried again; a row of another prompt is not this sample's."""
    return row is not None and row.get("status") == "ok" and row.get("prompt_sha") == prompt.sha


def _work(job: Plan, folder: RunDir, todo: list[tuple[Sample, Prompt]], announce, stopping) -> dict:
    config = job.config
    model, source = _model(config.model.path, config.model.revision, config.model.dtype, config.model.device)
    folder.add_environment(environment(model.device, dataclasses.asdict(source)))
    folder.status("running", len(job.samples))
    stop = eos_ids(model, job.tokenizer)

    def new_cache() -> TierCache:
        return TierCache(model, job.policy, job.budget, DTYPES[config.cache.dtype])

    # The longest prompt, on a run of its own: the meter slows it down, and it warms up the timed ones.
    _, longest = max(job.samples, key=lambda pair: len(pair[1]))
    space = measure_workspace(model, new_cache(), longest, WORKSPACE_STEPS)
    logger = make_logger(config, job.name, folder.path)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True, disable=not config.progress) as bar:
        track = bar.add_task(job.name, total=len(job.samples), completed=len(job.samples) - len(todo))
        for sample, prompt in todo:
            if stopping():
                raise KeyboardInterrupt
            row = _one(job, model, new_cache, sample, prompt, stop)
            folder.append(row)
            logger.log(row)
            bar.advance(track)
    failed = [r for r in folder.finished.values() if r["status"] != "ok"]
    if failed:
        announce(f"{job.name}: {len(failed)} of {len(folder.finished)} samples failed, the first: {failed[0]['error']}")
    logger.finish(summarize(list(folder.finished.values())))
    return {
        "meter": meter_name(model.device),
        "workspace_bytes_prefill": space["prefill"],
        "workspace_bytes_decode": space["decode"],
        "workspace_bytes_peak": max(space.values()),
    }


def _one(job: Plan, model, new_cache, sample: Sample, prompt: Prompt, stop: set[int]) -> dict:
    """One sample's row. An error in it is recorded; out of memory and interrupts end the run."""
    row = {
        "id": sample.id,
        "task": sample.task,
        "prompt_sha": prompt.sha,
        "prompt_tokens": len(prompt),
        "answers": list(sample.answers),
        "meta": sample.meta,
    }
    try:
        made = generate(model, new_cache(), prompt, sample.max_new_tokens, stop)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return row | {"status": "failed", "error": f"{type(error).__name__}: {error}".split("\n")[0], "score": None}
    text = job.tokenizer.decode(made.tokens, skip_special_tokens=True)
    return row | {
        "status": "ok",
        "error": None,
        "prediction": text,
        **job.benchmark.score(sample, text),
        "new_tokens": len(made.tokens),
        "stopped": made.stopped,
        "budget_bytes": made.budget_bytes,
        "kv_bytes_peak": made.bytes_peak["total"],
        "kv_bytes_final": made.bytes_final["total"],
        "kv_ratio_peak": made.ratio_peak,
        "kv_ratio_final": made.ratio_final,
        "budget_used_peak": made.budget_used_peak,
        "kv_parts_peak": made.bytes_peak,
        "kv_parts_final": made.bytes_final,
        "ttft_ms": made.ttft_ms,
        "tpot_ms": made.tpot_ms,
    }
