"""Run directories: where a run's records live, how it is identified, locked and resumed.

``results/runs/<readable>-<hash of the resolved configuration without paths>/`` holds ``config.yaml``, ``env.json``,
``samples.jsonl`` (one line per finished sample, flushed to disk), ``status.json`` and ``metrics.json``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import torch
from filelock import FileLock, Timeout

PACKAGES = ("qevict", "torch", "transformers", "tokenizers", "datasets", "hydra-core", "flash-attn")
LOCK = ".lock"


class RunError(RuntimeError):
    """A run directory that cannot be used. The message is one sentence."""


def digest(identity: dict) -> str:
    """Eight hex digits of a configuration, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]


def readable(*parts: object) -> str:
    """A folder name: letters, digits, dot, dash; anything else in a model or method name becomes a dash."""
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", str(p)).strip("-") for p in parts if p not in (None, ""))


@contextlib.contextmanager
def writing(path: Path):
    """Say which file could not be written and what to do, whatever the reason."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror or error}): mend that, then give the same command again"
        ) from error


def write_json(path: Path, value: object) -> None:
    overwrite(path, (json.dumps(value, indent=1, default=str) + "\n").encode())


def overwrite(path: Path, data: bytes) -> None:
    """Atomically: a killed process leaves the old file or the new one."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(scratch, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def read_json(path: Path) -> dict | None:
    """A record, or None if it is missing or damaged (it is then made anew)."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def environment(device: torch.device, model_source: dict) -> dict:
    """Versions, revision of the code, device and model source."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git": _git_revision(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "model": model_source,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@functools.cache  # the code that runs is the code that was there when the process began
def _git_revision() -> str | None:
    here = Path(__file__).parent
    try:
        sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha + ("+changes" if dirty.stdout.strip() else "")


def in_hand(path: Path) -> bool:
    """Whether a process is writing this run's folder; one that was killed leaves the state ``running``, but no lock."""
    lock = path / LOCK
    if not lock.exists():
        return False
    try:
        with FileLock(lock).acquire(timeout=0):
            return False
    except Timeout:
        return True


class RunDir:
    """One run's folder, owned by one process at a time.

    Raises:
        RunError: the folder cannot be written, or another process is writing it.
    """

    def __init__(self, root: str | Path, name: str, config_yaml: str):
        self.path = Path(root) / name
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / LOCK)
            self._lock.acquire(timeout=0.5)  # a plan holds it for a moment to see whether a process does
        except Timeout:
            raise RunError(
                f"{self.path} is being written by another process: wait for it, then give the same command again"
            ) from None
        except OSError as error:
            raise RunError(
                f"results_dir={root} cannot be written ({error.strerror or error}): set results_dir to a writable folder"
            ) from error
        self.finished: dict[str, dict] = {}
        self.damaged = 0  # lines of samples.jsonl that could not be read
        self.samples = self.path / "samples.jsonl"
        self._load()
        with writing(self.path / "config.yaml"):
            (self.path / "config.yaml").write_text(config_yaml)

    def _load(self) -> None:
        """Read finished samples. Lines that are no row (a killed process leaves half of one) are dropped; of rows with the
        same id the last counts."""
        if not self.samples.exists():
            return
        before, good = self.samples.read_bytes(), []
        for line in before.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("id"), str):
                self.finished[row["id"]] = row
                good.append(line + b"\n")
            else:
                self.damaged += 1
        if (mended := b"".join(good)) != before:  # also a last line without its end
            overwrite(self.samples, mended)

    def append(self, row: dict) -> None:
        """Add a finished sample; on disk when this returns."""
        with writing(self.samples), open(self.samples, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.finished[row["id"]] = row

    def status(self, state: str, total: int, error: str | None = None) -> None:
        """``state``: running, done, failed or interrupted. A killed process leaves ``running``; its lock is free then."""
        write_json(self.path / "status.json", {"state": state, "done": len(self.finished), "total": total, "error": error})

    def add_environment(self, env: dict) -> None:
        """One entry per start of the run, so that a run resumed elsewhere says so.

        Raises:
            RunError: finished samples come from another calibration.
        """
        path = self.path / "env.json"
        starts = (read_json(path) or {}).get("starts", [])
        before = {s.get("calibration") for s in starts} - {env.get("calibration")}
        if self.finished and before:
            raise RunError(
                f"{self.path} was made with another calibration ({before.pop()}): move it away, or restore that calibration"
            )
        write_json(path, {"starts": [*starts, env]})

    def close(self) -> None:
        self._lock.release()
