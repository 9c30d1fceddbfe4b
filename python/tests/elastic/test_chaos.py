"""A job that trains with DistributedDataParallel, under a fixed schedule of faults (`make chaos MODE=elastic`)."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).parents[3]
CHAOS = ROOT / "target" / "release" / "chaos"
SCHEDULE = (
    "@20 kill worker 1; +20 kill agent 0; +20 pause worker 2; +20 leave agent 2; +20 kill master 0; "
    "+0 kill worker 0; +20 pause agent 1; +20 join agent 3; +10 etcd-kill-leader; +10 kill master 1"
)


@pytest.mark.skipif(not CHAOS.exists(), reason=f"{CHAOS} is not built: run `make build`")
def test_an_elastic_job_loses_no_commit_under_faults_of_every_role():
    """S001-38, S002-8: every step and commit once, from the last commit on, and etcd's history is clean."""
    flags = ["--mode", "elastic", "--python", sys.executable, "--steps", "260", "--schedule", SCHEDULE]
    ran = subprocess.run([CHAOS, *flags], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "survived" in ran.stdout
