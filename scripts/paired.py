"""Compare two runs on the samples that both have: mean difference (second minus first) and ratio, with 95 % bootstrap intervals.

python scripts/paired.py results/runs/snapkv-... results/runs/qevict-... [--value kl]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from evals.data import read_jsonl
from evals.stats import paired


def values(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """A value of each finished sample, by task and id."""
    if not (folder / "samples.jsonl").is_file():
        raise ValueError(f"{folder} has no samples.jsonl: give the folder of a run")
    out: dict[str, dict[str, float]] = {}
    for row in read_jsonl(folder / "samples.jsonl"):
        if row.get("status") == "ok" and row.get(name) is not None:
            out.setdefault(row["task"], {})[f"{row['id']} {row['prompt_sha']}"] = row[name]
    if not out:
        raise ValueError(f"{folder} has no finished sample with {name!r}: choose a field of samples.jsonl, such as score or kl")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--value", default="score", help="field of samples.jsonl: score, kl, nll_difference, tpot_ms ...")
    options = parser.parse_args()
    try:
        result = paired(values(options.first, options.value), values(options.second, options.value))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"first": options.first.name, "second": options.second.name, "value": options.value} | result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
