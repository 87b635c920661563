"""LongBench (Bai et al., 2024, arXiv:2308.14508): the 12 English tasks that papers on KV-cache compression report.

Prompts, limits, first-line rule and scores: THUDM/LongBench 2e00731, ``LongBench/pred.py``, ``eval.py`` and ``metrics.py``.
The prompt templates are read from the official files, not kept here. Known deviations:

* ROUGE-L of texts that overflow the official scorer's stack is scored, not 0 (:func:`evals.text_metrics.rouge_l`).
* All presets are scored as in the official code; kvpress strips more from the left of a prediction before it scores.
* A cue is never doubled; the rows that kvpress made from samsum can end in it twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar
from zipfile import BadZipFile, ZipFile

from evals.benchmark import Benchmark
from evals.data import check_manifest, data_dir, missing_data, parse_jsonl, read_parquet, sha256, sources, spread
from evals.sample import Rules, Sample
from evals.text_metrics import classification, qa_f1, rouge_l

PROMPTS, LIMITS = "dataset2prompt.json", "dataset2maxlen.json"
CONFIG_FOLDERS = ("", "config", "LongBench/config")  # of prepared data, of ours and of a checkout

# ------------------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """One data set.

    Args:
        category: the paper's; its score is the mean of its three tasks.
        metric: ``qa_f1``, ``rouge_l`` or ``classification``.
        limit: new tokens.
        question: where the question begins in the official template.
        cue: what the answer begins with; ends the template, or the ``input`` of the few-shot tasks.
        few_shot: examples lie in the context: no chat template, and only the first line of the answer counts.
        newline_stops: a newline ends the answer.
        rows: of the published file.
    """

    category: str
    metric: str
    limit: int
    question: str
    cue: str = "Answer:"
    few_shot: bool = False
    newline_stops: bool = False
    rows: int = 200


ASKED, QUERIED, GIVEN, SUMMARIZE = "Question: {input}", "Query: {input}", "{input}", "Now, write"
TASKS = {
    "narrativeqa": Task("single-doc QA", "qa_f1", 128, ASKED),
    "qasper": Task("single-doc QA", "qa_f1", 128, ASKED),
    "multifieldqa_en": Task("single-doc QA", "qa_f1", 64, ASKED, rows=150),
    "hotpotqa": Task("multi-doc QA", "qa_f1", 32, ASKED),
    "2wikimqa": Task("multi-doc QA", "qa_f1", 32, ASKED),
    "musique": Task("multi-doc QA", "qa_f1", 32, ASKED),
    "gov_report": Task("summarization", "rouge_l", 512, SUMMARIZE, cue="Summary:"),
    "qmsum": Task("summarization", "rouge_l", 512, QUERIED),
    "multi_news": Task("summarization", "rouge_l", 512, SUMMARIZE, cue="Summary:"),
    "trec": Task("few-shot", "classification", 64, GIVEN, cue="Type:", few_shot=True),
    "triviaqa": Task("few-shot", "qa_f1", 32, GIVEN, few_shot=True),
    "samsum": Task("few-shot", "rouge_l", 128, GIVEN, cue="Summary:", few_shot=True, newline_stops=True),
}


# ------------------------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class Parts:
    """A template, or a prompt made of it, in four pieces that join to the whole."""

    context: str
    instruction: str
    question: str
    cue: str


def cut_template(template: str, name: str) -> Parts:
    """An official template in pieces: up to the blank line after the context, up to the question, up to the cue, the cue.

    Raises:
        ValueError: a place where it is cut is missing.
    """
    task = TASKS[name]
    head, place, tail = template.partition("{context}")
    rest = tail.lstrip("\n")
    gap = tail[: len(tail) - len(rest)]
    instruction, opening, question = rest.partition(task.question)
    question, cue, after = (opening + question, "", "") if task.few_shot else (opening + question).rpartition(task.cue)
    if not (place and opening and (cue or task.few_shot)):
        needs = ["{context}", task.question] + ([] if task.few_shot else [task.cue])
        raise ValueError(f"{PROMPTS}: the template of {name} needs {', '.join(map(repr, needs))} in this order")
    return Parts(head + place + gap, instruction, question, cue + after)


def split_cue(text: str, cue: str) -> tuple[str, str]:
    """A text that ends in the cue (white space may follow), cut before it; the second part is empty if it does not."""
    body = text.rstrip()
    at = len(body) - len(cue) if cue and body.endswith(cue) else len(text)
    return text[:at], text[at:]


def fill(template: Parts, row: dict, name: str) -> Parts:
    """The prompt of an official row."""
    try:
        context, instruction, question, cue = (
            piece.format(**row) for piece in (template.context, template.instruction, template.question, template.cue)
        )
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{PROMPTS}: the template of {name} has a place {error} that its rows do not fill") from error
    if TASKS[name].few_shot:
        question, cue = split_cue(question, TASKS[name].cue)
    return Parts(context, instruction, question, cue)


def formatted(row: dict) -> Parts:
    """The prompt of a row that has been formatted before (Xnhyacinth/LongBench): instructions are in it."""
    return Parts(row["context"], "", split_cue(row["question"], row["answer_prefix"].strip())[0], row["answer_prefix"])


# --------------------------------------------------------------------------------------------------------------- data


def find_config(folder: Path, name: str) -> Path | None:
    """An official configuration file in a data folder or a checkout."""
    return next((p for p in (folder / sub / name for sub in CONFIG_FOLDERS) if p.is_file()), None)


@dataclass(frozen=True)
class Source:
    """Where a task's rows lie: a file, or a member of a zip file."""

    path: Path
    member: str | None = None

    @property
    def suffix(self) -> str:
        return ".parquet" if self.path.suffix == ".parquet" else ".jsonl"

    def read(self) -> bytes:
        if self.member is None:
            return self.path.read_bytes()
        try:
            with ZipFile(self.path) as archive:
                return archive.read(self.member)
        except BadZipFile as error:
            raise ValueError(f"{self.path} is damaged: get it again") from error

    def rows(self) -> list[dict]:
        if self.suffix == ".parquet":
            return read_parquet(self.path)
        return parse_jsonl(self.read(), f"{self.path}{f' ({self.member})' if self.member else ''}")


def find_rows(folder: Path, name: str) -> Source | None:
    """A task's rows in a folder: ``NAME.jsonl`` in it or in ``data``, the official ``data.zip``, or formatted parquet
    (``NAME.parquet``, or the hub's folder ``NAME``)."""
    for path in (folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"):
        if path.is_file():
            return Source(path)
    archive = folder / "data.zip"
    if archive.is_file():
        try:
            with ZipFile(archive) as opened:
                members = [m for m in opened.namelist() if m.rsplit("/", 1)[-1] == f"{name}.jsonl"]
        except BadZipFile as error:
            raise ValueError(f"{archive} is no zip file: get it again") from error
        if members:
            return Source(archive, members[0])
    parquet = [p for p in (folder / f"{name}.parquet", *sorted((folder / name).glob("test-*.parquet"))) if p.is_file()]
    if len(parquet) > 1:
        raise ValueError(f"{folder} has {len(parquet)} parquet files of {name}: leave one")
    return Source(parquet[0]) if parquet else None


def check_row(row: dict, where: str, classes: bool) -> None:
    """Raise a ValueError if a row lacks what a prompt or a score needs."""
    texts = ("context", "question", "answer_prefix") if "answer_prefix" in row else ("context", "input")
    bad = [k for k in texts if not isinstance(row.get(k), str)]
    for key in ("answers", "all_classes") if classes else ("answers",):
        value = row.get(key)
        if not (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
            bad.append(key)
    if bad:
        raise ValueError(f"{where} has no usable {', '.join(bad)}: prepare the data again")


# ---------------------------------------------------------------------------------------------------------- benchmark


@dataclass(frozen=True)
class LongBench(Benchmark):
    """LongBench's English tasks.

    Args:
        tasks: names out of ``TASKS``.
        n: rows per task, evenly spread over the file (:func:`evals.data.spread`); None: all.
        seed: which rows, if not all.
        data: folder with the rows; None: where ``scripts/prepare.py longbench`` puts them.
        templates: folder with the official ``dataset2prompt.json`` and ``dataset2maxlen.json``; ``auto``: the data folder.
            Formatted rows need none.
        max_length: tokens of a prompt above which its middle is taken out; None: what the model has room for.
        newline_stops: whether a newline ends the answers of samsum; None: as the preset.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    n: int | None = None
    seed: int = 42
    data: str | None = None
    templates: str = "auto"
    max_length: int | None = None
    newline_stops: bool | None = None

    name: ClassVar[str] = "longbench"
    truncates: ClassVar[bool] = True
    shorter: ClassVar[str] = "task.max_length"
    categories: ClassVar[dict[str, str]] = {name: task.category for name, task in TASKS.items()}
    PRESETS: ClassVar[dict[str, Rules]] = {
        "official": Rules(),
        "kvpress": Rules("agnostic", "context", "assistant", chat="always", raw_suffix="\n", extra_new_tokens=20),
        "defensivekv": Rules("agnostic", "question", "user", bos="chat"),
    }

    def __post_init__(self):
        super().__post_init__()
        tasks = (self.tasks,) if isinstance(self.tasks, str) else self.tasks
        if not isinstance(tasks, Sequence) or not tasks or set(tasks) - set(TASKS) or len(set(tasks)) < len(tasks):
            raise ValueError(f"task.tasks={self.tasks!r}: name one or more of {', '.join(TASKS)}, each once")
        object.__setattr__(self, "tasks", tuple(tasks))
        for field, least in (("n", 1), ("max_length", 2)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"task.{field}={value}: it has to be {least} or more, or null")

    def samples(self, tokenizer) -> list[Sample]:
        most = max(len(self._rows[name]) for name in self.tasks)
        if self.n is not None and self.n > most:  # of a task with fewer rows than others all are taken
            raise ValueError(f"task.n={self.n}: the largest of these tasks has {most} rows, lower task.n, or leave it out for all")
        return [self._sample(name, i) for name in self.tasks for i in spread(len(self._rows[name]), self.n, f"{self.seed}/{name}")]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Best over the references. ``rouge_overflow`` is 1 where the official scorer would have run out of stack."""
        task = TASKS[sample.task]
        if task.few_shot:
            prediction = prediction.lstrip("\n").split("\n")[0]
        if task.metric == "rouge_l":
            scores = [rouge_l(prediction, answer) for answer in sample.answers]
            return {"score": max(s for s, _ in scores), "rouge_overflow": float(any(deep for _, deep in scores))}
        if task.metric == "classification":
            return {"score": max(classification(prediction, answer, sample.classes) for answer in sample.answers)}
        return {"score": max(qa_f1(prediction, answer) for answer in sample.answers)}

    def fingerprint(self) -> dict[str, str]:
        return {"rouge": version("rouge"), **self._digests}

    def card(self) -> dict:
        return super().card() | {
            "tasks": list(self.tasks),
            "n": self.n,
            "seed": self.seed,
            "max_length": self.max_length,
            "newline_stops": self._newline_stops,
            "sources": sources(data_dir(self.name, self.data), self._digests.values()),
        }

    @property
    def _newline_stops(self) -> bool:
        return self.preset != "kvpress" if self.newline_stops is None else self.newline_stops

    @cached_property
    def _sources(self) -> dict[str, Source]:
        where = data_dir(self.name, self.data)
        found = {name: find_rows(where, name) for name in self.tasks}
        missing = [f"{name}.jsonl" for name, source in found.items() if source is None]
        if missing:
            raise missing_data(self.name, where, missing)
        check_manifest(where, {source.path.relative_to(where).as_posix() for source in found.values()})
        return found

    @cached_property
    def _rows(self) -> dict[str, list[dict]]:
        found = {name: source.rows() for name, source in self._sources.items()}
        for name, rows in found.items():
            if not rows:
                raise ValueError(f"{self._sources[name].path} has no rows of {name}: prepare the data again")
            for i, row in enumerate(rows):
                check_row(row, f"{self._sources[name].path} row {i} of {name}", TASKS[name].metric == "classification")
        return found

    @cached_property
    def _digests(self) -> dict[str, str]:
        """SHA-256 of every file that is read."""
        digests = {f"data_{name}": sha256(source.read()) for name, source in self._sources.items()}
        if any("answer_prefix" not in rows[0] for rows in self._rows.values()):
            digests |= {name: sha256(self._config(name).read_bytes()) for name in (PROMPTS, LIMITS)}
        return digests

    def _config(self, name: str) -> Path:
        where = data_dir(self.name, self.data if self.templates == "auto" else self.templates)
        path = find_config(where, name)
        if path is None:
            raise missing_data(self.name, where, [name])
        return path

    @cached_property
    def _official(self) -> tuple[dict[str, Parts], dict[str, int]]:
        """Templates and limits of the official files."""
        values = []
        for name in (PROMPTS, LIMITS):
            path, kind = self._config(name), str if name == PROMPTS else int
            try:
                value = json.loads(path.read_bytes())
                values.append({task: value[task] for task in self.tasks})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} has no entry for {error}: take the official file") from error
            if not all(isinstance(v, kind) for v in values[-1].values()):
                raise ValueError(f"{path} has an entry that is no {kind.__name__}: take the official file")
        return {task: cut_template(template, task) for task, template in values[0].items()}, values[1]

    def _sample(self, name: str, index: int) -> Sample:
        task, row = TASKS[name], self._rows[name][index]
        if "answer_prefix" in row:
            parts, limit = formatted(row), task.limit
            if (self.rules.protocol, self.rules.instruction_side) == ("agnostic", "question") and task.question in (ASKED, QUERIED):
                raise ValueError(
                    f"the rows of {name} are formatted, with the instruction inside the context: set "
                    f"task.instruction_side=context, or give official rows for task.preset={self.preset}"
                )
        else:
            templates, limits = self._official
            parts, limit = fill(templates[name], row, name), limits[name]
        # DefensiveKV's own copy of the qasper template lacks a space here; the other eleven are official
        instruction = parts.instruction.lstrip(" ") if self.preset == "defensivekv" else parts.instruction
        return Sample(
            id=f"{name}-{index:04d}",
            task=name,
            context=parts.context,
            instruction=instruction,
            question=parts.question,
            answer_prefix=parts.cue,
            answers=tuple(row["answers"]),
            max_new_tokens=limit,
            chat=not task.few_shot,
            classes=tuple(row.get("all_classes") or ()),
            newline_stops=task.newline_stops and self._newline_stops,
            meta={"row": index, **{k: row[k] for k in ("_id", "length") if k in row}},
        )
