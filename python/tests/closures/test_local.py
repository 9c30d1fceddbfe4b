"""`steadfast local` with a program that has a coordinator."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import List

JOB = """
name = "counting"
mode = "async"

[model]
kind = "closures"
script = "train.py"

[optimizer]
kind = "sgd"

[learning_rate]
base = 1.0
"""

PROGRAM = """
import os
import signal
import numpy
import steadfast


def count(number):
    if number == 50 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    steadfast.current_closure().push({"w": numpy.full(3, -1.0)})


if __name__ == "__main__":
    with steadfast.Coordinator(job="counting", parameters={"w": numpy.zeros(3)}) as coordinator:
        for number in range(100):
            coordinator.schedule(count, args=(number,), name=f"step-{number}")
        coordinator.join()
        print("values", set(coordinator.get_parameters()["w"].tolist()), flush=True)
        ENDS
"""


def local(directory: pathlib.Path, program: str, more: List[str]) -> "subprocess.CompletedProcess[str]":
    (directory / "counting.toml").write_text(JOB)
    (directory / "train.py").write_text(program)
    command = ["steadfast", "local", "counting.toml", "--data-dir", "data", *more]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def test_one_command_runs_a_program_and_its_workers(tmp_path):
    """S000-20: a worker dies in a closure, and is started again; each closure counts once."""
    done = local(tmp_path, PROGRAM.replace("ENDS", "coordinator.finish_job()"), ["--trainers", "2"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "values {100.0}" in (tmp_path / "data" / "logs" / "program-0.log").read_text()
    audit = ["steadfast", "audit", "--data-dir", "data", "--job", "counting", "--output", "json"]
    report = subprocess.run(audit, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    proved = json.loads(report.stdout)["proved"]
    assert "the push of each of 100 closures counts once on every slot" in proved, proved


def test_a_program_that_does_not_end_the_job_is_an_error(tmp_path):
    """S000-20: a job without a program does not look as if it ran."""
    done = local(tmp_path, PROGRAM.replace("ENDS", "pass"), [])
    assert done.returncode == 2, done.stderr
    assert "program-0 has ended, and the job has not: call `finish_job`" in done.stderr, done.stderr


def test_a_program_that_fails_says_why(tmp_path):
    """S000-20"""
    done = local(tmp_path, "import no_such_module\n", [])
    assert done.returncode != 0
    assert "no_such_module" in done.stderr, done.stderr
