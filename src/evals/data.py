"""Where prepared benchmark data lies: one folder per benchmark, with a manifest of what each file is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from random import Random

from qevict.artifact import cache_dir

MANIFEST = "manifest.json"


def data_dir(benchmark: str, folder: str | None = None) -> Path:
    """``folder`` if given, else ``$QEVICT_DATA/<benchmark>``, else in the user's cache."""
    if folder is not None:
        return Path(folder).expanduser()
    base = os.environ.get("QEVICT_DATA")
    return (Path(base) if base else cache_dir() / "data") / benchmark


def require(benchmark: str, names: list[str], folder: str | None = None) -> list[Path]:
    """Files of a benchmark's folder.

    Raises:
        ValueError: one is missing, with the command that gets it.
    """
    where = data_dir(benchmark, folder)
    missing = [n for n in names if not (where / n).is_file()]
    if missing:
        raise missing_data(benchmark, where, missing)
    check_manifest(where, names)
    return [where / n for n in names]


def check_manifest(where: Path, names: Iterable[str]) -> None:
    """Raise a ValueError if one of these files is not what the folder's manifest says it is."""
    known = read_manifest(where).get("files", {})
    for name in names:
        if name in known and known[name]["sha256"] != sha256((where / name).read_bytes()):
            raise ValueError(
                f"{where / name} is not what {MANIFEST} says: prepare the data again, or, if you changed it, delete {MANIFEST}"
            )


def missing_data(benchmark: str, where: Path, names: list[str]) -> ValueError:
    """The error for data that is not there, with the command that gets it."""
    return ValueError(
        f"{benchmark} data is missing: {where} has no {', '.join(names)}; get it with `python scripts/prepare.py {benchmark}` "
        f"(--from FOLDER takes local files), or set task.data to a folder that has it"
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parse_jsonl(data: bytes, name: str) -> list[dict]:
    """Rows of a file with one JSON object per line.

    Raises:
        ValueError: a line that is none, with its number.
    """
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):  # not splitlines: U+2028 and the like occur inside of strings
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{name} line {number} is no JSON object: prepare the data again")
        rows.append(row)
    return rows


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a file, see :func:`parse_jsonl`."""
    return parse_jsonl(path.read_bytes(), str(path))


def read_parquet(path: Path) -> list[dict]:
    """Rows of a parquet file.

    Raises:
        ValueError: it is none.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table  # late: few data sets need it

    try:
        return read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is no parquet file: prepare the data again") from error


def read_manifest(folder: Path) -> dict:
    """What :mod:`evals.prepare` wrote about a folder's files; empty for a folder that it did not make."""
    try:
        value = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) and isinstance(value.get("files"), dict) else {}


def sources(folder: Path, digests: Iterable[str]) -> list[str]:
    """Where files with these SHA-256 come from, as ``source@revision``, as far as a folder's manifest knows them."""
    known = {
        about["sha256"]: f"{about['source']}@{about['revision'] or '?'}"
        for about in read_manifest(folder).get("files", {}).values()
    }
    return sorted({known[digest] for digest in digests if digest in known})


def spread(rows: int, n: int | None, stream: str) -> list[int]:
    """``n`` of ``rows`` indices in ascending order, evenly spread: a systematic sample.

    The rows are divided into ``n`` equal stretches and the same place of each is taken, which ``stream`` (seed and task)
    draws. So no part of a sorted data set is left out. All rows if ``n`` is None or not below ``rows``.
    """
    if n is None or n >= rows:
        return list(range(rows))
    place = Random(stream).random()
    return [int((i + place) * rows / n) for i in range(n)]
