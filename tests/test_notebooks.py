"""Notebooks: each is the notebook of the script beside it, has no outputs, and runs."""

import importlib.util
import json

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient

from test_runner import ROOT, folder  # noqa: F401 - folder is a fixture

SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)


def converter():
    spec = importlib.util.spec_from_file_location("notebooks_script", ROOT / "scripts/notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def surroundings(folder, tmp_path, monkeypatch):  # noqa: F811
    """A tiny model instead of the embedded one, figures beside the test's files."""
    monkeypatch.setenv("QEVICT_NOTEBOOK_MODEL", str(folder))
    monkeypatch.setenv("QEVICT_NOTEBOOK_OUT", str(tmp_path))
    monkeypatch.chdir(ROOT / "notebooks")


def test_cells_of_a_script():
    text = "# ruff: noqa\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\na = 1\n\nb = 2\n# %%\nc\n"
    assert converter().cells(text) == [("markdown", "# Title\n\ntext"), ("code", "a = 1\n\nb = 2"), ("code", "c")]


@each
def test_the_notebook_is_that_of_its_script_without_outputs(script):
    made = script.with_suffix(".ipynb").read_text("utf-8")
    assert made == converter().notebook(script.read_text("utf-8")), "run python scripts/notebooks.py"
    nbformat.validate(nbformat.reads(made, as_version=4))
    assert all(not c.get("outputs") for c in json.loads(made)["cells"])


@each
def test_its_code_runs(script, surroundings, capsys):
    matplotlib.use("Agg")
    exec(compile(script.read_text("utf-8"), str(script), "exec"), {"__name__": "__main__"})  # as a kernel would, sooner
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.slow
@each
def test_it_runs_in_a_kernel(script, surroundings):
    book = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    NotebookClient(book, timeout=900, kernel_name="python3").execute()
