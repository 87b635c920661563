"""From published files to a data folder that runs read without a network: found or downloaded, checked, written with a manifest.

Nothing is written before all of it is checked; then each file appears whole, the manifest last. Files that lie in the data folder
already stay, so a benchmark can be prepared piece by piece.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from evals.data import MANIFEST, data_dir, parse_jsonl, read_manifest, read_parquet, sha256
from evals.gsm8k import ROWS
from evals.longbench import LIMITS, PROMPTS, TASKS, find_config, find_rows

HUB = {  # files by repository of the Hugging Face hub
    "longbench": {"THUDM/LongBench": ["data.zip"]},
    "gsm8k": {"openai/gsm8k": ["main/test-*.parquet", "main/train-*.parquet"]},
    "ruler": {
        "rajpurkar/squad_v2": ["squad_v2/validation-*.parquet"],
        "hotpotqa/hotpot_qa": ["distractor/validation-*.parquet"],
    },
}
TEMPLATES = "https://raw.githubusercontent.com/THUDM/LongBench/{revision}/LongBench/config/{name}"
TEMPLATES_REVISION = "2e00731f8d0bff23dc4325161044d0ed8af94c1e"
TEMPLATES_SHA256 = {
    PROMPTS: "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
    LIMITS: "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
}


@dataclass(frozen=True)
class Origin:
    """A folder with published files, and what the manifest says about them."""

    folder: Path
    source: str
    revision: str | None


@dataclass(frozen=True)
class Found:
    """A file for the data folder.

    Args:
        name: in the data folder.
        content: bytes, or a file to copy.
        rows: how many it has, for files that have rows.
        published: how many it should have.
    """

    name: str
    content: bytes | Path
    rows: int | None = None
    published: int | None = None


# -------------------------------------------------------------------------------------------------- what is in a folder


def _first(folder: Path, *patterns: str) -> Path | None:
    """The first file that matches, pattern by pattern."""
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()), None)


def find_longbench(folder: Path) -> Iterator[Found]:
    for name, task in TASKS.items():
        source = find_rows(folder, name)
        if source is not None:
            yield Found(name + source.suffix, source.read(), len(source.rows()), task.rows)
    for name in (PROMPTS, LIMITS):
        path = find_config(folder, name)
        if path is not None:
            yield Found(f"config/{name}", path)


def find_gsm8k(folder: Path) -> Iterator[Found]:
    for name, published in ROWS.items():
        path = _first(folder, name, f"data/{name}", f"grade_school_math/data/{name}")
        if path is not None:
            yield Found(name, path, len(parse_jsonl(path.read_bytes(), str(path))), published)
            continue
        path = _first(folder, f"main/{name.split('.')[0]}-*.parquet", f"{name.split('.')[0]}-*.parquet")
        if path is not None:
            rows = [{key: row.get(key) for key in ("question", "answer")} for row in read_parquet(path)]
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            yield Found(name, lines.encode(), len(rows), published)


def find_ruler(folder: Path) -> Iterator[Found]:
    yield from _questions(folder, "squad.json", "dev-v2.0.json", "squad_v2", squad_json, 11873)
    yield from _questions(folder, "hotpotqa.json", "hotpot_dev_distractor_v1.json", "distractor", hotpot_json, 7405)
    templates = _first(folder, "templates.json", "ruler/templates.json")
    if templates is not None:
        yield Found("templates.json", templates)
    for path in sorted(folder.glob("essays/*.txt")):
        yield Found(f"essays/{path.name}", path)
    for path in sorted([*folder.glob("prebuilt/*.jsonl"), *folder.glob("prebuilt/*.parquet")]):
        rows = parse_jsonl(path.read_bytes(), str(path)) if path.suffix == ".jsonl" else read_parquet(path)
        yield Found(f"prebuilt/{path.name}", path, len(rows))


def _questions(folder: Path, name: str, other: str, hub: str, convert: Callable, published: int) -> Iterator[Found]:
    """A file of questions: as published, under our name or theirs, or the hub's parquet turned back into that form."""
    path = _first(folder, name, other, f"json/{name}", f"scripts/data/synthetic/json/{name}", f"{hub}/validation-*.parquet")
    if path is None:
        return
    try:
        content = (
            path.read_bytes() if path.suffix == ".json" else json.dumps(convert(read_parquet(path)), ensure_ascii=False).encode()
        )
        data = json.loads(content)
        rows = len(data) if name == "hotpotqa.json" else sum(len(p["qas"]) for a in data["data"] for p in a["paragraphs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has not the form of the published {other}: get it again") from error
    yield Found(name, content, rows, published)


def squad_json(rows: list[dict]) -> dict:
    """SQuAD as published, from the hub's flat rows (paragraphs and articles lie together there)."""
    articles = []
    for title, of_title in groupby(rows, key=lambda row: row["title"]):
        parts = []
        for context, questions in groupby(of_title, key=lambda row: row["context"]):
            qas = [
                {
                    "id": q["id"],
                    "question": q["question"],
                    "answers": [
                        {"text": t, "answer_start": s}
                        for t, s in zip(q["answers"]["text"], q["answers"]["answer_start"], strict=True)
                    ],
                    "is_impossible": not q["answers"]["text"],
                }
                for q in questions
            ]
            parts.append({"context": context, "qas": qas})
        articles.append({"title": title, "paragraphs": parts})
    return {"version": "v2.0", "data": articles}


def hotpot_json(rows: list[dict]) -> list[dict]:
    """HotpotQA as published, from the hub's rows."""
    return [
        {
            **{key: row[key] for key in ("question", "answer", "type", "level")},
            "_id": row["id"],
            "context": [list(pair) for pair in zip(row["context"]["title"], row["context"]["sentences"], strict=True)],
            "supporting_facts": [
                list(pair) for pair in zip(row["supporting_facts"]["title"], row["supporting_facts"]["sent_id"], strict=True)
            ],
        }
        for row in rows
    ]


@dataclass(frozen=True)
class Kind:
    """How a benchmark's files are found, whether their row counts have to be the published ones, and what a full set has."""

    find: Callable[[Path], Iterator[Found]]
    exact: bool
    full: tuple[str, ...]


KINDS = {
    "longbench": Kind(find_longbench, True, (*(f"{name}.jsonl" for name in TASKS), f"config/{PROMPTS}", f"config/{LIMITS}")),
    "gsm8k": Kind(find_gsm8k, True, tuple(ROWS)),
    "ruler": Kind(find_ruler, False, ("squad.json", "hotpotqa.json", "templates.json", "essays/*.txt")),
}

# ------------------------------------------------------------------------------------------------------------ download


def download(benchmark: str, revision: str | None, scratch: Path) -> list[Origin]:
    """The published files, from the hub (its own cache) and, for LongBench's templates, from GitHub into ``scratch``.

    Raises:
        ValueError: there is no network (``HF_HUB_OFFLINE=1`` counts as none) or no such file.
    """
    from huggingface_hub import constants, snapshot_download  # late: local files need neither

    if revision is not None and len(HUB[benchmark]) > 1:
        raise ValueError(f"--revision names one repository, {benchmark} reads {' and '.join(HUB[benchmark])}: leave it out")
    origins = []
    for repository, files in HUB[benchmark].items():
        try:
            folder = Path(snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=files))
        except (OSError, ValueError) as error:
            raise _unreachable(benchmark, f"hub repository {repository}", error) from error
        origins.append(Origin(folder, f"hub/{repository}", folder.name))
    if benchmark == "longbench":
        for name, expected in TEMPLATES_SHA256.items():
            url = TEMPLATES.format(revision=TEMPLATES_REVISION, name=name)
            try:
                if constants.HF_HUB_OFFLINE:
                    raise OSError("HF_HUB_OFFLINE is set")
                with urllib.request.urlopen(url, timeout=60) as answer:
                    content = answer.read()
            except OSError as error:
                raise _unreachable(benchmark, url, error) from error
            if sha256(content) != expected:
                raise ValueError(f"{url} has not the content that was checked: get {name} by hand, and name its folder with --from")
            (scratch / name).write_bytes(content)
        origins.append(Origin(scratch, "github/THUDM/LongBench", TEMPLATES_REVISION))
    return origins


def _unreachable(benchmark: str, what: str, error: Exception) -> ValueError:
    reason = str(error).split("\n")[0].split(". ")[0].rstrip(".") or type(error).__name__
    return ValueError(
        f"{what} cannot be read ({reason}): prepare {benchmark} on a machine with a network, or name a folder that has the files "
        "with --from"
    )


# ------------------------------------------------------------------------------------------------------------- prepare


def prepare(benchmark: str, origin: str | None = None, target: str | None = None, revision: str | None = None) -> dict:
    """Fill a benchmark's data folder and return its manifest.

    Args:
        benchmark: one of ``KINDS``.
        origin: folder with published files (a checkout, an unpacked archive, prepared data); None: they are downloaded.
        target: the data folder; None: where runs look for it.
        revision: of the hub's repository; with ``origin``, what the manifest says about its files.

    Raises:
        ValueError: there is nothing to take, or it is not what was published.
    """
    kind, where = KINDS[benchmark], data_dir(benchmark, target)
    with tempfile.TemporaryDirectory() as scratch:
        if origin is None:
            origins = download(benchmark, revision, Path(scratch))
        else:
            folder = Path(origin).expanduser()
            if not folder.is_dir():
                raise ValueError(f"--from {origin} is no folder: name one that has the files")
            origins = [Origin(folder, f"local/{folder.resolve().name}", revision)]
        files: dict[str, tuple[Found, Origin]] = {}
        for place in origins:
            for found in kind.find(place.folder):
                files.setdefault(found.name, (found, place))
                if kind.exact and found.rows != found.published:
                    raise ValueError(
                        f"{found.name} of {place.folder} has {found.rows} rows, not the {found.published} that were published: "
                        "get it again"
                    )
        if not files:
            folders = ", ".join(str(place.folder) for place in origins)
            raise ValueError(f"{folders} has no {benchmark} data: it should have some of {', '.join(kind.full)}")
        return _write(benchmark, where, files)


def _write(benchmark: str, where: Path, files: dict[str, tuple[Found, Origin]]) -> dict:
    """Files and manifest of a data folder; what it had stays."""
    before = {name: about for name, about in read_manifest(where).get("files", {}).items() if (where / name).is_file()}
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where, prefix=".new-") as stage:
        written = {}
        for number, (name, (found, place)) in enumerate(sorted(files.items())):
            fresh = Path(stage) / str(number)
            size, digest = _copy(found.content, fresh)
            # a folder that was prepared before knows where its files come from
            known = {about["sha256"]: about for about in read_manifest(place.folder).get("files", {}).values()}.get(digest, {})
            written[name] = {
                "sha256": digest,
                "bytes": size,
                "rows": found.rows,
                "source": known.get("source", place.source),
                "revision": known.get("revision", place.revision),
            }
            if found.published not in (None, found.rows):
                written[name]["published_rows"] = found.published
        known = before | written
        manifest = {"benchmark": benchmark, "missing": _missing(KINDS[benchmark].full, known), "files": dict(sorted(known.items()))}
        listing = Path(stage) / MANIFEST
        listing.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        for number, name in enumerate(sorted(files)):
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(stage) / str(number), where / name)
        os.replace(listing, where / MANIFEST)
    return manifest


def _copy(content: bytes | Path, to: Path) -> tuple[int, str]:
    """Size and SHA-256 of what was written."""
    if isinstance(content, bytes):
        to.write_bytes(content)
        return len(content), sha256(content)
    total, size = hashlib.sha256(), 0
    with open(content, "rb") as source, open(to, "wb") as file:
        while part := source.read(1 << 20):
            total.update(part)
            size += file.write(part)
    return size, total.hexdigest()


def _missing(full: tuple[str, ...], names: dict[str, dict]) -> list[str]:
    """What a full set has besides; formatted parquet stands for the rows of a task."""

    def there(name: str) -> bool:
        return name in names or name.replace(".jsonl", ".parquet") in names or any(Path(n).match(name) for n in names)

    return [name for name in full if not there(name)]
