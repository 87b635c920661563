"""The workspace meter against cases whose answer is known."""

import json

import torch
from torch.profiler import ProfilerActivity, profile

from conftest import tiny
from evals.meters import PeakTensors, workspace

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
