"""Starts jobs and reads their summaries."""

from __future__ import annotations

import pathlib
import time
from typing import Callable, Iterator

import pytest
import steadfast
from steadfast import elastic

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"
PROGRAMS = pathlib.Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _in_the_examples(monkeypatch):
    """Modules that a job names are looked up in the current directory."""
    monkeypatch.chdir(EXAMPLES)


@pytest.fixture
def alone() -> Iterator[None]:
    """Gives a test an elastic membership of its own, of one worker."""
    membership = elastic.Membership(elastic.SoloAgent())
    token = elastic._membership.CURRENT.set(membership)
    yield
    elastic._membership.CURRENT.reset(token)
    membership.close()


@pytest.fixture
def train(tmp_path):
    """Trains a job file with other numbers of processes, and kills of trainers and pservers."""

    def trained(file: str, trainers: int, pservers: int, kills: int = 0) -> dict:
        job = steadfast.Job.from_file(EXAMPLES / file)
        directory = tmp_path / f"{job.name}-{trainers}-{pservers}-{kills}"
        run = steadfast.local(job, trainers=trainers, pservers=pservers, data_dir=directory, progress=False)
        with run:
            for number in range(kills):
                until_step(run, 15 * (number + 1))
                kill(run, "pserver" if number % 3 == 2 else "trainer", number % 2)
            return run.wait(timeout=300)

    return trained


def until_step(run: steadfast.LocalRun, step: int) -> None:
    """Waits until the job has trained that many steps, or has ended."""
    while run.is_running:
        try:
            if step <= run.status().get("version", -1):
                return
        except steadfast.SteadfastError:
            # The master starts, or is replaced.
            pass
        time.sleep(0.01)


def until(run: steadfast.LocalRun, holds: Callable[[], bool]) -> None:
    """Waits until a condition holds; fails if the job ends before."""
    while run.is_running:
        try:
            if holds():
                return
        except steadfast.SteadfastError:
            # The master starts, or is replaced.
            pass
        time.sleep(0.01)
    assert holds(), "the job has ended"


def kill(run: steadfast.LocalRun, role: str, number: int) -> None:
    """Kills a process, as soon as there is one."""
    while run.is_running:
        try:
            run.kill(role, number)
            return
        except steadfast.NotFoundError:
            # It was killed before, and is being restarted.
            time.sleep(0.01)
