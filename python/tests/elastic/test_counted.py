"""Jobs that count records: a record counts when all workers have a state that has seen it."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import Any, List, Tuple

import pytest
import steadfast
from nodes import Nodes
from steadfast import _native, elastic
from steadfast.data import DataShardService
from waits import Waits

COUNTED = pathlib.Path(__file__).parent / "programs" / "counted.py"


class Agent(elastic.SoloAgent):
    """An agent of the only worker of a job that counts records. ``outcomes`` tells what becomes of commits.

    - ``"decided"`` (the default)
    - ``"lost"``: another worker was lost before it had its copy.
    - ``"unheard"``: it was decided, and the agent could not hear that.
    """

    def __init__(self, records: int, outcomes: Tuple[str, ...] = ()) -> None:
        super().__init__()
        self._records = records
        self._outcomes = list(outcomes)
        self._decided = 0
        self._told = 0
        self.positions: List[Tuple[int, int, int]] = []

    def assignment(self) -> elastic.Assignment:
        return super().assignment()._replace(records=self._records, commit=self._told)

    def next_round(self, after: int, timeout: Any) -> elastic.Assignment:
        self._told = self._decided
        return super().next_round(after, timeout)

    def decide_commit(self, phase: int, pass_number: int, used: int, seen: int) -> bool:
        outcome = self._outcomes.pop(0) if self._outcomes else "decided"
        self.positions.append((pass_number, used, seen))
        if outcome != "lost":
            self._decided = _native.commit_number(self._round, phase)
        return outcome == "decided"


def trained(agent: Agent, updates: int, sampler: Any = None, **attributes: Any) -> Tuple[Any, List[Tuple[int, int]]]:
    """Uses two samples in each update, and commits after it; returns the state, and where each round began."""
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    token = elastic._membership.CURRENT.set(membership)
    try:
        sampler = elastic.ElasticSampler(6, shuffle=False) if sampler is None else sampler
        state = elastic.ObjectState(sampler=sampler, epoch=0, seen=[], **attributes)
        begun = []

        def train(state: Any) -> None:
            begun.append((state.epoch, len(state.seen)))
            while len(state.seen) < 2 * updates:
                sampler.set_epoch(state.epoch)
                for index, batch in enumerate(sampler.batches(2)):
                    state.seen += batch
                    sampler.record_batch(index, 2)
                    state.commit()
                    if len(state.seen) == 2 * updates:
                        return
                state.epoch += 1

        elastic.run(membership=membership)(train)(state)
        return state, begun
    finally:
        elastic._membership.CURRENT.reset(token)


def test_commits_say_how_far_they_are_in_the_data():
    """S003-51: the first commit of a round is the state that it begins with."""
    agent = Agent(6)
    state, _ = trained(agent, 5)
    assert state.seen == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert agent.positions == [(0, 0, 0), (0, 2, 2), (0, 4, 4), (0, 6, 6), (1, 2, 8), (1, 4, 10)]


def test_commits_of_a_loop_without_epochs_count_too():
    """S002-2, S003-51"""
    agent = Agent(6, ("decided", "decided", "lost"))
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    service = DataShardService(6, shuffle=False)
    state = elastic.ObjectState(service=service, seen=[])

    @elastic.run(membership=membership)
    def train(state: Any) -> None:
        while len(state.seen) < 8:
            state.seen += [service.fetch_record_index() for _ in range(4)]
            state.commit()

    train(state)
    assert state.seen == [0, 1, 2, 3, 4, 5, 0, 1]
    assert agent.positions == [(0, 0, 0), (0, 4, 4), (1, 2, 8), (0, 4, 4), (1, 2, 8)]


def test_a_state_that_another_worker_lacks_does_not_count():
    """S002-9"""
    agent = Agent(6, ("decided", "decided", "lost"))
    state, begun = trained(agent, 3)
    assert begun == [(0, 0), (0, 2)]
    assert state.seen == [0, 1, 2, 3, 4, 5]
    assert agent.positions[2:4] == [(0, 4, 4), (0, 2, 2)]


def test_a_state_that_was_decided_counts_though_no_worker_heard_of_it():
    agent = Agent(6, ("decided", "decided", "unheard"))
    state, begun = trained(agent, 3)
    assert begun == [(0, 0), (0, 4)]
    assert state.seen == [0, 1, 2, 3, 4, 5]


def test_the_first_state_of_a_round_may_be_lost_too():
    agent = Agent(6, ("lost", "decided", "decided", "lost", "lost"))
    state, begun = trained(agent, 3)
    assert begun == [(0, 0), (0, 2)]
    assert state.seen == [0, 1, 2, 3, 4, 5]


def test_a_change_of_members_loses_nothing_unless_a_worker_was_lost():
    """S002-9: workers that leave in good order commit first; otherwise others go back to the last commit."""

    class Changing(Agent):
        def changes(self, since: int) -> Tuple[int, int]:
            return (1, 2) if since < 1 and len(self.positions) == 3 else (max(since, 1), 0)

    for outcomes, begins in (((), 4), (("decided",) * 3 + ("lost",), 4)):
        agent = Changing(6, outcomes)
        state, begun = trained(agent, 3)
        assert begun == [(0, 0), (0, begins)], outcomes
        assert state.seen == [0, 1, 2, 3, 4, 5]


def test_a_state_without_its_place_in_the_data_is_refused():
    with pytest.raises(steadfast.InvalidError, match=r"the dataset has 6 samples, and the job `records = 7`"):
        trained(Agent(7), 1)

    class Other(elastic.ElasticSampler):
        pass

    with pytest.raises(steadfast.InvalidError, match="one ElasticSampler, DataShardService or TaskDataset; it has 2"):
        trained(Agent(6), 1, other=Other(6))


def test_an_iterable_dataset_does_not_count_records():
    et = pytest.importorskip("steadfast.elastic.torch")
    torch = pytest.importorskip("torch")

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(6))

    agent = Agent(6)
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    state = elastic.ObjectState(data=et.ElasticDataset(Numbers(), batch_size=2))
    with pytest.raises(steadfast.InvalidError, match="ElasticDataset does not"):
        elastic.run(membership=membership)(lambda state: None)(state)


@pytest.mark.usefixtures("alone")
def test_each_record_counts_once_under_kills_joins_and_leaves(tmp_path):
    """S003-50, S003-51, S002-3, S002-9"""
    passes = 4
    command = [sys.executable, str(COUNTED), str(passes), str(tmp_path)]
    with Nodes(1, 3, tmp_path, "--records", "101") as nodes:
        each = [nodes.add(command, "--max-restarts", "9") for _ in range(2)]

        waits = Waits(nodes, tmp_path, each)
        os.kill(waits.until(0, 2)[0], signal.SIGKILL)
        waits.go(0)
        waits.until(1, 2)
        each.append(nodes.add(command, "--max-restarts", "9"))
        nodes.until(lambda: len(nodes.status().get("nodes", [])) == 3, "a third node")
        waits.go(1)
        waits.until(2, 3)
        nodes.kill(each.pop(0))
        waits.go(2)
        waits.until(3, 2)
        due = {"pass": 3, "used": 36, "seen": 3 * 101 + 36}
        nodes.until(lambda: due.items() <= nodes.status()["data"]["commit"].items(), "the commit of update 3")
        nodes.remove(each.pop(0))
        waits.go(3)
        nodes.wait()
        assert f"used 1 to 1 in {passes * 101}" in waits.text()
