"""Weights & Biases with no network: what an offline run holds, resuming, and how fast online gives up."""

import json
import struct
import time
from pathlib import Path

import pytest
import wandb
from omegaconf import OmegaConf
from wandb.proto import wandb_internal_pb2 as pb

from evals.loggers import NoLogger, WandbLogger, log_report, make_logger
from evals.tables import Entry, Grid
from test_runner import config_of

BLOCK, HEAD = 32768, 7
ROW = {"id": "vt-0", "task": "vt", "status": "ok", "score": 0.5, "prediction": "a", "kv_bytes_peak": 10, "error": None}


def records(path: Path):
    """The records of an offline run: a LevelDB log of protobuf messages. Bound to this release of wandb, so only used here."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, part = HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEAD])
        body = data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if len(body) < size or kind == 0:
            return
        part = body if kind in (1, 2) else part + body
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            yield record


def mirrored(folder: Path) -> dict:
    """What the offline runs in a folder hold: run records, history and summary."""
    wandb.teardown()  # what its service has not written yet is written now
    out = {"runs": [], "history": [], "summary": {}}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                out["runs"].append(record.run)
            elif kind == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                out["history"].append(items)
            elif kind == "summary":
                keys = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
                out["summary"] |= keys
    return out


def config(**logger):
    made = config_of("logger=wandb", "method=snapkv", "budget=0.2")
    return OmegaConf.merge(made, {"logger": logger})


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield
    wandb.teardown()


def test_an_offline_run_can_be_read_back(tmp_path):
    asked = config(group="table2-cpu")
    assert asked.logger.mode == "offline"
    logger = make_logger(asked, "snapkv-model-ruler-0.2-s42-0123abcd", tmp_path)
    logger.log(ROW)
    logger.log(ROW | {"id": "vt-1", "score": 1.0})
    logger.finish({"score": 0.75, "per_task": {"vt": {"score": 0.75}}, "kv_ratio_peak": 0.2})
    seen = mirrored(tmp_path)
    (run,) = seen["runs"]
    assert (run.run_id, run.run_group, run.display_name) == ("0123abcd", "table2-cpu", "snapkv-model-ruler-0.2-s42-0123abcd")
    assert run.job_type == "ruler" and run.project == "qevict"
    sent = {u.key or "/".join(u.nested_key): json.loads(u.value_json) for u in run.config.update}
    assert sent["budget"] == 0.2 and sent["method"]["observe"] == 32 and isinstance(sent["method"], dict)
    scores = [h["score/vt"] for h in seen["history"] if "score/vt" in h]
    assert scores == [0.5, 1.0] and [h["kv_bytes_peak"] for h in seen["history"] if "score/vt" in h] == [10, 10]
    assert seen["summary"]["score"] == 0.75 and seen["summary"]["score/vt"] == 0.75
    (table,) = [json.loads(f.read_text()) for f in tmp_path.rglob("*.table.json")]
    assert table["columns"][:4] == ["id", "task", "status", "score"] and [r[0] for r in table["data"]] == ["vt-0", "vt-1"]
    assert [f.name for f in Path.cwd().iterdir()] == ["wandb"]  # nothing beside the folder that was asked for


def test_a_restart_goes_on_under_the_same_id_and_a_broken_run_does_not_block_the_next(tmp_path):
    first = WandbLogger(config(), "a-0123abcd", tmp_path / "a")
    first.log(ROW)  # then an error ends it: nobody calls finish
    other = WandbLogger(config(), "b-99999999", tmp_path / "b")
    other.log(ROW)
    other.finish({"per_task": {}})
    again = WandbLogger(config(), "a-0123abcd", tmp_path / "a")
    again.log(ROW | {"score": 1.0})
    again.finish({"per_task": {}})
    assert [r.run_id for r in mirrored(tmp_path / "b")["runs"]] == ["99999999"]
    assert {r.run_id for r in mirrored(tmp_path / "a")["runs"]} == {"0123abcd"}
    assert [h["score"] for h in mirrored(tmp_path / "a")["history"] if "score/vt" in h][-1] == 1.0


def test_online_without_a_network_gives_up_in_seconds_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"logger.mode=online failed .*: use logger.mode=offline and `wandb sync` later"):
        WandbLogger(config(mode="online", timeout_s=2), "a-0123abcd", tmp_path)
    assert time.monotonic() - began < 60  # some 10 s on an idle core; wandb's own limit is 90 s, then it tries on
    logger = WandbLogger(config(), "a-0123abcd", tmp_path)  # the way out works in the same process
    logger.finish({"per_task": {}})
    assert len(mirrored(tmp_path)["runs"]) == 1


def test_tables_and_figures_are_one_more_run_of_the_group(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.figure().savefig(tmp_path / "f.png")
    grid = Grid("t", "Title", ("method", "score"), 1, ((Entry(text="snapkv"), Entry(50.0, 1.0, paper=46.4)),), ())
    log_report("table2-cpu", [grid], [tmp_path / "f.png"], tmp_path)
    (run,) = mirrored(tmp_path)["runs"]
    assert (run.run_group, run.run_id, run.job_type) == ("table2-cpu", "table2-cpu-report", "report")
    (table,) = [json.loads(f.read_text()) for f in tmp_path.rglob("*.table.json")]
    assert table["data"] == [["snapkv", "50.0 ±1.0 [46.4]"]]
    assert list(tmp_path.rglob("media/images/**/*.png"))


def test_without_a_logger_nothing_happens(tmp_path):
    logger = make_logger(config_of(), "x", tmp_path)
    assert isinstance(logger, NoLogger) and logger.log(ROW) is None and logger.finish({}) is None
    assert not list(tmp_path.iterdir())
