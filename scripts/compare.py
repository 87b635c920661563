"""Run methods at several budgets on the same samples, print the table, draw score against persistent bytes.

    python scripts/compare.py --methods fullkv streaming_llm snapkv qevict --budgets 0.2 0.05 --out results/demo task.n=5

Arguments behind the options are overrides as for ``run.py``. Each cell is an ordinary run: resumed, never repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate

from evals.cli import EXPECTED, one_line
from evals.efficiency_report import show_efficiency
from evals.report import figure_score_bytes, show
from evals.runner import run

CONF = Path(__file__).resolve().parent.parent / "conf"


def is_fixed(method: str) -> bool:
    """Methods that a budget cannot change (FullKV, a quantizer alone) are run once."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return instantiate(compose("config", overrides=[f"method={method}"]).method).fixed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--budgets", nargs="+", required=True, type=float)
    parser.add_argument("--out", required=True, type=Path, help="folder for table.json, figure.png and figure.svg")
    options, overrides = parser.parse_known_args()
    cells = [(m, b) for m in options.methods for b in ([1.0] if is_fixed(m) else options.budgets)]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be made ({error.strerror}): give a folder")
    rows = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for method, budget in cells:
            try:
                config = compose("config", overrides=[f"method={method}", f"budget={budget}", *overrides])
                rows.append(run(config))
            except (HydraException, *EXPECTED) as error:
                print(f"error: method={method} budget={budget}: {one_line(error)}", file=sys.stderr)
    if not rows:
        return 1
    (show_efficiency if all(r["task"] == "efficiency" for r in rows) else show)(rows)
    records = [{k: v for k, v in r.items() if k != "path"} for r in rows]
    (options.out / "table.json").write_text(json.dumps(records, indent=1) + "\n")
    figure_score_bytes(rows, options.out / "figure.png")
    print(f"figure: {options.out / 'figure.png'}")
    return 0 if len(rows) == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
