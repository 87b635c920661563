# ruff: noqa: E402
# %% [markdown]
# # Mechanism
# Where the full cache's attention falls when a method routes: missed mass, tiers, churn. Needs records of `task=mechanism`:
# `python run.py -m experiment=table14`.

# %%
import os
from pathlib import Path

os.chdir(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "conf/config.yaml").is_file()))  # the repository
OUT = Path(os.environ.get("QEVICT_NOTEBOOK_OUT", "results/figures"))

# %%
from IPython.display import HTML, Image, display

from evals.diagnostics import figures
from evals.diagnostics.tables import cells
from evals.experiment import load
from evals.render import markup
from evals.tables import grids

for name in ("table14", "table15", "table16", "table18"):
    made = grids(load(name))
    for table in made:
        display(HTML(markup(table)))
    if not made:
        print(f"{name}: no records yet")

# %% [markdown]
# Missed mass step by step, and which tier holds the attention.

# %%
found = cells(load("figure1"))
if found:
    OUT.mkdir(parents=True, exist_ok=True)
    stacked = "R3" if "R3" in found else next(iter(found))
    display(Image(str(figures.missed_and_tiers(found, OUT / "figure1.png", stacked)), width=900))
else:
    print("figure1: no records yet")
