"""Datasets whose records are dealt to the workers as they ask for them."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import Any, List, Optional, Tuple

import pytest
import steadfast
from nodes import Nodes
from steadfast import _native, elastic
from steadfast.elastic._order import order_of
from waits import Waits

torch = pytest.importorskip("torch")
from steadfast.data import TaskDataset  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

DEALT = pathlib.Path(__file__).parent / "programs" / "dealt.py"


def loaded(data: TaskDataset, processes: int, loader: Any = DataLoader) -> Any:
    return loader(data, batch_size=None, num_workers=processes, persistent_workers=processes > 0)


def flat(batches: Any) -> List[int]:
    return [index for batch in batches for index in batch.tolist()]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("processes", [0, 1, 3])
def test_the_processes_of_a_loader_yield_each_record_once_in_a_pass(processes):
    """S002-2: the batches are those of a loader without processes."""
    data = TaskDataset(10, batch_size=4, passes=3, seed=2)
    batches = list(data.batches(loaded(data, processes)))
    assert [len(batch) for batch in batches] == [4] * 7 + [2]
    orders = [order_of(samples=10, shuffle=True, seed=2, epoch=epoch).tolist() for epoch in range(3)]
    assert flat(batches) == sum(orders, [])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("processes", [0, 2])
def test_a_loop_goes_on_after_the_batches_that_another_one_has_used(processes):
    """S002-2: what the processes have prefetched is not lost."""
    data = TaskDataset(12, batch_size=2, shuffle=False)
    loader = loaded(data, processes)
    first = []
    for batch in data.batches(loader):
        first.append(batch)
        if len(first) == 3:
            break
    assert flat(first) + flat(data.batches(loader)) == list(range(12))
    assert list(data.batches(loader)) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("processes", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was_saved(processes):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TaskDataset(12, batch_size=2, shuffle=False)
    loader = loaded(data, processes, stateful)
    batches = data.batches(loader)
    first = [next(batches) for _ in range(3)]
    saved = loader.state_dict()
    batches.close()
    again = loaded(data, processes, stateful)
    again.load_state_dict(saved)
    assert flat(first) + flat(data.batches(again)) == list(range(12))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("settings", [{"multiprocessing_context": "spawn"}, {"in_order": False}])
def test_loaders_of_any_kind_yield_the_batches_in_their_order(settings):
    data = TaskDataset(12, batch_size=2, shuffle=False)
    assert flat(data.batches(DataLoader(data, batch_size=None, num_workers=2, **settings))) == list(range(12))


class Images:
    """A dataset with ``len`` and ``[]``."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 2), float(index)), index


@pytest.mark.usefixtures("alone")
def test_samples_are_those_of_the_dataset():
    data = TaskDataset(Images(), batch_size=3, shuffle=False)
    images, indexes = next(data.batches(loaded(data, 1)))
    assert images.shape == (3, 2, 2) and indexes.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("alone")
def test_a_dataset_without_an_end_goes_from_pass_to_pass():
    data = TaskDataset(3, batch_size=2, passes=None, shuffle=False)
    batches = data.batches(loaded(data, 2))
    assert [next(batches).tolist() for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    batches.close()


@pytest.mark.usefixtures("alone")
def test_what_would_lose_records_is_refused():
    data = TaskDataset(10, batch_size=2)
    for processes in (0, 1):
        with pytest.raises(steadfast.InvalidError, match=r"loop over `data.batches\(loader\)`"):
            next(iter(loaded(data, processes)))
        with pytest.raises(steadfast.InvalidError, match="`batch_size=None`: the dataset makes the batches"):
            next(data.batches(DataLoader(data, batch_size=2, num_workers=processes)))
    for wrong in (
        {"data": 0, "batch_size": 1},
        {"data": 1, "batch_size": 0},
        {"data": 1, "batch_size": 1, "passes": 0},
    ):
        with pytest.raises(steadfast.InvalidError):
            TaskDataset(**wrong)
    with pytest.raises(steadfast.InvalidError, match="`per_update` is 0"):
        next(data.batches(loaded(data, 0), per_update=0))
    with pytest.raises(steadfast.InvalidError, match="with the seed 1, and here are 10 samples with the seed 0"):
        data.load_state_dict(TaskDataset(10, batch_size=2, seed=1).state_dict())
    with pytest.raises(steadfast.InvalidError, match="has 10 records, and the job `records = 11`"):
        data.place(11)


class Dealer(elastic.SoloAgent):
    """An agent of the only worker of a job that deals its records. ``outcomes`` tells what becomes of commits.

    - ``"decided"`` (the default)
    - ``"lost"``: another worker was lost before it had its copy.
    - ``"unheard"``: it was decided, and the agent could not hear that.
    """

    def __init__(self, records: int, outcomes: Tuple[str, ...] = ()) -> None:
        super().__init__()
        self._records = records
        self._outcomes = list(outcomes)
        self._list: List[int] = []
        self._decided = self._told = 0
        self._seen: List[int] = []
        self.begun: List[Tuple[int, bytes]] = []

    def assignment(self) -> elastic.Assignment:
        return super().assignment()._replace(records=self._records, commit=self._told, is_dynamic=True)

    def next_round(self, after: int, timeout: Any) -> elastic.Assignment:
        self._told, self._list = self._decided, []
        return super().next_round(after, timeout)

    def fetch_records(self, round: int, place: int, wanted: int, least: int, end: int) -> Any:
        free = [number for number in range(end) if number not in self._seen + self._list]
        self._list += free[: max(0, place + wanted - len(self._list))]
        found = self._list[place : place + wanted]
        return (
            self._round,
            [(number, number + 1) for number in found],
            len(self._list) <= place + wanted and not free[wanted:],
        )

    def decide_dynamic_commit(self, phase: int, place: int, number: int, record: bytes) -> Optional[bytes]:
        outcome = self._outcomes.pop(0) if self._outcomes else "decided"
        if phase == 0:
            self.begun.append((number, record))
        if outcome != "lost":
            self._decided = _native.commit_number(self._round, phase)
            self._seen += [it for it in self._list[:place] if it not in self._seen]
        return f"{self._decided}".encode() if outcome == "decided" else None


def trained(agent: Dealer, **attributes: Any) -> Tuple[Any, List[int]]:
    """Commits after each update; returns the state, and how many records it had seen when each round began."""
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    token = elastic._membership.CURRENT.set(membership)
    try:
        data = TaskDataset(8, batch_size=2, shuffle=False)
        state = elastic.ObjectState(data=data, seen=[], **attributes)
        begun = []

        def train(state: Any) -> None:
            begun.append(len(state.seen))
            for batch in data.batches(loaded(data, 0)):
                state.seen += batch.tolist()
                state.commit()

        elastic.run(membership=membership)(train)(state)
        return state, begun
    finally:
        elastic._membership.CURRENT.reset(token)


def test_records_of_a_state_that_does_not_count_are_dealt_again():
    """S002-3, S002-9"""
    for outcome, begins in (("lost", 2), ("unheard", 4)):
        agent = Dealer(8, ("decided", "decided", outcome))
        state, begun = trained(agent)
        assert begun == [0, begins] and sorted(state.seen) == list(range(8)), outcome
        # What an earlier commit has seen is known; of the last one it need not be.
        first = _native.commit_number(0, 1)
        number = first if outcome == "lost" else _native.commit_number(0, 2)
        assert agent.begun == [(0, b""), (number, str(first).encode() if outcome == "lost" else b"")]


@pytest.mark.parametrize("record", [b"", b"7"])
def test_a_process_goes_on_only_from_a_commit_of_which_it_is_known_what_it_has_seen(record):
    """S002-9: otherwise it begins with its first state, so that no record is in it twice."""

    class Kept(Dealer):
        def get_commit(self) -> Any:
            return 7, bytes(elastic.ObjectState(data=TaskDataset(8, 2, shuffle=False), seen=[0, 1])._saved)

        def get_commit_record(self) -> bytes:
            return record

    agent = Kept(8)
    agent._seen = [0, 1] if record else []
    agent._told = 9
    state, begun = trained(agent)
    assert agent.begun == [(7, b"7") if record else (0, b"")]
    assert begun == [len(agent.begun[0][1]) * 2] and sorted(state.seen) == list(range(8))


def test_a_sampler_does_not_use_what_is_dealt():
    agent = Dealer(6)
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    state = elastic.ObjectState(sampler=elastic.ElasticSampler(6))
    with pytest.raises(steadfast.InvalidError, match="ElasticSampler does not use what is dealt; use a TaskDataset"):
        elastic.run(membership=membership)(lambda state: None)(state)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("processes", [0, 2])
def test_each_record_counts_once_under_kills_joins_and_leaves(tmp_path, processes):
    """S002-2, S002-3, S002-9, S003-50"""
    passes = 6
    command = [sys.executable, str(DEALT), str(passes), str(processes), str(tmp_path)]
    with Nodes(1, 3, tmp_path, "--records", "101", "--order", "dynamic") as nodes:
        each = [nodes.add(command, "--max-restarts", "9") for _ in range(2)]

        waits = Waits(nodes, tmp_path, each)
        os.kill(waits.until(10, 2)[0], signal.SIGKILL)
        waits.go(10)
        waits.until(20, 2)
        each.append(nodes.add(command, "--max-restarts", "9"))
        nodes.until(lambda: len(nodes.status().get("nodes", [])) == 3, "a third node")
        waits.go(20)
        waits.until(30, 3)
        nodes.kill(each.pop(0))
        waits.go(30)
        waits.until(40, 2)
        nodes.remove(each.pop(0))
        for update in range(40, 400, 10):
            waits.go(update)
        nodes.wait()
        assert f"used {passes} to {passes} in 101" in waits.text()
