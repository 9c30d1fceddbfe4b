"""Datasets whose records the master deals to the workers as they ask for them."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sized, Tuple, Union

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from .elastic._agent import Agent, find_agent
from .elastic._alike import Setting
from .elastic._divided import Divided
from .elastic._membership import assignment, group, membership
from .elastic._order import check_order, order_of, order_settings
from .elastic.errors import CollectiveError
from .errors import InvalidError

__all__ = ["TaskDataset"]

_ROUND, _START, _IS_READ = range(3)
"""Places in what the processes of a loader share."""

_BATCHES_AHEAD = 8
"""How many of its batches a process asks for at once."""


class _Numbered(NamedTuple):
    """A batch, and its number in the loop over the batches of a worker."""

    number: int
    batch: Any


class TaskDataset(Divided, IterableDataset[Any]):
    """Yields batches of records that the master deals to the workers as they ask for them.

    ::

        data = steadfast.data.TaskDataset(images, batch_size=32, passes=10)
        loader = DataLoader(data, batch_size=None, num_workers=4, persistent_workers=True)
        state = steadfast.elastic.TorchState(model=model, optimizer=optimizer, data=data)

        @steadfast.elastic.run
        def train(state):
            for batch in data.batches(loader):
                if batch is not None:
                    accumulator.backward(loss(model(batch)), samples=len(batch))
                if accumulator.step():
                    state.commit()

    It is for a job with ``records`` and ``order = "dynamic"``. Which worker uses a record depends on how fast the workers
    are, so the result does, too; with :class:`steadfast.elastic.ElasticSampler` it does not. Each record counts once in
    each pass, when a state that has seen it is committed. Records that a worker has read and not used, such as those that
    the processes of its loader have prefetched, are dealt again when the workers change.

    Works with ``torchdata.stateful_dataloader.StatefulDataLoader``, too. A program that was started alone gets all records.

    Args:
        data: A dataset with ``len`` and ``[]``, or the number of records: then the samples are their indexes.
        batch_size: Records of a batch. May differ between workers.
        passes: How often each record is used. Without end if ``None``.
        shuffle: Whether to shuffle the records of each pass.
        seed: Decides the order in which records are dealt, with the pass. The same on all workers.
        collate_fn: Makes a batch of a list of samples. By default what PyTorch does.

    Raises:
        InvalidError: A number is less than 1.
    """

    def __init__(
        self,
        data: Union[Sized, int],
        batch_size: int,
        *,
        passes: Optional[int] = 1,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[List[Any]], Any] = default_collate,
    ) -> None:
        self._data = data
        self._records = data if isinstance(data, int) else len(data)
        if self._records < 1:
            raise InvalidError("the dataset has no records")
        if batch_size < 1:
            raise InvalidError(f"`batch_size` is {batch_size}; it is at least 1")
        if passes is not None and passes < 1:
            raise InvalidError(f"`passes` is {passes}; it is at least 1")
        self._batch_size = batch_size
        self._end = (passes or 0) * self._records
        self._shuffle, self._seed = shuffle, seed
        self._collate = collate_fn
        self._order: Tuple[int, Any] = (-1, None)
        # The processes of a loader have a copy of this object, and may live longer than a loop.
        self._shared = torch.zeros(3, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._used = 0
        self.reset()

    def batches(self, loader: Iterable[Any], *, per_update: int = 1) -> Iterator[Any]:
        """Yields the batches of a loader of this dataset, until no worker has one left.

        A worker that has none left gets ``None`` while others have some: it takes part in the updates of all. A batch
        counts as used as soon as it is yielded, so a commit in the body of the loop counts it.

        Args:
            loader: A loader of this dataset with ``batch_size=None``.
            per_update: How many batches this worker uses for each update of all workers. A fast one may use more than
                others, and a ``GradientAccumulator`` uses :func:`steadfast.elastic.accumulation_steps` many.

        Raises:
            CollectiveError: The round is over.
            InvalidError: ``per_update`` is less than 1, or the loader is another one.
        """
        if per_update < 1:
            raise InvalidError(f"`per_update` is {per_update}; it is at least 1")
        start = self._used
        self._shared[_START], self._shared[_IS_READ] = start, 1
        try:
            batches = enumerate(_in_order(loader), 1)
            for number in itertools.count():
                found = next(batches, None)
                # All workers ask at the beginning of an update, however many batches each of them uses for it.
                if number % per_update == 0 and not self._is_left(found):
                    return
                if found is None:
                    yield None
                else:
                    count, batch = found
                    self._used = start + count * self._batch_size
                    yield batch
        finally:
            self._shared[_IS_READ] = 0

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches that this process makes with their numbers, for :meth:`batches`.

        Raises:
            InvalidError: The loop is not one over :meth:`batches`, so that nothing would say what was used.
        """
        round, start, is_read = self._shared.tolist()
        if not is_read:
            raise InvalidError("nothing says which records are used; loop over `data.batches(loader)`")
        info = get_worker_info()
        processes, process = (info.num_workers, info.id) if info else (1, 0)
        records = _List(find_agent() if info else membership().agent, round, self._end)
        wanted = _BATCHES_AHEAD * processes * self._batch_size
        for number in itertools.count(process, processes):
            numbers = records.read(start + number * self._batch_size, self._batch_size, wanted)
            if not numbers:
                return
            yield _Numbered(number, self._collate([self._sample(it) for it in numbers]))

    def reset(self) -> None:
        """Begins with the records that this worker is dealt in the current round."""
        self._used = 0
        self._shared[_ROUND] = assignment().round

    def settings(self) -> List[Setting]:
        """Returns what decides which records are dealt; the same on all workers."""
        return [*order_settings(self._decides_order()), Setting("`passes`", self._end // self._records)]

    def place(self, records: int) -> int:
        """Returns how many records of its list this worker has used in the round.

        Raises:
            InvalidError: The dataset has another number of records than the job.
        """
        if self._records != records:
            raise InvalidError(f"the dataset has {self._records} records, and the job `records = {records}`")
        return self._used

    def state_dict(self) -> Dict[str, Any]:
        """Returns what decides the order. The master knows which records were used."""
        return {"order": self._decides_order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the records were dealt in the same order.

        Raises:
            InvalidError: They were not: some would be used twice.
        """
        check_order(state["order"], self._decides_order(), is_within=True)

    def _is_left(self, found: Optional[Tuple[int, Any]]) -> bool:
        """Returns whether any worker has a batch."""
        has_one = found is not None
        if self._end == 0 or assignment().world_size == 1:
            return has_one
        (any_has,) = group().max([int(has_one)])
        return any_has != 0

    def _sample(self, number: int) -> Any:
        pass_number, place = divmod(number, self._records)
        if self._order[0] != pass_number:
            self._order = pass_number, order_of(**self._decides_order(), epoch=pass_number)
        index = int(self._order[1][place])
        return index if isinstance(self._data, int) else self._data[index]  # type: ignore[index]

    def _decides_order(self) -> Dict[str, Any]:
        return {"samples": self._records, "shuffle": self._shuffle, "seed": self._seed}


def _in_order(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields batches by their numbers, from 0. Some loaders begin with that of their second process."""
    early: Dict[int, Any] = {}
    due = 0
    for found in batches:
        # A loader that makes batches itself makes one of several numbers, too.
        if not isinstance(found, _Numbered) or not isinstance(found.number, int):
            raise InvalidError(
                "`batches` takes a loader of this dataset with `batch_size=None`: the dataset makes the batches, and says "
                "which ones they are"
            )
        number, batch = found
        early[number] = batch
        while due in early:
            yield early.pop(due)
            due += 1


class _List:
    """The records of this worker in a round, as a process of its loader reads them."""

    def __init__(self, agent: Agent, round: int, end: int) -> None:
        self._agent = agent
        self._round = round
        self._end = end
        # What was read last, and its place.
        self._start = 0
        self._numbers: List[int] = []

    def read(self, place: int, count: int, wanted: int) -> List[int]:
        """Returns so many records from a place on; fewer at the end of the list."""
        at = place - self._start
        found = self._numbers[at : at + count] if 0 <= at else []
        if len(found) < count:
            self._start, self._numbers = place, self._fetch(place, count, wanted)
            found = self._numbers[:count]
        return found

    def _fetch(self, place: int, least: int, wanted: int) -> List[int]:
        while True:
            round, ranges, is_end = self._agent.fetch_records(self._round, place, wanted, least, self._end)
            if round != self._round:
                raise CollectiveError(f"round {self._round} is over")
            numbers = [number for start, end in ranges for number in range(start, end)]
            if is_end or least <= len(numbers):
                return numbers
