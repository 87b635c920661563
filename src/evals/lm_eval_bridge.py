"""Generation tasks of lm-eval (0.4.13) on a compressed cache: prompts, filters and metrics are lm-eval's, tokens and bytes ours.

Outputs with ``method=fullkv`` are those of lm-eval's own HFLM at batch size 1, except for what is refused or left out here:

* Too long prompts are refused before anything is generated. HFLM cuts them on the left: BOS and the head of the chat go first.
* Decoding is greedy. Sampling and beams are refused; penalties of a model's generation configuration are not applied.
* A chat template that refuses a system message ends the run. HFLM asks without the message.

A request has no seam between context and question: all of it is compressed (protocol ``aware``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from jinja2 import TemplateError
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from evals.benchmark import Session
from evals.data import sha256
from evals.decode import Stop, eos_ids, generate
from evals.records import RunDir, RunError, read_json, write_json
from evals.runner import Plan, check_budget, open_session, plan
from evals.sample import Prompt, Rules, Sample, render
from qevict.fields import check_fields

try:
    import lm_eval
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import hash_string
except ModuleNotFoundError as error:
    raise RuntimeError(
        f'package {error.name} is missing: ./setup.sh dev,lm-eval installs lm-eval, or pip install "qevict[lm-eval]"'
    ) from error

ARGUMENTS = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")  # the last three mean nothing when greedy
MEASURED = {"kv_ratio_peak": max, "budget_used_peak": max, "kv_bytes_peak": mean, "budget_bytes": mean}  # as evals.metrics
FEWSHOT_SEED = 1234  # lm-eval's: the same examples as in its own runs


@dataclass(frozen=True)
class Harness:
    """Which tasks of lm-eval are run and how; it has what :func:`evals.runner.plan` reads of a task, lm-eval has the rest.

    Args:
        tasks: names of tasks, groups or tags, or paths of YAML files.
        limit: documents of each task, the first ones; below 1 a share of them; None: all.
        num_fewshot: solved examples in the prompt; None: as the task says.
        chat: prompts are conversations in the model's chat template.
        generation: generation arguments that replace the tasks' own, as ``name=value,name=value``.
        files: folder with tasks of one's own (YAML).
        fewshot_seed: draws the examples.
        unsafe_code: tasks that execute generated code may.
    """

    tasks: Sequence[str] = ()
    limit: int | float | None = None
    num_fewshot: int | None = None
    chat: bool = False
    generation: str | None = None
    files: str | None = None
    fewshot_seed: int = FEWSHOT_SEED
    unsafe_code: bool = False

    def __post_init__(self):
        check_fields(self)
        if not self.tasks:
            raise ValueError("no task is named: give names of lm-eval's generation tasks, such as gsm8k")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit={self.limit} leaves nothing: give a number of documents, or a share below 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot={self.num_fewshot}: it has to be 0 or more")
        if self.files is not None and not Path(self.files).expanduser().is_dir():
            raise ValueError(f"{self.files} is no folder: give one with tasks as YAML files")

    @property
    def name(self) -> str:
        return "-".join(["lm-eval", *(Path(task).stem for task in self.tasks)])[:80]  # part of a folder's name

    def items(self, tokenizer, positions: int) -> list:
        """None: lm-eval makes the requests when it runs."""
        return []

    def fingerprint(self) -> dict[str, str]:
        folder = Path(self.files).expanduser() if self.files else None
        files = sorted(f for f in folder.rglob("*") if f.suffix in (".yaml", ".py")) if folder else []
        return {"lm_eval": lm_eval.__version__} | {f"data_{f.relative_to(folder)}": sha256(f.read_bytes()) for f in files}

    def manager(self) -> GenerationTasks:
        """The index of tasks; that of lm-eval's own takes 10 s to make and is left out where the folder has all that are named."""
        folder = self.files and str(Path(self.files).expanduser())
        own = GenerationTasks(include_path=folder, include_defaults=False)
        return own if set(self.tasks) <= set(own.all_subtasks) else GenerationTasks(include_path=folder)


class GenerationTasks(TaskManager):
    """An index of tasks that loads none but those that generate text."""

    def load(self, task_list):
        try:
            loaded = super().load(task_list)
        except KeyError as error:
            raise ValueError(f"{error.args[0]}: `lm_eval ls tasks` lists the names, --include adds a folder") from error
        except OSError as error:
            raise ValueError(f"{error}: get the data where there is a network, or --include a task with local files") from error
        other = [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE != "generate_until"]
        if other:
            raise ValueError(_refusal(", ".join(other)))
        return loaded


def _refusal(what: str) -> str:
    return f"{what} asks for log-likelihoods: only generation tasks (output_type: generate_until) run on a compressed cache"


@dataclass(frozen=True)
class Request:
    """A request of lm-eval, ready for the model; at most ``limit`` tokens are generated."""

    id: str
    task: str
    prompt: Prompt
    limit: int
    stop: Stop

    def answered(self, row: dict | None) -> bool:
        """Whether a record is of this very request."""
        asked = (self.prompt.sha, list(self.stop.texts), self.limit)
        return row is not None and row["status"] == "ok" and (row["prompt_sha"], row["until"], row["max_new_tokens"]) == asked


class Bridge(LM):
    """A language model for ``lm_eval.simple_evaluate`` whose cache is compressed, one fresh cache for each request.

    Args:
        session: model, tokenizer, budget and the caches.
        folder: where finished requests are kept and looked up; None: in memory.
        progress: show a bar.

    Attributes:
        rows: records of finished requests by id, with the fields of ``samples.jsonl`` (see docs/records.md).
    """

    def __init__(self, session: Session, folder: RunDir | None = None, progress: bool = False):
        super().__init__()
        self._device = session.model.device
        self.session, self.folder, self.progress = session, folder, progress
        self.rows: dict[str, dict] = folder.finished if folder else {}
        self.eos = eos_ids(session.model, session.tokenizer)
        added = session.tokenizer.added_tokens_decoder
        self.special = {index: token.content for index, token in added.items() if token.special}

    # -- what lm-eval asks ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, in the order of the requests.

        Raises:
            ValueError: a request that cannot be served, before the first one is.
        """
        asked = [self.request(instance) for instance in requests]
        self.check(asked)
        answers = []
        for request in tqdm(asked, desc="lm-eval", disable=disable_tqdm or not self.progress):
            if not request.answered(self.rows.get(request.id)):
                self.keep(self.answer(request))
                if self.folder:
                    self.folder.status("running", len(asked))
            answers.append(self.rows[request.id]["prediction"])
        return answers

    def loglikelihood(self, requests):
        raise ValueError(_refusal("a task"))

    loglikelihood_rolling = loglikelihood

    @property
    def tokenizer_name(self) -> str:
        return self.session.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without ``add_generation_prompt`` its last message is open, to be continued."""
        if not self.session.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: run without --chat")
        try:
            return self.session.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in chat_history)
            raise ValueError(f"the chat template refuses messages of {roles} ({error}): run without --chat") from error

    # -- how it is answered -----------------------------------------------------------------------------------------------

    def request(self, instance: Instance) -> Request:
        """Token ids and stops of a request; BOS as in every benchmark here, once. As in HFLM a special token stops if its spelling
        has a stop text in it: decoded text is without them."""
        text, arguments = instance.args
        until, limit = _generation(arguments, self.session.tokenizer)
        name = f"{instance.task_name}-{instance.doc_id:04d}-{instance.idx}"
        sample = Sample(name, instance.task_name, text, "", "", (), limit, chat=False)
        stops = {token for token, spelling in self.special.items() if any(stop in spelling for stop in until)}
        prompt = render(sample, self.session.tokenizer, Rules())
        return Request(name, instance.task_name, prompt, limit, Stop(frozenset(self.eos | stops), until))

    def check(self, asked: Sequence[Request]) -> None:
        """Raise a ValueError for a prompt that the model or the budget has no room for."""
        positions = self.session.model.config.get_text_config().max_position_embeddings
        for request in asked:
            prompt = len(request.prompt)
            if not prompt:
                raise ValueError(f"{request.id} is an empty prompt, and the tokenizer puts no BOS there: leave the document out")
            if prompt + request.limit > positions:
                raise ValueError(
                    f"{request.id} needs {prompt + request.limit} tokens ({prompt} prompt + {request.limit} new), the model has "
                    f"{positions} positions: lower --num-fewshot or max_gen_toks, or use a model with a longer context"
                )
        cache = self.session.new_cache(self.session.budget)
        lengths = {(len(request.prompt), len(request.prompt) + request.limit) for request in asked}
        check_budget(cache.policy, cache.geometry, self.session.budget, lengths)

    def answer(self, request: Request) -> dict:
        """The record of one request."""
        model, tokenizer = self.session.model, self.session.tokenizer
        cache = self.session.new_cache(self._budget(request.limit))
        made = generate(model, tokenizer, cache, request.prompt, request.limit, request.stop)
        # lm-eval cuts at one stop text after the other, which is not the same as at the first of them where they overlap
        text = postprocess_generated_text(tokenizer.decode(made.tokens, skip_special_tokens=True), list(request.stop.texts), None)
        return {
            "id": request.id,
            "task": request.task,
            "prompt_sha": request.prompt.sha,
            "prompt_tokens": len(request.prompt),
            "until": list(request.stop.texts),
            "max_new_tokens": request.limit,
            "status": "ok",
            "error": None,
            "prediction": text,
            "new_tokens": len(made.tokens),
            "stopped": made.stopped,
            **made.record(),
        }

    def keep(self, row: dict) -> None:
        """Add a record, or replace that of the same id."""
        if self.folder and self.rows.get(row["id"]) != row:
            self.folder.append(row)
        self.rows[row["id"]] = row

    def _budget(self, limit: int):
        return dataclasses.replace(self.session.budget, max_new_tokens=limit)


def _generation(arguments: Mapping, tokenizer) -> tuple[tuple[str, ...], int]:
    """Stop texts (the text of the end token is one) and token limit of a request, read as HFLM reads them."""
    known = normalize_gen_kwargs(dict(arguments))
    if known["do_sample"]:
        raise ValueError(
            f"generation arguments {dict(arguments)} ask for sampling, here decoding is greedy: "
            "set --gen-kwargs do_sample=False,temperature=0"
        )
    other = {name: value for name, value in known.items() if name not in ARGUMENTS and (name, value) != ("num_beams", 1)}
    if other:
        raise ValueError(f"generation arguments {other} are not supported: use tasks with {', '.join(ARGUMENTS[:4])} only")
    if known["max_gen_toks"] < 1:
        raise ValueError(f"max_gen_toks={known['max_gen_toks']}: it has to be 1 or more, set --gen-kwargs max_gen_toks=256")
    end = None if tokenizer.eos_token_id is None else tokenizer.decode(tokenizer.eos_token_id)
    return tuple(text for text in handle_stop_sequences(list(known["until"]), end) if text), known["max_gen_toks"]


# ------------------------------------------------------------------------------------------------------------------ a run


def run(config: DictConfig) -> dict:
    """Do what is left of a run whose ``config.task`` is a :class:`Harness` and return its report (also in ``results.json``):
    lm-eval's results with the measured bytes beside the scores, and the card; ``path`` is the run directory.

    ``samples.jsonl`` has a line for each request, and another one when its scores are known.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    job = plan(config)
    harness, tasks = job.task, job.task.manager()
    folder = RunDir(config.results_dir, job.name, OmegaConf.to_yaml(config, resolve=True))
    try:
        session, _ = open_session(job, folder)
        folder.status("running", len(folder.finished))
        bridge = Bridge(session, folder, config.progress)
        results = simple_evaluate(
            bridge,
            tasks=list(harness.tasks),
            task_manager=tasks,
            limit=harness.limit,
            num_fewshot=harness.num_fewshot,
            apply_chat_template=harness.chat,
            gen_kwargs=harness.generation,
            torch_random_seed=config.seed,
            fewshot_random_seed=harness.fewshot_seed,
            confirm_run_unsafe_code=harness.unsafe_code,
        )
        _add_bytes(results, bridge)
        report = {
            "method": job.method,
            "model": Path(config.model.path).name,
            "budget": job.budget.fraction,
            "budget_asked": str(job.budget),
            "decode": job.budget.decode,
            "results": results["results"],
            "groups": results.get("groups", {}),
            "card": _card(job, results),
        }
        write_json(folder.path / "results.json", report)
        folder.status("done", len(folder.finished))
        return report | {"path": str(folder.path)}
    except BaseException as error:
        with contextlib.suppress(OSError, RunError):
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            total = (read_json(folder.path / "status.json") or {}).get("total", 0)
            folder.status(state, total, f"{type(error).__name__}: {error}")
        raise
    finally:
        folder.close()


def _add_bytes(results: dict, bridge: Bridge) -> None:
    """Put what was measured beside the scores of each task, and the scores into the records of its requests."""
    for task, samples in results["samples"].items():
        rows: dict[str, dict] = {}
        for sample in samples:  # one for each document and filter
            values = {f"{metric},{sample['filter']}": sample[metric] for metric in sample["metrics"]}
            scores = {name: float(v) for name, v in values.items() if isinstance(v, bool | int | float | np.generic)}
            target = sample["target"] if isinstance(sample["target"], list) else [sample["target"]]
            for index in range(len(sample["resps"])):
                name = f"{task}-{sample['doc_id']:04d}-{index}"
                rows[name] = rows.get(name, bridge.rows[name]) | {"answers": [str(t) for t in target]} | scores
        for row in rows.values():
            bridge.keep(row)
        measured = {name: reduce(row[name] for row in rows.values()) for name, reduce in MEASURED.items()}
        cut = sum(row["stopped"] == "length" for row in rows.values())
        results["results"][task] |= measured | {"n_cut": cut}


def _card(job: Plan, results: dict) -> dict:
    """How the numbers came about. ``hash`` is lm-eval's task hash: of documents, prompts and targets."""
    tasks = {}
    for name, samples in results["samples"].items():
        config = results["configs"][name]
        tasks[name] = {
            "version": results["versions"].get(name),
            "hash": hash_string("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)),
            "num_fewshot": results["n-shot"].get(name),
            "n": results["n-samples"][name]["effective"],
            "n_available": results["n-samples"][name]["original"],
            "dataset": config.get("dataset_path"),
            "generation": config.get("generation_kwargs"),
        }
    asked = {name: getattr(job.task, name) for name in ("limit", "num_fewshot", "generation", "chat", "unsafe_code")}
    return {
        "benchmark": "lm-eval",
        "method": job.method,
        "budget": str(job.budget),
        **asked,
        "chat_template": sha256(job.tokenizer.chat_template.encode()) if job.task.chat else None,
        "protocol": "aware",
        "bos": "tokenizer",
        "too_long": "refused",
        "seeds": {name: results["config"][f"{name}_seed"] for name in ("random", "numpy", "torch", "fewshot")},
        "tasks": tasks,
        **job.task.fingerprint(),
    }
