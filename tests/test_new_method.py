"""The scaffold of a method: what it writes composes, runs and can be configured."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from test_runner import ROOT


@pytest.fixture
def copy(tmp_path):
    """The parts of the repository that the scaffold writes to."""
    for name in ("scripts/new_method.py", "conf/config.yaml", "docs/methods.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("src/baselines", "conf/method"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def make(root, *words):
    return subprocess.run([sys.executable, str(root / "scripts/new_method.py"), *words], capture_output=True, text=True)


def test_a_new_method_composes_and_checks_its_fields(copy):
    done = make(copy, "my_method")
    assert done.returncode == 0, done.stderr
    assert "## my_method" in (copy / "docs/methods.md").read_text()
    for group in ("model", "task", "backend", "logger", "launch"):
        (copy / "conf" / group).symlink_to(ROOT / "conf" / group)
    with initialize_config_dir(str(copy / "conf"), version_base="1.3"):
        config = compose("config", overrides=["method=my_method", "method.power=2"])
    space: dict = {"__name__": "made"}
    sys.modules["made"] = sys  # dataclasses look up the module of their class
    exec((copy / "src/baselines/my_method.py").read_text(), space)
    del sys.modules["made"]
    assert config.method._target_ == "baselines.my_method.MyMethod"
    method = space["MyMethod"](**{k: v for k, v in config.method.items() if k != "_target_"})
    assert method.power == 2 and method.observe == 32
    with pytest.raises(ValueError, match=r"method.power=0 must be above 0"):
        space["MyMethod"](power=0)


@pytest.mark.parametrize("word", ["My-Method", "my method", "1st"])
def test_bad_names_are_refused(copy, word):
    done = make(copy, word)
    assert done.returncode == 2 and "use lower-case letters" in done.stderr
    assert not list((copy / "conf/method").iterdir())


def test_nothing_is_overwritten(copy):
    assert make(copy, "my_method").returncode == 0
    before = (copy / "src/baselines/my_method.py").read_text()
    again = make(copy, "my_method")
    assert again.returncode == 2 and "exists already" in again.stderr
    assert (copy / "src/baselines/my_method.py").read_text() == before and (copy / "docs/methods.md").read_text().count(
        "## my_method"
    ) == 1
