"""Programs with PyTorch and steadfast.elastic on several workers, under real agents."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import List

import pytest
from nodes import PROGRAM, Nodes

pytest.importorskip("torch")

LIMIT_SECONDS = 120

STEPS = """
import time
import torch
import steadfast.elastic as elastic

state = elastic.ObjectState(step=0)

@elastic.run
def train(state):
    place = elastic.assignment()
    print("round", place.round, "of", place.world_size, flush=True)
    while True:
        state.step += 1
        print("step", state.step, flush=True)
        time.sleep(0.02)
        state.check_host_updates()

train(state)
"""

RAISES = """
import torch
import steadfast.elastic as elastic

state = elastic.ObjectState(step=0)

@elastic.run
def train(state):
    place = elastic.assignment()
    print("round", place.round, "of", place.world_size, flush=True)
    while True:
        state.step += 1
        if state.step == 3 and place.rank == place.world_size - 1:
            raise ERROR
        elastic.group().max([state.step])

train(state)
"""


def program(directory: pathlib.Path, text: str) -> "list[str]":
    file = directory / "train.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def steps(log: pathlib.Path) -> List[int]:
    return [int(line.split()[-1]) for line in log.read_text().splitlines() if "step" in line]


def test_an_orderly_leave_loses_no_step_of_the_others(tmp_path):
    """S001-39: the worker that leaves takes part until the next check; nothing was committed before."""
    with Nodes(1, 2, tmp_path) as nodes:
        command = program(tmp_path, STEPS)
        nodes.add(command)
        leaves = nodes.add(command)
        log = tmp_path / "node-1.log"
        nodes.until(lambda: "of 2" in log.read_text(), "both workers")
        before = len(steps(log))
        nodes.until(lambda: before + 10 < len(steps(log)), "steps of both workers")
        nodes.remove(leaves)
        nodes.wait_round(1)
        before = len(steps(log))
        nodes.until(lambda: before + 10 < len(steps(log)), "steps of the other worker")
        done = steps(log)
        assert done == list(range(1, len(done) + 1)), log.read_text()[-4000:]


@pytest.mark.parametrize(
    "error", ["ValueError('broken')", 'RuntimeError("Distributed package doesn\'t have NCCL built in")']
)
def test_a_program_that_raises_is_restarted_a_limited_number_of_times(tmp_path, error):
    """S001-12, S003-25: the others notice first, and the failure counts all the same. Its traceback is shown."""
    command = program(tmp_path, RAISES.replace("ERROR", error))
    run = [PROGRAM, "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--", *command]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode == 1, ended.stderr
    assert "no restart is left" in ended.stderr
    assert ended.stderr.count(f"raise {error}") >= 2 and "Traceback" in ended.stderr
    begun = [line for line in ended.stdout.splitlines() if "round" in line]
    assert len(begun) == 4, begun


def test_a_job_ends_if_the_program_of_one_node_raises_again_and_again(tmp_path):
    """The other node does not count what it did not cause, and ends with the job."""
    with Nodes(2, 2, tmp_path) as nodes:
        command = program(tmp_path, RAISES.replace("ERROR", "ValueError('broken')"))
        both = [nodes.add(command, "--max-restarts", "1") for _ in range(2)]
        nodes.until_failed()
        logs = [it.log.read_text() for it in both]
        assert sum("no restart is left" in log for log in logs) == 1, logs
        assert sum("the job failed" in log for log in logs) == 1, logs
