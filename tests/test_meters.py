"""The meters against cases whose answer is known."""

import json
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from conftest import tiny
from evals.meters import Laps, PeakTensors, clock, clock_name, largest, projected, ratio, spread, workspace

MIB = 1024 * 1024


def test_a_chain_whose_peak_is_known():
    a = torch.ones(MIB // 4 * 4)  # 4 MiB, from outside

    def step():
        b = a + 1  # 4
        c = torch.cat([b, b])  # 4 + 8
        del b
        return (c * 2).sum()  # 8 + 8, and a scalar

    assert workspace(torch.device("cpu"), step) == 16 * MIB + 4


def test_views_and_inputs_are_not_counted_and_freed_inputs_are_credited():
    with PeakTensors() as meter:
        x = torch.ones(MIB)
        x.view(1024, 1024).t()
        assert meter.peak == 4 * MIB
    old = [torch.ones(MIB)]

    def grow():  # what a cache does when it concatenates: the old tensor dies as soon as the new one exists
        old[0] = torch.cat([old[0], torch.ones(256)])
        old[0] = torch.cat([old[0], torch.ones(256)])

    assert workspace(torch.device("cpu"), grow) < 5 * MIB


def test_dispatch_agrees_with_the_profiler_on_a_prefill(tmp_path):
    llama = tiny("llama")
    ids = torch.randint(3, 90, (1, 200))
    with torch.inference_mode():
        got = workspace(torch.device("cpu"), lambda: llama(ids, use_cache=False))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            llama(ids, use_cache=False)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    totals = [(e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in trace if e["name"] == "[memory]"]
    _, first, step = min(totals)
    peak = max(total for _, total, _ in totals) - (first - step)
    assert abs(got - peak) <= 0.02 * peak


def test_time_of_a_call_and_of_a_call_within():
    device, work = torch.device("cpu"), torch.ones(300, 300)
    laps = Laps(device)
    inner = laps.around(lambda: [work @ work for _ in range(20)])
    whole = [clock(lambda: [inner(), inner()], device) for _ in range(3)]
    parts = laps.ms()
    assert len(parts) == 6 and min(parts) > 0
    assert all(parts[2 * i] + parts[2 * i + 1] <= whole[i] for i in range(3))


def test_the_clock_is_blind_to_waiting_where_it_is_cpu_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.get_num_threads() == 1 and clock_name() == "process CPU time"
    assert clock(lambda: time.sleep(0.2), torch.device("cpu")) < 100
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clock_name() == "wall time" and clock(lambda: time.sleep(0.2), torch.device("cpu")) >= 200


@pytest.mark.parametrize("guess", [0, 1, 5, 36, 37, 38, 1000])
@pytest.mark.parametrize("limit", [0, 1, 2, 37])
def test_the_largest_that_fits(guess, limit):
    tried = []

    def fits(n):
        assert n > 0 and n not in tried, "nothing is tried twice"
        tried.append(n)
        return n <= limit

    assert largest(fits, guess) == limit


@pytest.mark.parametrize(("limit", "want"), [(0, 0), (109, 0), (110, 1), (119, 1), (120, 2), (155, 5), (1100, 100)])
def test_projection_of_what_grows_evenly(limit, want):
    assert projected(lambda n: 100 + 10 * n, limit) == want


def test_projection_sees_what_a_constant_hides_at_first():
    seen = []

    def need(n):  # 2 each, and 60 in all or 20 each, whichever is more
        seen.append(n)
        return 2 * n + max(60, 20 * n)

    assert projected(need, 2200) == 100 and seen == [1, 2, 4, 8]
    seen.clear()
    assert projected(need, 76) == 3 and seen == [1, 2, 4]  # 64 at 2, 88 at 4


def test_spread_and_ratio():
    assert spread([4.0]) == {"median": 4.0, "q1": 4.0, "q3": 4.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    times = {"method": [1.0, 2.0, 9.0], "full": [2.0, 8.0, 4.0]}
    assert ratio(times, "full") == {"median": 2.0 / 4.0, "q1": 0.375, "q3": 1.375}  # of steps: 0.5, 0.25, 2.25
    assert ratio(times, "other") is None and ratio(times, None) is None
