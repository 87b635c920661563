"""RULER prompts that others made, in their three layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from evals.ruler import TASKS, Ruler
from evals.sample import Sample, render
from test_ruler import word_tokenizer, write_questions

LM_EVAL = {"vt": "ruler_vt", "cwe": "ruler_cwe", "fwe": "ruler_fwe", "qa_1": "ruler_qa_squad", "qa_2": "ruler_qa_hotpot"}


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory) -> list[Sample]:
    data = write_questions(tmp_path_factory.mktemp("ruler"))
    return Ruler(tasks="all", length=1024, n=2, data=data).samples(tokenizer)


def columns(sample: Sample) -> dict:
    """kvpress' and xAlg-AI's."""
    return {
        "context": sample.context,
        "question": sample.question,
        "answer_prefix": sample.answer_prefix,
        "answer": list(sample.answers),
        "task": sample.task,
        "max_new_tokens": sample.max_new_tokens + 1,
    }


def official(sample: Sample) -> dict:
    return {
        "index": 7,
        "input": sample.context + sample.question,
        "outputs": list(sample.answers),
        "length": 1000,
        "length_w_model_temp": 1000,
        "answer_prefix": sample.answer_prefix,
    }


def lm_eval(sample: Sample) -> dict:
    return {
        "index": 7,
        "input": sample.context + sample.question,
        "outputs": list(sample.answers),
        "length": 1000,
        "max_length": 1024,
        "gen_prefix": sample.answer_prefix.strip(),
        "task": LM_EVAL.get(sample.task, sample.task),
    }


def jsonl(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def without_meta(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, meta={}) for sample in samples]


def test_columns_in_parquet_and_jsonl(made, tokenizer, tmp_path):
    rows = [columns(sample) for sample in made]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    wanted = [replace(sample, max_new_tokens=sample.max_new_tokens + 1) for sample in without_meta(made)]
    for path in (str(tmp_path / "rows.parquet"), jsonl(tmp_path / "rows.jsonl", rows)):
        bench = Ruler(tasks="all", files=path, preset="kvpress")
        samples = bench.samples(tokenizer)
        assert without_meta(samples) == wanted
        assert [s.meta for s in samples] == [{"tokens": len(render(s, tokenizer, bench.rules))} for s in samples]
    assert {s.max_new_tokens for s in Ruler(tasks="all", files=path, max_new_tokens=9).samples(tokenizer)} == {9}


def test_official_lines_say_their_task_by_folder_or_name(made, tokenizer, tmp_path):
    for task in TASKS:
        rows = [official(sample) for sample in made if sample.task == task]
        jsonl(tmp_path / "folders" / task / "validation.jsonl", rows)
        jsonl(tmp_path / "names" / f"{task}.jsonl", rows)
    for pattern in ("folders/*/validation.jsonl", "names/*.jsonl", "**/names/*"):
        samples = Ruler(tasks="all", files=str(tmp_path / pattern)).samples(tokenizer)
        assert without_meta(samples) == without_meta(made)
        assert {sample.meta["length"] for sample in samples} == {1000}
        assert all(sample.meta["tokens"] for sample in samples)


def test_lm_eval_documents(made, tokenizer, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [lm_eval(sample) for sample in made])
    samples = Ruler(tasks="all", files=path).samples(tokenizer)
    # what lm-eval strips: the space in front comes back, that behind vt's prefix is lost
    wanted = [replace(sample, answer_prefix=sample.answer_prefix.rstrip()) for sample in without_meta(made)]
    assert without_meta(samples) == wanted


def test_tasks_and_number(made, tokenizer, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [columns(sample) for sample in made])
    samples = Ruler(tasks=("vt", "niah_single_1"), n=1, files=path).samples(tokenizer)
    assert [sample.id for sample in samples] == ["vt-0000", "niah_single_1-0000"]
    assert Ruler(tasks="vt", files=path, haystack="no/such/folder").score(samples[0], " ".join(samples[0].answers)) == {
        "score": 1.0
    }


def test_fingerprint_is_that_of_the_content(made, tmp_path):
    one, same, other = (
        Ruler(tasks="vt", files=jsonl(tmp_path / f"{i}.jsonl", [columns(sample) for sample in rows])).fingerprint()
        for i, rows in enumerate((made, made, made[1:]))
    )
    assert one == same != other
    assert set(one) == {"files"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task": "vt"}, "row 1 of .* has neither context nor an input that holds vt's question"),
        ({"task": "vt", "input": "What now?", "outputs": ["x"], "answer_prefix": ""}, "holds vt's question"),
        ({"task": "vt", "input": "Question: Find all variables", "outputs": ["x"]}, "lacks a part.*old generator"),
        ({"task": "vt", "input": "Question: Find all variables", "outputs": [], "answer_prefix": ""}, "lacks a part"),
        ({"task": "vt", "context": "x", "question": "y", "answer_prefix": None, "answer": ["z"]}, "lacks a part"),
        ({"task": "other", "context": "x"}, "does not say its task"),
        ({"task": "cwe", "context": "x", "question": "y", "answer_prefix": "", "answer": "z"}, r"no rows of vt: .* some of cwe"),
    ],
)
def test_rows_that_cannot_be_read(row, message, tokenizer, tmp_path):
    bench = Ruler(tasks="vt", files=jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(ValueError, match=message):
        bench.samples(tokenizer)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"task\.files='.*nothing\.jsonl' matches no file"):
        Ruler(files=str(tmp_path / "nothing.jsonl"))
    (tmp_path / "rows.csv").write_text("x")
    with pytest.raises(ValueError, match=r"rows\.csv is neither"):
        Ruler(files=str(tmp_path / "*.csv"))
