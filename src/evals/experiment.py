"""Experiments: tables and figures as lists of cells, each cell an ordinary run.

``conf/experiment/NAME.yaml`` names methods, budgets and settings, see ``docs/experiments.md``; :mod:`evals.sweep` runs them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from evals.lookup import Record, key, records
from evals.records import digest, readable
from qevict.budget import Budget

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class Cell:
    """One run of an experiment. ``labels``: what sets it apart, by axis; ``method`` and ``budget`` are always among them."""

    name: str
    labels: dict[str, str]
    config: DictConfig


@dataclass(frozen=True)
class Experiment:
    """An experiment at a scale.

    Args:
        name: of its file.
        scale: ``cpu`` or ``paper``.
        title: of its tables.
        paper: ``table`` in ``results/paper/paper_numbers.csv``.
        panels: axes that split it into tables of their own; the other axes label rows.
        values: columns; none: as suits the task.
        figure: kind of its figure (``bytes``, ``axis``), or none.
    """

    name: str
    scale: str
    title: str
    paper: str | None
    panels: tuple[str, ...]
    values: tuple[str, ...]
    figure: str | None
    cells: tuple[Cell, ...]

    @property
    def sweep(self) -> str:
        """Name of its folder and of its group in Weights & Biases."""
        return f"{self.name}-{self.scale}"

    @property
    def command(self) -> str:
        """What makes its records."""
        return f"python run.py -m experiment={self.name} scale={self.scale}"

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.cells[0].labels)

    def records(self) -> dict[str, Record]:
        """The best record of each cell that has one, by the cell's name."""
        found = records(c.config.results_dir for c in self.cells)
        return {c.name: found[k][0] for c in self.cells if (k := key(c.config)) in found}


def names() -> list[str]:
    """All experiments."""
    return sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


def load(name: str, scale: str = "cpu", overrides: Sequence[str] = ()) -> Experiment:
    """An experiment's cells.

    Args:
        overrides: as for ``run.py``, applied to every cell last; ``experiment.FIELD=...`` changes the experiment itself.

    Raises:
        ValueError, HydraException: there is no such experiment, scale or setting.
    """
    own = [o for o in overrides if _name(o).startswith("experiment.")]
    theirs = [o for o in overrides if o not in own]
    asked = [o for o in own if o.startswith("experiment.methods=[")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        rest = [o for o in own if o not in asked]
        spec = OmegaConf.to_container(compose("config", overrides=[f"experiment={name}", *rest]).experiment, resolve=True)
        for override in asked:
            spec["methods"] = _chosen(spec["methods"], OmegaConf.create(override.partition("=")[2]), name)
        for field in ("methods", "budgets"):
            if not isinstance(spec[field], list | dict):
                raise ValueError(f"experiment.{field}={spec[field]} is no list: write 'experiment.{field}=[{spec[field]}]'")
        if scale not in spec["scales"]:
            raise ValueError(f"scale={scale}: experiment={name} has {' and '.join(spec['scales'])}")
        special = spec["scales"][scale]
        whole = {
            **spec,
            **special,
            "overrides": [*spec.get("overrides", []), *special.get("overrides", [])],
            "axes": spec.get("axes", {}) | special.get("axes", {}),
        }
        cells = tuple(_cells(whole, theirs, f"{name}-{scale}"))
    twice = len(cells) - len({c.name for c in cells})
    if twice:
        raise ValueError(f"experiment={name}: {twice} cells occur twice: let an axis differ in a setting, not only in its label")
    return Experiment(
        name,
        scale,
        whole["title"],
        whole.get("paper"),
        tuple(whole.get("panels", ())),
        tuple(whole.get("values", ())),
        whole.get("figure"),
        cells,
    )


def _chosen(methods: list | dict, asked: Sequence[str], name: str) -> list | dict:
    """``experiment.methods=[...]``: any methods in the place of a plain list, some of those that have labels."""
    if isinstance(methods, list):
        return list(asked)
    if lacking := [label for label in asked if label not in methods]:
        raise ValueError(
            f"experiment.methods: {lacking[0]!r} is none of experiment={name}: choose from {', '.join(map(repr, methods))}"
        )
    return {label: methods[label] for label in asked}


@functools.cache  # half a second on a busy core, and experiments share cells
def _composed(*overrides: str) -> dict:
    return OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)


def _check(spec: dict, methods: dict[str, list[str]], theirs: Sequence[str]) -> None:
    """What would make an experiment of nothing, or rows that are not what their labels say."""
    if not methods or not spec["budgets"]:
        raise ValueError(f"experiment.{'budgets' if methods else 'methods'}=[]: name at least one")
    for budget in spec["budgets"]:
        Budget(fraction=budget)
    changed = {_name(o): o for o in theirs}
    for axis, labels in {"methods": methods, **spec["axes"]}.items():
        left: dict[tuple[str, ...], str] = {}
        for label, overrides in labels.items():
            own = tuple(o for o in overrides if _name(o) not in changed)
            if own in left and (lost := [changed[_name(o)] for o in overrides if _name(o) in changed]):
                raise ValueError(f"{lost[0]} would make {left[own]!r} and {label!r} of {axis} the same: leave it out")
            left[own] = label


def _name(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _cells(spec: dict, theirs: list[str], sweep: str) -> Iterator[Cell]:
    methods = spec["methods"] if isinstance(spec["methods"], dict) else {m: [f"method={m}"] for m in spec["methods"]}
    _check(spec, methods, theirs)
    axes = {name: list(values.items()) for name, values in spec["axes"].items()}
    for label, method in methods.items():
        policy = instantiate(_composed(*method)["method"])
        # a method whose bytes follow from the number of tokens is one point on the byte axis
        for budget in [1.0] if policy.fixed else spec["budgets"]:
            for chosen in itertools.product(*axes.values()):
                special = [o for _, overrides in chosen for o in overrides]
                config = OmegaConf.create(_composed(*method, f"budget={budget}", *spec["overrides"], *special, *theirs))
                instantiate(config.method)  # a value that it does not take is told before anything runs
                if config.logger.name == "wandb" and config.logger.group is None:
                    config.logger.group = sweep
                share = "full" if policy.unlimited else "own" if policy.fixed else f"{100 * config.budget:g} %"
                labels = {"method": label, "budget": share, **{a: v for a, (v, _) in zip(axes, chosen, strict=True)}}
                decides = {k: v for k, v in config.items() if k not in ("logger", "progress")}
                yield Cell(f"{readable(*labels.values())}-{digest(decides)}", labels, config)
