"""Write notebooks/*.ipynb from the scripts beside them, which are what is edited (py:percent, as Jupytext has it). No outputs.

python scripts/notebooks.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def cells(script: str) -> list[tuple[str, str]]:
    """Kind (``code`` or ``markdown``) and source of each cell; cells begin with ``# %%`` or ``# %% [markdown]``."""
    out = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", script, re.MULTILINE):
        text = body.strip("\n")
        if "[markdown]" in head:
            out.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE)))
        else:
            out.append(("code", text))
    return out


def notebook(script: str) -> str:
    """The ``.ipynb`` of a script."""
    made = []
    for number, (kind, text) in enumerate(cells(script)):
        extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
        made.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True), **extra})
    return json.dumps({"cells": made, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    for script in sorted(FOLDER.glob("*.py")):
        script.with_suffix(".ipynb").write_text(notebook(script.read_text("utf-8")), "utf-8")
        print(script.with_suffix(".ipynb").name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
