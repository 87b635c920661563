"""Finished runs by what they are: from a configuration to the run directory that holds its samples.

Nothing but the records is read, so tables can be made where there is neither model nor data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from evals.records import digest, read_json
from evals.runner import PATHS


def key(config: DictConfig) -> str:
    """Eight hex digits of what decides a run's result. Of paths the last part counts, so that machines agree; fields of a method
    or a task that a record does not have, because they are newer, are at their defaults."""
    c = OmegaConf.to_container(config, resolve=True)
    asked = (float(c["budget"]), None, None)
    if c["budget_bytes"] is not None or c["budget_tokens"] is not None:
        asked = (None, c["budget_bytes"], c["budget_tokens"])
    method = instantiate(config.method)
    if method.unlimited:
        asked = None
    task = {f.name: f.default for f in fields(get_class(c["task"]["_target_"]))} | c["task"]
    task = {k: Path(v).name if k in PATHS and isinstance(v, str) else v for k, v in task.items()}
    model = c["model"] | {"path": Path(c["model"]["path"]).name}
    parts = {k: c[k] for k in ("method_name", "cache", "seed", "backend")} | {"method": [c["method"]["_target_"], repr(method)]}
    return digest(parts | {"budget": asked, "task": task, "model": model})


def read_rows(path: Path) -> list[dict]:
    """Rows of a ``samples.jsonl``; lines that are none are dropped, of rows with the same id the last counts."""
    rows = {}
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "id" in row:
            rows[row["id"]] = row
    return list(rows.values())


@dataclass(frozen=True)
class Record:
    """A run directory, as far as it has come."""

    path: Path
    key: str

    @cached_property
    def rows(self) -> list[dict]:
        return read_rows(self.path / "samples.jsonl")

    @cached_property
    def status(self) -> dict:
        return read_json(self.path / "status.json") or {"state": "unknown", "done": len(self.rows), "total": None, "error": None}

    @cached_property
    def start(self) -> dict:
        """Environment of the last start."""
        return ((read_json(self.path / "env.json") or {}).get("starts") or [{}])[-1]

    @cached_property
    def card(self) -> dict:
        """How the numbers came about; empty before the run is finished."""
        return (read_json(self.path / "metrics.json") or {}).get("card", {})

    @property
    def changed(self) -> float:
        """When the run last said how it is going, in seconds since the epoch."""
        file = self.path / "status.json"
        return file.stat().st_mtime if file.is_file() else 0.0

    @property
    def done(self) -> bool:
        """Says that it is, and its samples are all there: lines may have been lost since."""
        return self.status["state"] == "done" and len(self.rows) >= (self.status["total"] or 0)

    @property
    def failed(self) -> int:
        """Samples that ended in an error."""
        return sum(r.get("status") != "ok" for r in self.rows)


def records(folders: Iterable[str]) -> dict[str, list[Record]]:
    """All runs in these results folders, by key; of one key the finished, then the longest, then the newest first."""
    found: dict[str, list[Record]] = {}
    for folder in dict.fromkeys(folders):
        for file in sorted(Path(folder).glob("*/config.yaml")):
            try:
                record = Record(file.parent, key(OmegaConf.load(file)))
            except Exception:  # a record of a method that is gone, or half a file: nobody asks for it
                continue
            found.setdefault(record.key, []).append(record)
    for same in found.values():
        same.sort(key=lambda r: (r.done, len(r.rows), (r.path / "config.yaml").stat().st_mtime), reverse=True)
    return found
