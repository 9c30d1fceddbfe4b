"""Programs under real agents, without PyTorch."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

from nodes import PROGRAM, Nodes

LIMIT_SECONDS = 60

DISAGREES = """
import steadfast.elastic as elastic

state = elastic.ObjectState(step=0)

@elastic.run
def train(state):
    state.step += 1
    print("round", elastic.assignment().round, flush=True)
    raise elastic.CollectiveError("shapes differ")

train(state)
"""

WAITS = """
import time
from steadfast.elastic._agent import agent

mine = agent()
print("ready", flush=True)
while not mine.changes(0)[1]:
    time.sleep(0.02)
print("changed", flush=True)
try:
    mine.next_round(mine.assignment().round, 5)
except TimeoutError as error:
    print("timed out:", error, flush=True)
time.sleep(1000)
"""

HANGS = """
import os, time
import steadfast.elastic as elastic

state = elastic.ObjectState(step=0)

def stuck():
    time.sleep(1000)

@elastic.run
def train(state):
    state.step += 1
    state.commit()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        stuck()

train(state)
"""


def program(directory: pathlib.Path, text: str) -> "list[str]":
    file = directory / "train.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def test_workers_whose_collectives_always_fail_are_regrouped_a_limited_number_of_times(tmp_path):
    """A collective that fails although no worker was lost counts as a failure, as an exit would."""
    run = [PROGRAM, "run", "--standalone", "--max-restarts", "2", "--", *program(tmp_path, DISAGREES)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode == 1, ended.stderr
    assert [line for line in ended.stdout.splitlines() if "round" in line] == [
        f"[rank 0] round {number}" for number in (1, 2, 3)
    ]
    assert re.search(
        r'no restart is left \(--max-restarts\) reason=".*no node or worker was lost" restarts_max=2', ended.stderr
    ), ended.stderr


def test_a_worker_that_waits_in_vain_is_told_for_whom(tmp_path):
    """The error of a worker that waits for a round says what its node waits for."""
    with Nodes(2, 2, tmp_path) as nodes:
        command = program(tmp_path, WAITS)
        nodes.add(command)
        lost = nodes.add(command)
        log, other = tmp_path / "node-1.log", tmp_path / "node-2.log"
        nodes.until(lambda: "ready" in log.read_text() and "ready" in other.read_text(), "the workers")
        nodes.kill(lost)
        nodes.until(lambda: "timed out:" in log.read_text(), "the end of the wait")
        (line,) = [line for line in log.read_text().splitlines() if "timed out:" in line]
        assert line.endswith("in time: waits for 1 more node to reach the minimum"), line


def test_a_worker_that_hangs_prints_its_stacks_and_is_restarted(tmp_path):
    """S002-11: the program need not register a handler for that."""
    run = [PROGRAM, "run", "--standalone", "--hang-timeout", "2s", "--", *program(tmp_path, HANGS)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"line \d+ in stuck", ended.stderr), ended.stderr
    assert "the workers hang: no output for 2s" in ended.stderr
