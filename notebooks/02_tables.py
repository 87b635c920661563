# ruff: noqa: E402
# %% [markdown]
# # Tables
# From the samples of finished runs to a table; cells that have not been run say `missing`. On the command line:
# `python scripts/tables.py table2`. To run what is missing: `python run.py -m experiment=table2`.

# %%
import os
from pathlib import Path

os.chdir(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "conf/config.yaml").is_file()))  # the repository

# %%
from IPython.display import HTML, display

from evals.experiment import load
from evals.render import comma_separated, latex, markup
from evals.tables import grids

experiment = load("table2", scale="cpu")
tables = grids(experiment)
for table in tables:
    display(HTML(markup(table)))

# %% [markdown]
# The same for a paper, or for other programs.

# %%
print(latex(tables[0])[:800])

# %%
print(comma_separated(tables[0])[:600])

# %% [markdown]
# Two runs against each other, on the samples that both have: difference and its 95 % interval.

# %%
from evals.stats import paired
from evals.tables import values_by_task

found = experiment.records()
done = [c for c in experiment.cells if c.name in found]
alike = [c for c in done if c.config.task == done[0].config.task][:2]
paired(*(values_by_task(found[c.name].rows, "score") for c in alike)) if len(alike) == 2 else "fewer than two runs"
