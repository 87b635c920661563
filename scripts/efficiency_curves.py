"""Growth with the context at fixed bytes, and what fits into equal memory: efficiency runs, a table and a figure.

    python scripts/efficiency_curves.py growth --methods qevict snapkv --budgets budget_tokens=410 --out results/growth
    python scripts/efficiency_curves.py memory --methods qevict --budgets 0.05 0.2 --gib 4 --out results/memory task.context=8192

``growth`` runs every context with the same bytes (410 tokens' worth is 5 % of 8,192); ``memory`` finds the largest batch of every
cache and times it. ``--peers`` adds records of ``scripts/peer_kvpress.py`` to the table. Arguments behind the options are
overrides as for ``run.py``. Each cell is an ordinary run: resumed, never repeated. With OMP_NUM_THREADS=1 times are process CPU
time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from evals.cli import EXPECTED, one_line
from evals.efficiency_report import figure_growth, figure_memory, show_efficiency
from evals.runner import run

CONF = Path(__file__).resolve().parent.parent / "conf"


def cells(options: argparse.Namespace) -> Iterator[list[str]]:
    """Overrides of every run."""
    for method in options.methods:
        for budget in options.budgets:
            base = ["task=efficiency", f"method={method}", budget if "=" in budget else f"budget={budget}", "task.prefills=0"]
            if options.what == "growth":
                yield from ([*base, f"task.context={n}"] for n in options.contexts)
            else:
                yield [*base, f"task.memory_bytes={int(options.gib * 2**30)}", "task.memory_steps=16"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["growth", "memory"])
    parser.add_argument("--methods", nargs="+", default=["qevict"])
    parser.add_argument("--budgets", nargs="+", required=True, help="shares, or budget_bytes=N, or budget_tokens=N")
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 4096, 8192, 16384, 32768], help="of growth")
    parser.add_argument("--gib", type=float, help="memory that caches and workspace may take, of memory")
    parser.add_argument("--peers", nargs="+", type=Path, default=[], help="records of other packages, for the table")
    parser.add_argument("--out", required=True, type=Path, help="folder for table.json and figure.png, .svg, .pdf")
    options, overrides = parser.parse_known_args()
    if options.what == "memory" and not options.gib:
        parser.error("memory needs --gib, for example --gib 4")
    runs, failed = [], 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        peers = [json.loads(file.read_text()) for file in options.peers]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for cell in cells(options):
            try:
                runs.append(run(compose("config", overrides=[*cell, *overrides])))
            except (HydraException, *EXPECTED) as error:
                failed += 1
                print(f"error: {' '.join(cell)}: {one_line(error)}", file=sys.stderr)
    if not runs:
        return 1
    show_efficiency([*runs, *peers])
    records = [{k: v for k, v in r.items() if k != "path"} for r in [*runs, *peers]]
    (options.out / "table.json").write_text(json.dumps(records, indent=1) + "\n")
    draw = figure_growth if options.what == "growth" else figure_memory
    draw([*runs, *peers], options.out / "figure.png")
    print(f"figure: {options.out / 'figure.png'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
