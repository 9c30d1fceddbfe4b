"""Workers that are processes, with real groups and real kills."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

from coordinator import Coordinator, served

pytest.importorskip("torch")
import workers

BOUND = 60

pytestmark = pytest.mark.xdist_group("elastic_processes")


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """Forks workers from a process that has imported PyTorch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    yield context
    forkserver._forkserver._stop()


class Job:
    """A coordinator and the processes of its members.

    Args:
        daemon: Whether the processes are daemons, which cannot have processes of their own.
    """

    def __init__(self, context: Any, *members: str, daemon: bool = True) -> None:
        self._context = context
        self._daemon = daemon
        self._stack = contextlib.ExitStack()
        self.coordinator = Coordinator(members)
        self.processes: Dict[str, Any] = {}

    def __enter__(self) -> "Job":
        self._port = self._stack.enter_context(served(self.coordinator))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self._stack.close()

    def start(self, program: Any, *members: str, **settings: Any) -> None:
        for member in members:
            arguments = (self._port, member)
            process = self._context.Process(target=program, args=arguments, kwargs=settings, daemon=self._daemon)
            process.start()
            self.processes[member] = process

    def lose(self, member: str) -> None:
        """Waits until a process has died, as its agent would, and reports it."""
        self.processes[member].join(BOUND)
        assert self.processes[member].exitcode == -signal.SIGKILL
        self.coordinator.remove(member)

    def kill(self, *members: str) -> None:
        for member in members:
            self.processes[member].kill()

    def until(self, *note: Any, count: int = 1) -> None:
        """Waits until workers have reported this."""
        self.coordinator.until(lambda notes: count <= sum(it[: len(note)] == list(note) for it in notes))

    def ends(self) -> Dict[str, List[Any]]:
        """Waits for the ends of all processes that were not killed; returns what they reported."""
        for process in self.processes.values():
            process.join(BOUND)
            assert process.exitcode in (0, -signal.SIGKILL)
        return {it[1]: it[2:] for it in self.coordinator.notes if it[0] == "end"}

    def begins(self, member: str) -> List[List[Any]]:
        return [it[2:] for it in self.coordinator.notes if it[:2] == ["begin", member]]


def test_a_worker_that_is_killed_within_an_update_leaves_no_half_of_it(context):
    """S001-38, S002-8: the weights are those of one worker that never failed."""
    with Job(context, "a", "b", "c") as job:
        job.start(workers.train, "a", "b")
        job.start(workers.train, "c", dies_at=8)
        job.lose("c")
        ends = job.ends()
        # Back to the commit of update 6, not to the start.
        assert [updates for _, _, updates in job.begins("a")] == [0, 6]
        assert ends == {member: [2, 12, workers.expected(1)] for member in ("a", "b")}


def test_the_first_rank_is_lost_and_a_new_worker_gets_the_state_of_the_others(context):
    with Job(context, "a", "b") as job:
        job.start(workers.train, "a", dies_at=5, epochs=2)
        job.start(workers.train, "b", pauses_at=7, epochs=2)
        job.lose("a")
        job.until("paused", "b")
        job.coordinator.add("c")
        job.start(workers.train, "c", epochs=2)
        ends = job.ends()
        # Nothing of what was done before the new worker came is done again.
        assert [updates for _, _, updates in job.begins("c")] == [7]
        assert ends == {member: [2, 24, workers.expected(2)] for member in ("b", "c")}


def test_when_all_workers_are_killed_new_ones_continue_from_the_commit_of_their_agents(context):
    """S003-50: agents keep the commits, so a program needs no backup of its own."""
    with Job(context, "a", "b") as job:
        job.start(workers.train, "a", "b", pauses_at=7)
        job.until("paused", count=2)
        job.kill("a", "b")
        for member in ("a", "b"):
            # The new processes are members before the old ones are not, so the job goes on.
            job.coordinator.add(f"{member}/2")
            job.lose(member)
        job.start(workers.train, "a/2", "b/2")
        ends = job.ends()
        assert job.begins("a/2")[0][2] == 6
        assert ends == {f"{member}/2": [2, 12, workers.expected(1)] for member in ("a", "b")}


def test_a_failure_in_the_backward_pass_is_one_of_the_group(context):
    with Job(context, "a", "b", "c") as job:
        job.start(workers.train_replicas, "a", "c")
        job.start(workers.train_replicas, "b", dies_at=7)
        job.lose("b")
        ends = job.ends()
        assert ends["a"] == ends["c"]
        assert ends["a"][0] == 2


def test_many_rounds_leave_no_threads_or_sockets(context):
    with Job(context, "a", "b") as job:
        job.start(workers.regroup, "a", "b", rounds=20)
        for (counts,) in job.ends().values():
            assert len(counts) == 20
            assert counts[-1] <= counts[2], counts


def test_a_worker_that_hangs_is_not_waited_for_without_end(context):
    with Job(context, "a", "b") as job:
        job.start(workers.exchange_until_it_fails, "a", "b")
        job.until("begin", count=2)
        os.kill(job.processes["b"].pid, signal.SIGSTOP)
        # Its agent takes note some time later.
        job.coordinator.until(lambda _: job.coordinator.is_ready("a"), timeout=20)
        job.kill("b")
        job.lose("b")
        assert set(job.ends()) == {"a"}


def test_a_worker_that_never_joins_its_group_is_not_waited_for_without_end(context):
    with Job(context, "a", "b") as job:
        job.start(workers.exchange_until_it_fails, "a", form_timeout=1)
        job.start(workers.never_connects, "b")
        job.until("here", "b")
        # The first attempt fails while the other worker is alive.
        job.coordinator.until(lambda _: job.coordinator.is_ready("a"), timeout=20)
        job.kill("b")
        job.lose("b")
        assert set(job.ends()) == {"a"}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_updates_are_the_same_on_any_number_of_workers(context, world_size):
    """S002-8: as many updates, each with the mean over the same samples, also in the last one, which is
    short.
    """
    members = [f"m{rank}" for rank in range(world_size)]
    with Job(context, *members) as job:
        job.start(workers.accumulate, *members)
        ends = job.ends()
    means, unused = ends["m0"]
    assert unused == 1
    assert all(it[0] == means for it in ends.values())
    # Sums of samples: they add up to that of the dataset, so each sample counts once.
    assert [round(mean * count, 6) for mean, count in zip(means, (16, 16, 16, 2))] == SUMS


SUMS = [356.0, 355.0, 453.0, 61.0]


def test_buffers_and_scaled_updates_are_the_same_on_any_number_of_workers(context):
    """S002-8: the statistics of BatchNorm are those of all workers, as are scale and norm."""

    def trained(world_size: int) -> List[Any]:
        members = [f"m{rank}" for rank in range(world_size)]
        with Job(context, *members) as job:
            job.start(workers.normalize, *members)
            ends = job.ends()
        assert len(ends) == world_size and all(it == ends["m0"] for it in ends.values())
        return ends["m0"]

    values, scale = trained(1)
    assert scale == 1024.0
    for world_size in (2, 3, 4):
        found, found_scale = trained(world_size)
        assert found_scale == scale
        for name, value in values.items():
            assert np.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("buffers", ["average", "broadcast"])
def test_buffers_have_the_same_bits_on_any_number_of_workers(context, buffers):
    """S002-8: the running statistics depend on the batches, and not on who has computed them."""
    found = []
    for world_size in (1, 2, 3, 4):
        members = [f"m{rank}" for rank in range(world_size)]
        with Job(context, *members) as job:
            job.start(workers.follow_buffers, *members, buffers=buffers)
            ends = job.ends()
        assert len(ends) == world_size and all(it == ends["m0"] for it in ends.values())
        found.append(ends["m0"])
    assert found == [found[0]] * 4
    assert found[0][2] == 3


def test_an_update_that_is_not_finite_on_one_worker_is_left_out_on_all(context):
    """pytorch#90057: and the scale is the same on all, also if one had no sample."""
    with Job(context, "a", "b", "c") as job:
        job.start(workers.overflow, "a", "b", "c")
        ends = job.ends()
    assert len(ends) == 3 and all(it == ends["a"] for it in ends.values())
    found, weights = ends["a"]
    assert found == [[False, 1024.0], [True, 512.0], [False, 512.0], [False, 512.0]]
    # The gradient of each of the others is (6, 8), and clipped to a norm of 5.
    assert np.allclose(weights, [-9, -12])


@pytest.mark.parametrize(
    "of, message",
    [
        ("model", "different sizes of parameters: 3 and 6"),
        ("lanes", "different `lanes`: 4 and 8"),
        ("clip_norm", "different `clip_norm`: 0 and 1"),
        ("scale", "different scales of the scaler: 2 and 4; keep the scaler or the accumulator in the state"),
        ("buffers", "different `buffers`: average and own"),
        ("wrapped", "call the module itself"),
    ],
)
def test_workers_that_accumulate_in_different_ways_are_told(context, of, message):
    """pytorch#136009: updates would differ from then on, without an error."""
    with Job(context, "a", "b") as job:
        job.start(workers.disagree, "a", "b", of=of)
        ends = job.ends()
    assert len(ends) == 2
    assert all(message in it[0] for it in ends.values()), ends
