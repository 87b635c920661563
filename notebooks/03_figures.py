# ruff: noqa: E402
# %% [markdown]
# # Figures
# Score, or closeness to the full cache, against persistent bytes. On the command line: `python scripts/figures.py`.

# %%
import os
from pathlib import Path

os.chdir(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "conf/config.yaml").is_file()))  # the repository
OUT = Path(os.environ.get("QEVICT_NOTEBOOK_OUT", "results/figures"))

# %%
from IPython.display import Image, display

from evals.experiment import load
from evals.figures import figures

for name in ("table2", "fidelity", "table12"):
    for path in figures(load(name), OUT):
        display(Image(str(path), width=640))

# %% [markdown]
# A figure of your own: the numbers of any run are a dictionary, made from its samples.

# %%
from evals.report import MIB
from evals.tables import summary

experiment = load("table2")
found = experiment.records()
for cell in experiment.cells:
    if cell.name in found and found[cell.name].done:
        n = summary(cell.config, found[cell.name].rows)
        print(f"{cell.labels['method']:20} {cell.labels['length']:>5} {n['kv_bytes_peak'] / MIB:6.2f} MiB {n['score']:.2f}")
