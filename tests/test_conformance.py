"""Every method that can be configured is documented, and its configuration states its fields and defaults."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from qevict.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
METHODS = sorted(f.stem for f in (ROOT / "conf/method").glob("*.yaml"))


def composes(policy: Policy) -> bool:
    return any(isinstance(getattr(policy, f.name), Policy) for f in fields(policy))


def check(config: DictConfig, policy: Policy) -> None:
    """All fields are stated, also those of a method inside. Defaults are stated as they are, unless methods are composed."""
    stated = {k: v for k, v in config.items() if k != "_target_"}
    own = {f.name: getattr(policy, f.name) for f in fields(policy)}
    assert stated.keys() == own.keys()
    for name, value in own.items():
        if isinstance(value, Policy):
            check(stated[name], value)
        else:
            assert stated[name] == value
    defaults = {f.name: f.default for f in fields(policy)}
    assert MISSING not in defaults.values()
    assert composes(policy) or own == defaults


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_page_and_states_its_defaults(name):
    config = OmegaConf.load(ROOT / "conf/method" / f"{name}.yaml")
    assert config.method_name == name
    policy = instantiate(config.method)
    assert isinstance(policy, Policy)
    check(config.method, policy)
    page = (ROOT / "docs/methods.md").read_text()
    assert re.search(rf"^## .*\b{name}\b", page, re.MULTILINE), f"docs/methods.md has no section on {name}"


@pytest.mark.parametrize("name", METHODS)
def test_a_configuration_begins_with_a_line_about_the_method(name):
    package, about, *_ = (ROOT / f"conf/method/{name}.yaml").read_text().splitlines()
    assert package == "# @package _global_"
    assert about.startswith("# ") and about.endswith("."), f"line 2 of conf/method/{name}.yaml says nothing about it"


def test_every_method_file_is_small_and_configured():
    targets = {OmegaConf.load(ROOT / f"conf/method/{n}.yaml").method._target_.rsplit(".", 1)[0] for n in METHODS}
    for file in (ROOT / "src/baselines").glob("*.py"):
        if file.stem != "__init__":
            assert f"baselines.{file.stem}" in targets, f"{file.name} can be chosen by no conf/method/*.yaml"
            assert len(file.read_text().splitlines()) <= 150
