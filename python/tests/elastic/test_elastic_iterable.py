"""How records of an iterable dataset are divided among workers and the processes of their loaders."""

from __future__ import annotations

import random
from typing import Any, Dict, Iterator, List, Optional

import pytest
import steadfast
from steadfast import elastic
from steadfast.elastic._membership import CURRENT

torch = pytest.importorskip("torch")
et = pytest.importorskip("steadfast.elastic.torch")


class Place:
    """The place of a worker, for as long as the context lasts."""

    def __init__(self, rank: int, world_size: int) -> None:
        agent = elastic.SoloAgent()
        place = elastic.Assignment(1, rank, 0, world_size, 1, rank, world_size, "", 0)
        agent.assignment = lambda: place  # type: ignore[method-assign]
        self._membership = elastic.Membership(agent)

    def __enter__(self) -> None:
        self._token = CURRENT.set(self._membership)

    def __exit__(self, *_: object) -> None:
        CURRENT.reset(self._token)


class Numbers:
    """Numbers in an order that depends on the epoch."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __call__(self, epoch: int) -> Iterator[int]:
        order = list(range(self.records))
        random.Random(epoch).shuffle(order)
        return iter(order)


class Workers:
    """The datasets of all workers of a job, whose steps are taken together."""

    def __init__(self, records: Any, world_size: int, num_workers: int = 0, **settings: Any) -> None:
        self._records, self._num_workers, self._settings = records, num_workers, settings
        self._state: Optional[Dict[str, Any]] = None
        self.resize(world_size)

    def resize(self, world_size: int) -> None:
        self.world_size = world_size
        self.steps_done: List[List[int]] = []
        batches, self._data = [], []
        for rank in range(world_size):
            with Place(rank, world_size):
                data = et.ElasticDataset(self._records, collate_fn=list, **self._settings)
                if self._state is not None:
                    data.load_state_dict(self._state)
                self._data.append(data)
                batches.append(list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=self._num_workers)))
        of_step = [len(data._own_lanes()) for data in self._data]
        steps = {len(it) / count for it, count in zip(batches, of_step)}
        # All workers take the same number of whole steps.
        assert len(steps) == 1 and steps == {int(next(iter(steps)))}
        self._batches = [
            [it[step * count : (step + 1) * count] for step in range(int(next(iter(steps))))]
            for it, count in zip(batches, of_step)
        ]

    def steps_left(self) -> int:
        return len(self._batches[0])

    def steps(self, number: int) -> List[List[int]]:
        """Takes the next steps of a round; returns the records of each, over all workers."""
        taken = [
            [record for batches in self._batches for batch in batches[step] for record in batch or []]
            for step in range(min(number, self.steps_left()))
        ]
        for data in self._data:
            data.record_batch(len(taken) * len(data._own_lanes()) - 1)
        assert len({str(it.state_dict()) for it in self._data}) == 1
        self._state = self._data[0].state_dict()
        return taken


@pytest.mark.parametrize("seed", range(12))
def test_no_record_is_lost_or_used_twice(seed):
    """S001-42, datasets#5360: whatever the number of workers, of lanes, and of processes of their loaders."""
    choose = random.Random(seed)
    records, batch_size = choose.randint(1, 60), choose.randint(1, 5)
    lanes, num_workers = choose.choice([None, 6]), choose.choice([0, 0, 1, 3])
    make = lambda count: {"world_size": count, "num_workers": num_workers}  # noqa: E731
    workers = Workers(Numbers(records), **make(choose.randint(1, 4)), batch_size=batch_size, lanes=lanes)
    used: List[int] = []
    while workers.steps_left():
        for step in workers.steps(choose.randint(1, 3)):
            used += step
        workers.resize(choose.randint(1, 4))
    assert sorted(used) == list(range(records)), (seed, records, batch_size, lanes, num_workers)


@pytest.mark.parametrize("records", [48, 45, 3])
def test_with_fixed_lanes_a_step_has_the_same_records_on_any_number_of_workers(records):
    """S002-8: also with any number of processes of a loader, and the same as of a sampler."""

    def steps(world_size: int, num_workers: int) -> List[List[int]]:
        workers = Workers(Numbers(records), world_size, num_workers, batch_size=2, lanes=6)
        return [sorted(step) for step in workers.steps(100)]

    one = steps(1, 0)
    assert [len(step) for step in one] == [12] * (records // 12) + [records % 12] * (records % 12 > 0)
    for world_size, num_workers in ((2, 0), (3, 2), (4, 0), (5, 1), (6, 3)):
        assert steps(world_size, num_workers) == one
    with Place(1, 3):
        data = et.ElasticDataset(range(records), 2, lanes=6, collate_fn=list)
        sampler = elastic.ElasticSampler(records, lanes=6, shuffle=False)
        assert [it or [] for it in data] == list(sampler.batches(2))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_batches_come_in_their_order_however_many_processes_make_them(num_workers):
    """pytorch#73603"""
    with Place(1, 2):
        data = et.ElasticDataset(Numbers(50), 3, lanes=5, collate_fn=list)
        assert list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=num_workers)) == list(data)


def test_processes_that_live_longer_than_an_epoch_follow_the_position():
    """datasets#6673, datasets#7447: their copy of the dataset is made once."""
    with Place(0, 1):
        data = et.ElasticDataset(Numbers(12), 2, lanes=2, collate_fn=list)
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
        for epoch in range(3):
            data.set_epoch(epoch)
            assert sorted(sum(loader, [])) == list(range(12))
            assert next(iter(loader)) == list(Numbers(12)(epoch))[0:4:2]
        data.record_batch(3)
        data.reset()
        assert sorted(sum(loader, [])) == sorted(list(Numbers(12)(2))[8:])
        # The epoch after one that was continued is whole.
        data.set_epoch(3)
        assert sorted(sum(loader, [])) == list(range(12))
        data.set_epoch(2)
    with Place(1, 2):
        # Another number of workers.
        data.reset()
        assert sum(loader, []) == list(Numbers(12)(2))[1::2]


class Divides(torch.utils.data.IterableDataset):
    """Divides its records among the processes of a loader, as PyTorch recommends."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        yield from range(self.epoch * 100 + part, self.epoch * 100 + 20, parts)


def test_a_dataset_that_divides_itself_among_processes_is_divided_once():
    with Place(0, 1):
        data = et.ElasticDataset(Divides(), 4, collate_fn=list)
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)
        assert sum(loader, []) == list(range(20))
        data.set_epoch(3)
        assert sum(loader, []) == list(range(300, 320))


def seen_by(record: int) -> Any:
    info = torch.utils.data.get_worker_info()
    return record, info.id


def test_only_records_that_a_process_yields_are_transformed():
    with Place(0, 2):
        data = et.ElasticDataset(Numbers(16), 2, lanes=4, transform=seen_by)
        for index, (records, processes) in enumerate(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)):
            assert records.tolist() == list(Numbers(16)(0))[index // 2 * 8 + index % 2 :: 4][:2]
            assert processes.tolist() == [index % 2] * 2


def test_the_position_is_part_of_a_state():
    with Place(0, 1):
        data = et.ElasticDataset(range(10), 2)
        state = elastic.TorchState(data=data)
        data.set_epoch(1)
        data.record_batch(1)
        state.save()
        data.set_epoch(2)
        state.restore()
        assert (data.epoch, data.processed_num) == (1, 4)
        assert [it.tolist() for it in data] == [[4, 5], [6, 7], [8, 9]]
        data.record_batch(0)
        # As in a new round.
        state.reset()
        assert [it.tolist() for it in data] == [[6, 7], [8, 9]]


def test_what_cannot_be_divided_is_refused():
    with Place(0, 3):
        for records, settings, message in (
            (range(3), {"batch_size": 0}, "`batch_size` is 0"),
            (range(3), {"batch_size": 1, "lanes": 0}, "`lanes` is 0; it is at least 1"),
            (iter([1]), {"batch_size": 1}, "`records` has the type list_iterator; pass a function"),
            (7, {"batch_size": 1}, "`records` has the type int"),
            (range(3), {"batch_size": 1, "lanes": 2}, "2 lanes are too few for 3 workers"),
        ):
            with pytest.raises(steadfast.InvalidError, match=message):
                et.ElasticDataset(records, **settings)
