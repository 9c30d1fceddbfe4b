"""Warm workers with PyTorch, under real agents."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sys
import time
from typing import List, NamedTuple, Optional

import pytest
from nodes import Nodes, Process

pytest.importorskip("torch")

STEP_SECONDS = 3.0
"""From a kill to the next step, on a busy machine; the import of PyTorch alone takes 2 to 10 s."""
IMPORT_SECONDS = 0.5

TRAIN = """
import os, pathlib, sys, time
begun = time.time()
import torch
import steadfast.elastic as elastic

imported = time.time() - begun
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

@elastic.run
def train(state):
    replica = torch.nn.parallel.DistributedDataParallel(model)
    rank = torch.distributed.get_rank()
    print("worker", os.getpid(), f"imported {imported:.3f}", flush=True)
    while state.step < 60:
        while state.step % 20 == 10 and not os.path.exists(f"{sys.argv[1]}/go-{state.step}"):
            time.sleep(0.02)
        features = torch.arange(32.0).view(4, 8) / 32 + state.step % 5 + rank
        optimizer.zero_grad()
        replica(features).square().mean().backward()
        optimizer.step()
        state.step += 1
        print("step", state.step, f"at {time.time():.3f}", flush=True)
        time.sleep(0.05)
        state.commit()
    return sum(parameter.double().sum().item() for parameter in model.parameters())

print("result", train(state).hex(), flush=True)
"""

pytestmark = pytest.mark.xdist_group("warm")


class Worker(NamedTuple):
    pid: int
    imported: float
    """Seconds that the import of PyTorch has taken."""


class Job:
    """Two nodes of one worker each, that stop at some steps until they are told to go on."""

    def __init__(self, nodes: Nodes, directory: pathlib.Path, *flags: str):
        self.nodes, self._directory = nodes, directory
        (directory / "train.py").write_text(TRAIN)
        command = [sys.executable, str(directory / "train.py"), str(directory)]
        self.each: List[Process] = [nodes.add(command, *flags) for _ in range(2)]

    def find(self, node: int, pattern: str) -> "List[re.Match]":
        return list(re.finditer(pattern, self.each[node].log.read_text()))

    def workers(self, node: int) -> List[Worker]:
        return [Worker(int(it[1]), float(it[2])) for it in self.find(node, r"worker (\d+) imported (\S+)")]

    def until_step(self, step: int) -> None:
        self.nodes.until(lambda: all(self.find(it, f"step {step} ") for it in (0, 1)), f"step {step}")

    def until_warm(self, count: int) -> int:
        """Waits until the second node has had so many warm workers; returns the process of the last one."""
        ready = r"a warm worker is ready process=(\d+)"
        self.nodes.until(lambda: len(self.find(1, ready)) == count, f"{count} warm workers")
        return int(self.find(1, ready)[-1][1])

    def go(self, step: int) -> None:
        (self._directory / f"go-{step}").touch()

    def next_step(self, node: int, after: float) -> Optional[float]:
        times = [float(it[1]) for it in self.find(node, r"step \d+ at (\S+)")]
        return next((it for it in times if after < it), None)

    def results(self) -> "List[str]":
        self.nodes.wait()
        return [it[1] for node in (0, 1) for it in self.find(node, r"result (\S+)")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> "List[str]":
    directory = tmp_path_factory.mktemp("undisturbed")
    with Nodes(2, 2, directory) as nodes:
        job = Job(nodes, directory)
        for step in (10, 30, 50):
            job.go(step)
        return job.results()


def test_a_worker_that_is_killed_is_replaced_by_a_warm_one_in_no_time(tmp_path, undisturbed):
    """S003-24, S003-50: and without a warm one, by a new process; the result is that of an undisturbed job."""
    with Nodes(2, 2, tmp_path) as nodes:
        job = Job(nodes, tmp_path, "--warm-workers", "1")
        job.until_warm(1)
        job.go(10)
        job.until_step(15)
        first, killed = job.workers(1)[0], time.time()
        os.kill(first.pid, signal.SIGKILL)
        nodes.until(lambda: job.next_step(1, killed) is not None, "the next step")
        second = job.workers(1)[1]
        assert second.imported < IMPORT_SECONDS < first.imported
        assert job.next_step(1, killed) - killed < STEP_SECONDS
        os.kill(job.until_warm(2), signal.SIGKILL)
        nodes.until(lambda: bool(job.find(1, "a warm worker has ended")), "the end of the warm worker")
        os.kill(second.pid, signal.SIGKILL)
        job.go(30)
        nodes.until(lambda: len(job.workers(1)) == 3, "a new process")
        assert IMPORT_SECONDS < job.workers(1)[2].imported
        job.go(50)
        assert job.results() == undisturbed
