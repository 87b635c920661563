"""RULER's scores, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from evals.ruler import TASKS, Ruler
from evals.sample import Sample
from test_ruler import word_tokenizer, write_questions


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_questions(tmp_path_factory.mktemp("ruler"))


# ----------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize(
    ("answers", "prediction", "score"),
    [
        (("1234567",), " 1234567.", 1.0),
        (("1234567",), "123 4567", 0.0),
        (("1234567",), "", 0.0),
        (("AbC-d",), "it is aBc-D", 1.0),
        (("1", "2", "3", "4"), "1, 3 and 5", 0.5),
        (("1234567",), "\x00\x1f1234567\x07", 1.0),
        (("1234567",), "123\x004567", 0.0),  # a control character becomes a newline; it is not dropped
    ],
)
def test_score(answers, prediction, score):
    for task in ("niah_single_1", "vt", "cwe", "fwe"):
        sample = Sample("x", task, "", "", "", answers, 128)
        assert Ruler().score(sample, prediction) == {"score": score}
    for task in ("qa_1", "qa_2"):  # any reference will do
        assert Ruler().score(replace(sample, task=task), prediction) == {"score": float(score > 0)}


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": ("niah_single_1", "niah_single_9")}, r"niah_single_9.*niah_multiquery"),
        ({"tasks": ()}, r"task\.tasks=\[\].*niah_single_1"),
        ({"tasks": ("niah_single_1", "niah_single_1")}, "each once"),
        ({"n": 0}, r"task\.n=0: .*1 or more"),
        ({"max_new_tokens": 0}, r"task\.max_new_tokens=0: .*1 or more"),
        ({"tasks": "offline2"}, "a group .niah, offline, all"),
        ({"tasks": ("niah", "niah_single_1")}, "each once"),
        ({"tasks": 7}, r"task\.tasks=7"),
        ({"preset": "other"}, r"task\.preset='other': choose official or kvpress or defensivekv"),
        ({"protocol": "blind"}, r"task\.protocol='blind': choose aware or agnostic"),
        ({"haystack": "no/such/folder"}, r"task\.haystack='no/such/folder'.*\*\.txt"),
        ({"templates": "no/such/file.json"}, r"task\.templates='no/such/file\.json'.*builtin"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Ruler(**fields)


def test_empty_haystack_folder(tmp_path):
    with pytest.raises(ValueError, match=r"has no text.*\*\.txt"):
        Ruler(haystack=str(tmp_path))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="has no text"):
        Ruler(haystack=str(tmp_path))
    Ruler(tasks="niah_single_1", haystack=str(tmp_path))  # reads no prose


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "'templates' key"),
        ("{}", "'templates' key"),
        ('{"templates": {}}', r"lacks templates\.niah\.template"),
        ('{"templates": {"niah": {"template": "x"}}}', r"lacks templates\.niah\.answer_prefix"),
        ('{"templates": {"niah": {"template": "{context} Why?", "answer_prefix": ""}}}', "opens with"),
        (
            '{"templates": {"niah": {"template": "{context}{x}What is the special magic", "answer_prefix": ""}}}',
            "nothing fills: 'x'",
        ),
        ('{"templates": {"niah": {"template": "What are all the special magic", "answer_prefix": ""}}}', "{context}"),
    ],
)
def test_bad_template_file(content, message, tmp_path):
    path = tmp_path / "templates.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Ruler(tasks="niah", templates=str(path))


def test_missing_question_files(tmp_path, data, tokenizer):
    with pytest.raises(ValueError, match=r"has no squad\.json; get it with `python scripts/prepare\.py ruler`"):
        Ruler(tasks=("vt", "qa_1"), data=str(tmp_path))
    (tmp_path / "squad.json").write_text('{"data": [{"title": "x"}]}')
    with pytest.raises(ValueError, match=r"squad\.json has not the form"):
        Ruler(tasks="qa_1", data=str(tmp_path)).samples(tokenizer)
    (tmp_path / "squad.json").write_text('{"data": []}')
    with pytest.raises(ValueError, match=r"squad\.json has no question with an answer"):
        Ruler(tasks="qa_1", data=str(tmp_path)).samples(tokenizer)
    with pytest.raises(ValueError, match=r"task\.n=20: hotpotqa\.json has 8 questions"):
        Ruler(tasks="qa_2", data=data).samples(tokenizer)


@pytest.mark.parametrize("task", TASKS)
def test_length_too_small_names_the_smallest(task, tokenizer, data):
    bench = Ruler(tasks=(task,), length=60, n=3, data=data)
    with pytest.raises(ValueError, match=rf"task\.length=60 is too small for {task}") as error:
        bench.samples(tokenizer)
    smallest = int(re.search(r"set it to (\d+) tokens", str(error.value))[1])
    assert len(replace(bench, length=smallest).samples(tokenizer)) == 3
    with pytest.raises(ValueError, match="too small"):
        replace(bench, length=smallest - 1).samples(tokenizer)
