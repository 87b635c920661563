"""Sweeps on a real SLURM: one node, started here as whoever runs the tests. Skipped where SLURM is not installed."""

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from evals.lookup import read_rows
from test_experiment import of_tiny
from test_runner import ROOT, command, folder  # noqa: F401 - folder is a fixture

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [p for p in PROGRAMS if shutil.which(p, path=f"{os.environ.get('PATH')}:/usr/sbin:/usr/local/sbin") is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: {', '.join(MISSING)} missing (apt: slurm-wlm munge)"),
    pytest.mark.timeout(1800),  # a job is a process that imports everything: some 10 s of an idle core
]

CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={port2}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={at}/munge/munge.sock,cred_expire=5
StateSaveLocation={at}/ctld
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=8000 Gres=gpu:4 State=UNKNOWN
PartitionName=local Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_ports() -> tuple[int, int]:
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        return a.getsockname()[1], b.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment of a running cluster of one node with pretend GPUs and processors."""
    at = tmp_path_factory.mktemp("slurm")
    for name in ("ctld", "spool", "munge"):
        (at / name).mkdir(mode=0o700)
    (at / "munge/key").write_bytes(os.urandom(1024))
    (at / "munge/key").chmod(0o600)
    port, port2 = free_ports()
    host = socket.gethostname().split(".")[0]
    (at / "slurm.conf").write_text(
        CONF.format(host=host, port=port, port2=port2, user=getpass.getuser(), at=at, cpus=max(4, os.cpu_count()))
    )
    devices = ("null", "zero", "full", "urandom")  # stand in for GPUs
    (at / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{d}\n" for d in devices))
    path = f"{ROOT / 'tests/slurm'}:{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    env = os.environ | {"SLURM_CONF": str(at / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}
    files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
    munge = [f"--{name}={at / 'munge' / file}" for name, file in files.items()]
    try:
        for start in (["munged", "--force", *munge], ["slurmctld", "-i"], ["slurmd"]):
            subprocess.run(start, env=env, check=True, capture_output=True, timeout=60)
        deadline = time.time() + 60
        while "idle" not in ask(env, "sinfo", "-h", "-o", "%T"):
            assert time.time() < deadline, (at / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)
        yield env
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            ask(env, "scancel", "-u", getpass.getuser())
            deadline = time.time() + 30
            while ask(env, "squeue", "-h").strip() and time.time() < deadline:
                time.sleep(0.2)
        for file in ("slurmd.pid", "slurmctld.pid", "munge/munged.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((at / file).read_text()), signal.SIGTERM)


def ask(env, *words) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60).stdout


def on_slurm(path, results, *more):
    small = ["partition=local", "mem_gb=2", "cpus_per_task=1", "timeout_min=30", "signal_delay_s=60", *more]
    switches = ["launch=slurm", *[f"hydra.launcher.{s}" for s in small]]
    return command("-m", *of_tiny(path, results), *switches)


def test_a_sweep_is_a_job_array_that_outlives_a_failed_cell(cluster, folder, tmp_path):  # noqa: F811
    results = tmp_path / "results=1 x"
    asked = [*on_slurm(folder, results), "experiment.budgets=[0.4,0.001]"]
    done = subprocess.run(asked, cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    assert "2 of 3 cells done" in done.stdout and "smallest workable" in done.stderr
    assert len(list(results.glob("runs/*/samples.jsonl"))) == 2
    (script,) = (results / "table2-cpu/.submitit").rglob("*_submission.sh")
    text = script.read_text()
    assert "#SBATCH --array=0-2%3" in text and "#SBATCH --gpus-per-node=1" in text and "HF_HUB_OFFLINE=1" in text
    again = subprocess.run(on_slurm(folder, results), cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0 and "2 cells, 0 to do" in again.stdout


def test_a_job_that_is_preempted_goes_on_from_its_last_sample(cluster, folder, tmp_path):  # noqa: F811
    asked = [*on_slurm(folder, tmp_path), "experiment.methods=[qevict]", "task.n=600"]  # longer than the grace of a requeue
    driver = subprocess.Popen(asked, cwd=ROOT, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 800
    while driver.poll() is None and time.time() < deadline:
        (samples,) = list(tmp_path.glob("runs/*/samples.jsonl")) or [None]
        if samples is not None and samples.read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.05)
    job = ask(cluster, "squeue", "-h", "-o", "%i").split()[0]
    before = samples.read_bytes().count(b"\n")
    assert 5 <= before < 1200
    subprocess.run(["scontrol", "requeue", job], env=cluster, check=True, timeout=60)  # what preemption does
    out, err = driver.communicate(timeout=900)
    assert driver.returncode == 0, err
    assert "1 of 1 cells done" in out
    lines = samples.read_bytes().splitlines()
    assert len(lines) == len(read_rows(samples)) == 1200  # nothing was done twice
    assert len(json.loads((Path(samples).parent / "env.json").read_text())["starts"]) == 2
