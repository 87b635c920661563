"""Preparing data: every layout is found, counted and written whole, and what is wrong is told in one sentence."""

import json
import os
import runpy
import sys
import urllib.error
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from evals import prepare as module
from evals.data import data_dir, read_manifest, sha256, sources
from evals.gsm8k import GSM8K, ROWS
from evals.longbench import LIMITS, PROMPTS, TASKS, LongBench
from evals.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(os.environ.get("QEVICT_TEST_DATA") or ROOT.parent / "shared/data")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The published files are large; the tests' have three rows. And no test asks a network."""
    monkeypatch.setattr(module, "TASKS", {name: type(task)(**{**vars(task), "rows": 3}) for name, task in TASKS.items()})
    monkeypatch.setattr(module, "ROWS", dict.fromkeys(ROWS, 3))

    def offline(*args, **kwargs):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(module.urllib.request, "urlopen", offline)


def problems(count=3):
    return [{"question": f"{i}+1? \u2028", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(count)]


def jsonl(rows):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def articles(name, count=3):
    shared = {"context": f"{name}", "answers": ["x"], "length": 1, "all_classes": ["x"], "_id": "0"}
    return [{**shared, "input": f"{i}?"} for i in range(count)]


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def check(folder, manifest):
    assert manifest == json.loads((folder / "manifest.json").read_text())
    for name, about in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert about["sha256"] == sha256(content) and about["bytes"] == len(content)
    assert not list(folder.glob(".new-*"))


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# ----------------------------------------------------------------------------------------------------------- longbench


def config(folder):
    folder.mkdir(parents=True)
    (folder / PROMPTS).write_text(json.dumps({"qasper": "{context}\n\nDo.\n\nQuestion: {input}\nAnswer:"}))
    (folder / LIMITS).write_text(json.dumps({"qasper": 128}))


def test_a_checkout_with_the_official_archive(tmp_path):
    config(tmp_path / "from/LongBench/config")
    with ZipFile(tmp_path / "from/data.zip", "w") as archive:
        for name in (*TASKS, "lcc", "qasper_e"):
            archive.writestr(f"data/{name}.jsonl", jsonl(articles(name)))
    manifest = prepare("longbench", str(tmp_path / "from"), str(tmp_path / "to"), revision="abc")
    check(tmp_path / "to", manifest)
    assert files(tmp_path / "to") == sorted(
        [*(f"{n}.jsonl" for n in TASKS), f"config/{PROMPTS}", f"config/{LIMITS}", "manifest.json"]
    )
    assert not manifest["missing"] and manifest["files"]["qasper.jsonl"]["rows"] == 3
    benchmark = LongBench(tasks=("qasper",), data=str(tmp_path / "to"))
    assert len(benchmark.samples(None)) == 3 and benchmark.card()["sources"] == ["local/from@abc"]


def test_a_part_of_longbench_is_named_as_such_and_can_be_completed(tmp_path):
    config(tmp_path / "from/config")
    (tmp_path / "from/qasper.jsonl").write_text(jsonl(articles("qasper")))
    (tmp_path / "to").mkdir()
    (tmp_path / "to/notes.txt").write_text("mine")
    manifest = prepare("longbench", str(tmp_path / "from"), str(tmp_path / "to"))
    assert manifest["missing"] == [f"{name}.jsonl" for name in TASKS if name != "qasper"]
    table(tmp_path / "hub/trec/test-00000-of-00001.parquet", articles("trec"))
    manifest = prepare("longbench", str(tmp_path / "hub"), str(tmp_path / "to"), revision="main")
    check(tmp_path / "to", manifest)
    assert set(manifest["files"]) == {"qasper.jsonl", "trec.parquet", f"config/{PROMPTS}", f"config/{LIMITS}"}
    assert "trec.jsonl" not in manifest["missing"] and len(manifest["missing"]) == 10
    assert manifest["files"]["trec.parquet"]["revision"] == "main" and manifest["files"]["qasper.jsonl"]["revision"] is None
    assert (tmp_path / "to/notes.txt").read_text() == "mine"


def test_a_wrong_row_count_writes_nothing(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from/qasper.jsonl").write_text(jsonl(articles("qasper", 2)))
    with pytest.raises(ValueError, match="has 2 rows, not the 3 that were published"):
        prepare("longbench", str(tmp_path / "from"), str(tmp_path / "to"))
    assert not (tmp_path / "to").exists()


def test_a_killed_writer_leaves_the_old_files(tmp_path, monkeypatch):
    (tmp_path / "from").mkdir()
    (tmp_path / "from/test.jsonl").write_text(jsonl(problems()))
    before = prepare("gsm8k", str(tmp_path / "from"), str(tmp_path / "to"))
    (tmp_path / "from/test.jsonl").write_text(jsonl(problems()[::-1]))

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_copy", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare("gsm8k", str(tmp_path / "from"), str(tmp_path / "to"))
    check(tmp_path / "to", before)


# --------------------------------------------------------------------------------------------------------------- gsm8k


@pytest.mark.parametrize("layout", ["", "grade_school_math/data", "main"])
def test_gsm8k_from_every_layout(tmp_path, layout):
    source = tmp_path / "from" / layout
    source.mkdir(parents=True)
    for name in ROWS:
        if layout == "main":
            table(source / f"{name.split('.')[0]}-00000-of-00001.parquet", problems())
        else:
            (source / name).write_text(jsonl(problems()), "utf-8")
    manifest = prepare("gsm8k", str(tmp_path / "from"), str(tmp_path / "to"))
    check(tmp_path / "to", manifest)
    assert (tmp_path / "to/test.jsonl").read_text("utf-8") == jsonl(problems()) and not manifest["missing"]
    assert GSM8K(data=str(tmp_path / "to"), shots=2).samples(None)[1].answers == ("2",)


def test_prepared_data_keeps_its_source_when_it_is_carried_on(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from/test.jsonl").write_text(jsonl(problems()))
    prepare("gsm8k", str(tmp_path / "from"), str(tmp_path / "to"), "r1")
    again = prepare("gsm8k", str(tmp_path / "to"), str(tmp_path / "there"))
    assert again["files"]["test.jsonl"]["source"] == "local/from" and again["files"]["test.jsonl"]["revision"] == "r1"
    assert sources(tmp_path / "there", [again["files"]["test.jsonl"]["sha256"], "?"]) == ["local/from@r1"]
    (tmp_path / "there/manifest.json").write_text("[]")
    assert read_manifest(tmp_path / "there") == {} and sources(tmp_path / "there", ["?"]) == []


# --------------------------------------------------------------------------------------------------------------- ruler

SQUAD = [
    {"id": "1", "title": "T", "context": "c1", "question": "q1", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}},
    {"id": "2", "title": "T", "context": "c1", "question": "q2", "answers": {"text": [], "answer_start": []}},
    {"id": "3", "title": "T", "context": "c2", "question": "q3", "answers": {"text": ["d"], "answer_start": [2]}},
    {"id": "4", "title": "U", "context": "c3", "question": "q4", "answers": {"text": ["e"], "answer_start": [3]}},
]
HOTPOT = [
    {
        "id": "5",
        "question": "q",
        "answer": "a",
        "type": "bridge",
        "level": "hard",
        "context": {"title": ["A", "B"], "sentences": [["s1", "s2"], ["s3"]]},
        "supporting_facts": {"title": ["A"], "sent_id": [1]},
    }
]


def test_ruler_takes_what_is_there(tmp_path):
    source = tmp_path / "from"
    (source / "essays").mkdir(parents=True)
    (source / "essays/one.txt").write_text("prose")
    (source / "dev-v2.0.json").write_text(json.dumps(module.squad_json(SQUAD)))
    table(source / "distractor/validation-00000-of-00001.parquet", HOTPOT)
    table(source / "prebuilt/4096.parquet", [{"context": "x"}] * 4)
    manifest = prepare("ruler", str(source), str(tmp_path / "to"))
    check(tmp_path / "to", manifest)
    assert files(tmp_path / "to") == ["essays/one.txt", "hotpotqa.json", "manifest.json", "prebuilt/4096.parquet", "squad.json"]
    assert manifest["missing"] == ["templates.json"]
    assert manifest["files"]["squad.json"]["rows"] == 4 and manifest["files"]["squad.json"]["published_rows"] == 11873
    assert manifest["files"]["prebuilt/4096.parquet"]["rows"] == 4
    (source / "dev-v2.0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has not the form of the published dev-v2\.0\.json"):
        prepare("ruler", str(source), str(tmp_path / "to"))
    check(tmp_path / "to", manifest)


def test_the_hubs_rows_become_the_published_form():
    squad = module.squad_json(SQUAD)["data"]
    assert [a["title"] for a in squad] == ["T", "U"] and [p["context"] for p in squad[0]["paragraphs"]] == ["c1", "c2"]
    first = squad[0]["paragraphs"][0]["qas"]
    assert first[0]["answers"] == [{"text": "a", "answer_start": 0}, {"text": "b", "answer_start": 1}]
    assert [q["is_impossible"] for q in first] == [False, True]
    hotpot = module.hotpot_json(HOTPOT)[0]
    assert hotpot["context"] == [["A", ["s1", "s2"]], ["B", ["s3"]]] and hotpot["supporting_facts"] == [["A", 1]]


# ------------------------------------------------------------------------------------------------------------ download


def test_downloads_are_taken_with_their_revision(tmp_path, monkeypatch):
    asked = []

    def snapshot(repository, repo_type, revision, allow_patterns):
        asked.append((repository, repo_type, revision))
        folder = tmp_path / "hub/0123abcd"
        table(folder / "main/test-00000-of-00001.parquet", problems())
        table(folder / "main/train-00000-of-00001.parquet", problems())
        folder.joinpath("data.zip").unlink(missing_ok=True)
        with ZipFile(folder / "data.zip", "w") as archive:
            archive.writestr("data/qasper.jsonl", jsonl(articles("qasper")))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    manifest = prepare("gsm8k", None, str(tmp_path / "gsm8k"), revision="v1")
    check(tmp_path / "gsm8k", manifest)
    assert asked == [("openai/gsm8k", "dataset", "v1")]
    assert {(f["source"], f["revision"]) for f in manifest["files"].values()} == {("hub/openai/gsm8k", "0123abcd")}
    with pytest.raises(ValueError, match=r"no network in tests.*--from"):  # the templates come from elsewhere
        prepare("longbench", None, str(tmp_path / "longbench"))

    config(tmp_path / "config")
    contents = {name: (tmp_path / "config" / name).read_bytes() for name in (PROMPTS, LIMITS)}
    monkeypatch.setattr(module.urllib.request, "urlopen", lambda url, timeout: BytesIO(contents[url.rpartition("/")[2]]))
    with pytest.raises(ValueError, match="not the content that was checked"):
        prepare("longbench", None, str(tmp_path / "longbench"))
    monkeypatch.setattr(module, "TEMPLATES_SHA256", {name: sha256(content) for name, content in contents.items()})
    manifest = prepare("longbench", None, str(tmp_path / "longbench"))
    assert manifest["files"][f"config/{PROMPTS}"]["revision"] == module.TEMPLATES_REVISION
    assert manifest["files"]["qasper.jsonl"]["source"] == "hub/THUDM/LongBench"
    with pytest.raises(ValueError, match="names one repository"):
        prepare("ruler", None, str(tmp_path / "ruler"), revision="v1")


def test_without_a_network_one_sentence_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "argv", ["prepare.py", "longbench", "--to", str(tmp_path / "to")])
    script = runpy.run_path(str(ROOT / "scripts/prepare.py"))
    assert script["main"]() == 1 and not (tmp_path / "to").exists()
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1 and error.startswith("error: hub repository THUDM/LongBench cannot be read")
    assert "name a folder that has the files with --from" in error


def test_the_script_lists_what_it_wrote(tmp_path, monkeypatch, capsys):
    (tmp_path / "from").mkdir()
    (tmp_path / "from/test.jsonl").write_text(jsonl(problems()))
    command = ["prepare.py", "gsm8k", "--from", str(tmp_path / "from"), "--to", str(tmp_path / "to"), "--revision", "r1"]
    monkeypatch.setattr(sys, "argv", command)
    assert runpy.run_path(str(ROOT / "scripts/prepare.py"))["main"]() == 0
    first, partial, where = capsys.readouterr().out.splitlines()
    assert first.endswith("test.jsonl  3 rows  local/from@r1")
    assert partial == "partial: without train.jsonl" and where == str(tmp_path / "to")


@pytest.mark.parametrize("wrong", ["nowhere", "empty"])
def test_nothing_to_take(tmp_path, wrong):
    (tmp_path / "empty").mkdir()
    for benchmark in module.KINDS:
        with pytest.raises(ValueError, match=r"--from .* is no folder|has no .* data: it should have some of"):
            prepare(benchmark, str(tmp_path / wrong), str(tmp_path / "to"))
    assert not (tmp_path / "to").exists()


def test_where_runs_look(tmp_path, monkeypatch):
    monkeypatch.setenv("QEVICT_DATA", str(tmp_path))
    (tmp_path / "from").mkdir()
    (tmp_path / "from/test.jsonl").write_text(jsonl(problems()))
    prepare("gsm8k", str(tmp_path / "from"))
    assert data_dir("gsm8k") == tmp_path / "gsm8k" and len(GSM8K(shots=0).samples(None)) == 3


# ---------------------------------------------------------------------------------------------------------------- real


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no published data in {REAL}")
def test_published_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TASKS", TASKS)
    monkeypatch.setattr(module, "ROWS", ROWS)
    for benchmark, folder in (("longbench", REAL / "longbench"), ("gsm8k", REAL / "gsm8k"), ("ruler", REAL)):
        manifest = prepare(benchmark, str(folder), str(tmp_path / benchmark))
        check(tmp_path / benchmark, manifest)
    assert "templates.json" in manifest["files"] and sum(name.startswith("essays/") for name in manifest["files"]) == 49
    assert len(LongBench(tasks=("multi_news",), n=20, data=str(tmp_path / "longbench")).samples(None)) == 20
    assert len(GSM8K(n=30, data=str(tmp_path / "gsm8k")).samples(None)) == 30
