"""Bootstrap intervals and paired differences, and the script on top of them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evals.stats import interval, paired, stderr

ROOT = Path(__file__).resolve().parent.parent


def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = sum(low <= 0.3 <= high for low, high in (interval(list(rng.random(40) < 0.3)) for _ in range(200)))
    assert 0.9 <= hits / 200 <= 0.99


def test_standard_error_is_that_of_the_mean_also_for_few_values():
    values = [0.1, 0.4, 0.9]
    assert stderr(values) == pytest.approx(np.std(values, ddof=1) / 3**0.5, rel=0.05)
    by_task = {"a": values, "b": [0.0, 1.0, 1.0, 0.0]}
    each = [np.var(v, ddof=1) / len(v) for v in by_task.values()]
    assert stderr(by_task) == pytest.approx(sum(each) ** 0.5 / 2, rel=0.05)
    assert stderr(values) == stderr(values) and stderr([1.0]) is None


def test_interval_is_seeded_and_stratified():
    by_task = {"a": [0.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0]}
    assert interval(by_task) == (0.5, 0.5), "tasks are drawn within themselves, so their difference is no noise"
    assert interval([0.0, 1.0, 1.0, 0.0, 1.0]) == interval([0.0, 1.0, 1.0, 0.0, 1.0])
    assert interval([1.0]) is None and interval({"a": [1.0, 2.0], "b": [1.0]}) is None and interval({}) is None


def test_paired_difference_uses_common_samples_and_task_means():
    a = {"x": {"1": 0.0, "2": 1.0, "3": 5.0}, "y": {"1": 2.0, "2": 2.0}}
    b = {"x": {"1": 1.0, "2": 2.0}, "y": {"1": 2.0, "2": 2.0, "9": 7.0}, "z": {"1": 0.0}}
    out = paired(a, b)
    assert (out["n"], out["only_a"], out["only_b"]) == (4, 1, 2)
    assert out["a"] == (0.5 + 2) / 2 and out["b"] == (1.5 + 2) / 2 and out["difference"] == 0.5
    assert out["interval"] == (0.5, 0.5), "every pair differs alike: no noise, however much the samples differ"
    assert out["ratio"] is None and out["ratio_interval"] is None, "there is none over 0"
    halved = {t: {i: (v + 1) / 2 for i, v in x.items()} for t, x in a.items()}
    out = paired({t: {i: v + 1 for i, v in x.items()} for t, x in a.items()}, halved)
    assert out["ratio"] == pytest.approx(0.5) and out["ratio_interval"] == pytest.approx((0.5, 0.5)), "the same items in both"
    with pytest.raises(ValueError, match="no sample in common"):
        paired({"x": {"1": 0.0}}, {"y": {"1": 0.0}})


def test_script(tmp_path):
    for name, shift in (("one", 0.0), ("two", 0.25)):
        (tmp_path / name).mkdir()
        rows = [
            {"id": f"t-{i}", "task": "t", "prompt_sha": "s", "status": "ok" if i else "failed", "score": i / 10 + shift}
            for i in range(6)
        ]
        (tmp_path / name / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def call(*args):
        return subprocess.run([sys.executable, ROOT / "scripts/paired.py", *args], capture_output=True, text=True)

    out = json.loads(call(tmp_path / "one", tmp_path / "two").stdout)
    assert out["n"] == 5 and out["difference"] == pytest.approx(0.25) and out["interval"] == pytest.approx([0.25, 0.25])
    assert "no finished sample with 'kl'" in call(tmp_path / "one", tmp_path / "two", "--value", "kl").stderr
    assert "has no samples.jsonl" in call(tmp_path, tmp_path / "two").stderr
