"""Datasets that can only be read from their start, divided by lanes among workers and their loaders' processes."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Union

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ..errors import InvalidError
from ._alike import Setting
from ._divided import Divided
from ._membership import assignment
from .accumulation import own_lanes

__all__ = ["ElasticDataset", "collate"]

_EPOCH, _START, _RANK, _WORLD_SIZE = range(4)
"""Places in the position that the processes of a loader share."""


class ElasticDataset(Divided, IterableDataset[Any]):
    """Yields this worker's batches of an iterable dataset, whose position is part of a state.

    ::

        def records(epoch):
            return read(shuffled(files, seed=epoch))

        data = steadfast.elastic.torch.ElasticDataset(records, batch_size=16, lanes=8)
        state = steadfast.elastic.TorchState(model=model, optimizer=optimizer, data=data)
        ...
            loader = DataLoader(data, batch_size=None, num_workers=4)
            for index, batch in enumerate(loader):
                if batch is not None:
                    accumulator.backward(loss(model(batch)), samples=len(batch))
                if accumulator.step():
                    data.record_batch(index)
                    state.commit()

    Records are dealt as by :class:`ElasticSampler`: one to each lane in turn, so that a step has the same records for
    any number of workers. All workers take the same number of steps; in the last one of an epoch batches can be
    smaller, or ``None``. The processes of a ``DataLoader`` divide the batches of their worker, and yield them in their
    order, however many there are; they may be persistent.

    Each process reads all records, since only reading finds how many there are: put what is expensive, such as the
    decoding of images, into ``transform``, which sees only the records that the process yields. A round that begins in
    the middle of an epoch reads it from its start, and skips the records that were used.

    Args:
        records: Called with the epoch; returns its records, in an order that depends on the epoch alone. Or an
            iterable, whose ``set_epoch`` is called if it has one. It need not divide its records among workers or
            processes: what it yields is divided here. A dataset that divides them by the processes of the loader
            does not notice them.
        batch_size: Records of a batch. The same on all workers.
        lanes: A fixed number of lanes; at least the number of workers. By default one for each worker.
        transform: Makes a sample of a record.
        collate_fn: Makes a batch of a list of samples. By default what PyTorch does.

    Raises:
        InvalidError: A number is invalid, or ``records`` is neither a function nor an iterable, or is an iterator,
            which can be read only once.
    """

    def __init__(
        self,
        records: Union[Callable[[int], Iterable[Any]], Iterable[Any]],
        batch_size: int,
        *,
        lanes: Optional[int] = None,
        transform: Optional[Callable[[Any], Any]] = None,
        collate_fn: Callable[[List[Any]], Any] = default_collate,
    ) -> None:
        if batch_size < 1:
            raise InvalidError(f"`batch_size` is {batch_size}; it is at least 1")
        if lanes is not None and lanes < 1:
            raise InvalidError(f"`lanes` is {lanes}; it is at least 1")
        if not callable(records) and (not hasattr(records, "__iter__") or hasattr(records, "__next__")):
            raise InvalidError(
                f"`records` has the type {type(records).__name__}; pass a function of the epoch that returns its "
                "records, or an iterable that can be read again"
            )
        self._records = records
        self._batch_size = batch_size
        self._fixed_lanes = lanes
        self._transform = transform
        self._collate = collate_fn
        # The processes of a loader have a copy of this object, and may live longer than an epoch.
        self._shared = torch.zeros(4, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._processed_num = 0
        self.reset()

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return int(self._shared[_EPOCH])

    @property
    def processed_num(self) -> int:
        """Number of records of this epoch that all workers together have used.

        In its last step an epoch may have fewer records than a step; they count as a whole one.
        """
        return self._processed_num

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of this worker that are left in the epoch, or those of them that this process makes."""
        info = get_worker_info()
        processes, process = (info.num_workers, info.id) if info else (1, 0)
        lanes, own = self._lanes(), self._own_lanes()
        left = self._left()
        for step in itertools.count():
            first = step * len(own)
            mine = [lane for number, lane in enumerate(own, first) if number % processes == process]
            batches: Dict[int, List[Any]] = {lane: [] for lane in mine}
            if not _read_step(left, batches, lanes, self._batch_size):
                return
            for records in batches.values():
                yield self._batch(records)

    def record_batch(self, batch_index: int) -> None:
        """Records that this worker has used a batch, and so have the others in the same step.

        Args:
            batch_index: Number of the batch since the loop over the loader was begun, from 0.
        """
        steps = (batch_index + 1) // len(self._own_lanes())
        self._processed_num = int(self._shared[_START]) + steps * self._batch_size * self._lanes()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. Continues it if it has been begun. Call it before the loop over the loader."""
        if epoch != self.epoch:
            self._shared[_EPOCH] = epoch
            self._processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Divides the records that are left among the workers of the current round."""
        place = assignment()
        self._shared[_START] = self._processed_num
        self._shared[_RANK], self._shared[_WORLD_SIZE] = place.rank, place.world_size
        # Raises if there are fewer lanes than workers.
        own_lanes(place.rank, place.world_size, self._lanes())

    def settings(self) -> List[Setting]:
        """Returns what decides which records each worker uses; the same on all of them."""
        return [Setting("`batch_size`", self._batch_size), Setting("`lanes`", self._fixed_lanes or 0)]

    def state_dict(self) -> Dict[str, Any]:
        """Returns the position within the data."""
        return {"epoch": self.epoch, "processed_num": self._processed_num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a position, at the next iteration."""
        self._shared[_EPOCH] = state["epoch"]
        self._processed_num = state["processed_num"]
        self.reset()

    def _lanes(self) -> int:
        return self._fixed_lanes or int(self._shared[_WORLD_SIZE])

    def _own_lanes(self) -> range:
        return own_lanes(int(self._shared[_RANK]), int(self._shared[_WORLD_SIZE]), self._lanes())

    def _left(self) -> Iterator[Any]:
        """Yields the records of the epoch that are left, of all workers and processes."""
        epoch, start, *_ = self._shared.tolist()

        def read() -> Iterator[Any]:
            if callable(self._records):
                return iter(self._records(epoch))
            set_epoch = getattr(self._records, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            return iter(self._records)

        return itertools.islice(_undivided(read), start, None)

    def _batch(self, records: List[Any]) -> Any:
        if not records:
            return None
        samples = records if self._transform is None else [self._transform(it) for it in records]
        return self._collate(samples)


def collate(samples: List[Any]) -> Any:
    """Returns a batch as PyTorch's ``default_collate`` does, and ``None`` for an empty one."""
    return default_collate(list(samples)) if samples else None


def _read_step(records: Iterator[Any], batches: Dict[int, List[Any]], lanes: int, batch_size: int) -> bool:
    """Reads the records of a step, and keeps those of the batches. Returns whether there was one."""
    number = -1
    for number, record in enumerate(itertools.islice(records, lanes * batch_size)):
        batch = batches.get(number % lanes)
        if batch is not None:
            batch.append(record)
    return number >= 0


def _undivided(read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yields all records, also of a source that yields only a part of them in each process of a loader."""
    records = _alone(read)
    while True:
        try:
            record = _alone(lambda: next(records))
        except StopIteration:
            return
        yield record


def _alone(function: Callable[[], Any]) -> Any:
    """Calls a function for which ``get_worker_info`` returns ``None``, as outside of the processes of a loader."""
    worker: Any = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        return function()
    finally:
        worker._worker_info = info
