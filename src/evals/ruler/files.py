"""Samples from files that others made: kvpress' and xAlg-AI's columns, the official scripts' lines, and lm-eval's documents."""

from __future__ import annotations

import hashlib
from glob import glob
from pathlib import Path

from evals.data import read_jsonl, read_parquet
from evals.ruler.tasks import TASKS
from evals.ruler.templates import split_question
from evals.sample import Sample

LM_EVAL = {"ruler_vt": "vt", "ruler_cwe": "cwe", "ruler_fwe": "fwe", "ruler_qa_squad": "qa_1", "ruler_qa_hotpot": "qa_2"}


def find_files(pattern: str) -> list[Path]:
    """Files of a path or glob, sorted.

    Raises:
        ValueError: there is none, or one is neither ``.jsonl`` nor ``.parquet``.
    """
    found = [Path(path) for path in sorted(glob(str(Path(pattern).expanduser()), recursive=True)) if Path(path).is_file()]
    if not found:
        raise ValueError(
            f"task.files={pattern!r} matches no file: name a .jsonl or .parquet file, or a glob such as 'made/*/*.jsonl'"
        )
    for path in found:
        if path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"task.files={pattern!r}: {path} is neither .jsonl nor .parquet")
    return found


def files_sha(paths: list[Path]) -> str:
    """SHA-256 over the contents, whatever the files' names."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def read_files(paths: list[Path], tasks: tuple[str, ...], n: int, max_new_tokens: int | None) -> list[Sample]:
    """The first ``n`` rows of each task, task by task.

    Raises:
        ValueError: a row has none of the three layouts, or an asked task has no row.
    """
    samples: dict[str, list[Sample]] = {}
    for path in paths:
        for number, row in enumerate(read_jsonl(path) if path.suffix == ".jsonl" else read_parquet(path), 1):
            try:
                name = _task(row, path)
                mine = samples.setdefault(name, [])
                if name in tasks and len(mine) < n:
                    mine.append(_sample(row, name, len(mine), max_new_tokens))
            except ValueError as error:
                raise ValueError(f"task.files: row {number} of {path} {error}") from error
    missing = [name for name in tasks if name not in samples]
    if missing:
        raise ValueError(
            f"task.files has no rows of {', '.join(missing)}: set task.tasks to some of {', '.join(samples) or 'none (no rows)'}"
        )
    return [sample for name in tasks for sample in samples[name]]


def _task(row: dict, path: Path) -> str:
    """The row says it, or the file's name, or its folder's (as the official scripts lay them out)."""
    for name in (row.get("task"), path.stem, path.parent.name):
        name = LM_EVAL.get(name, name)
        if name in TASKS:
            return name
    raise ValueError(f"does not say its task: add a column task, or name the file after one of {', '.join(TASKS)}")


def _sample(row: dict, name: str, index: int, max_new_tokens: int | None) -> Sample:
    task = TASKS[name]
    if "context" in row:
        parts, answers = (row["context"], row.get("question"), row.get("answer_prefix")), row.get("answer")
    else:
        parts, answers = (*_cut(row, name), _prefix(row)), row.get("outputs")
    answers = [answers] if isinstance(answers, str) else answers
    if not all(isinstance(part, str) for part in parts) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(
            "lacks a part: needs context, question, answer_prefix and answer, or input, outputs and answer_prefix or gen_prefix "
            "(files that have the prefix inside input come from an old generator: make them again)"
        )
    return Sample(
        id=f"{name}-{index:04d}",
        task=name,
        context=parts[0],
        question=parts[1],
        answer_prefix=parts[2],
        answers=tuple(answers),
        max_new_tokens=max_new_tokens or int(row.get("max_new_tokens") or task.new_tokens),
        meta={"length": row["length"]} if row.get("length") else {},
    )


def _cut(row: dict, name: str) -> tuple[str, str]:
    text = row.get("input")
    parts = split_question(text, TASKS[name].family) if isinstance(text, str) else None
    if parts is None:
        raise ValueError(f"has neither context nor an input that holds {name}'s question")
    return parts


def _prefix(row: dict) -> str | None:
    """lm-eval strips the prefix; the official space in front of it comes back."""
    if "answer_prefix" in row:
        return row["answer_prefix"]
    prefix = row.get("gen_prefix")
    return " " + prefix.lstrip() if isinstance(prefix, str) else None
