"""Which method passes which check of tests/test_battery.py, as a Markdown table. A failure makes the exit status 1.

Without an argument the battery is run; with one, that file is read (`pytest tests/test_battery.py --junitxml=FILE`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_battery(report: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/test_battery.py", "-q", "--tb=no", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    if done.returncode not in (0, 1):  # 1: a test failed
        raise SystemExit(f"pytest stopped with status {done.returncode}")


def read(report: Path) -> tuple[list[str], dict[str, dict[str, Counter]]]:
    """Checks in their order, and per method and check how many parameters had which outcome."""
    checks, table = {}, defaultdict(lambda: defaultdict(Counter))
    for case in ElementTree.parse(report).iter("testcase"):
        check, _, rest = case.get("name").removeprefix("test_").partition("[")
        if not rest or "test_battery" not in case.get("classname", ""):
            continue
        outcome = next((x.tag for x in case if x.tag in ("failure", "error", "skipped")), "ok")
        checks[check] = True
        table[rest.rstrip("]").split("-")[0]][check][outcome] += 1
    return list(checks), table


def cell(outcomes: Counter) -> str:
    count, good = outcomes.total(), outcomes["ok"] + outcomes["skipped"]
    word = "-" if outcomes["skipped"] == count else "ok" if good == count else "FAIL"
    return f"{word} {good}/{count}" if count > 1 else word


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "battery.xml"
        if len(sys.argv) == 1:
            run_battery(report)
        checks, table = read(report)
    print("| method |", *(f"{c.replace('_', ' ')} |" for c in checks))
    print("|---|" + "---|" * len(checks))
    for method in sorted(table):
        print(f"| {method} |", *(f"{cell(table[method][c])} |" for c in checks))
    return int(any(o["failure"] + o["error"] for row in table.values() for o in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
