"""Divides a dataset among workers whose number changes, without losing or repeating a sample."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional, Sized, Union

from ..errors import InvalidError
from ._alike import Setting
from ._divided import Divided, Position
from ._membership import assignment
from ._order import check_order, order_of
from .accumulation import own_lanes

__all__ = ["ElasticSampler"]


class ElasticSampler(Divided):
    """Yields the indexes of this worker's samples: a sampler for ``torch.utils.data.DataLoader``.

    ::

        sampler = steadfast.elastic.ElasticSampler(dataset)
        batches = sampler.batches(32)
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=steadfast.elastic.torch.collate)
        state = steadfast.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler)

    The samples of an epoch are shuffled by seed and epoch and dealt to *lanes*, one each in turn; a lane is
    a virtual worker, computed by the rank that is its number modulo the number of workers. By default there
    is one lane per worker. With a fixed number of lanes, the samples of a step do not depend on the number of
    workers.

    When the workers change, those samples of the epoch that no step has used yet are dealt again. As part of
    a :class:`ObjectState` or :class:`TorchState` that happens by itself.

    Args:
        data: The dataset, or the number of its samples.
        shuffle: Whether to shuffle the samples. If not, they are used in their order.
        seed: Decides the order, with the epoch. The same on all workers.
        lanes: A fixed number of lanes; at least the number of workers.

    Raises:
        InvalidError: ``lanes`` is less than 1, or than the number of workers.
    """

    def __init__(
        self, data: Union[Sized, int], *, shuffle: bool = True, seed: int = 0, lanes: Optional[int] = None
    ) -> None:
        if lanes is not None and lanes < 1:
            raise InvalidError(f"`lanes` is {lanes}; it is at least 1")
        self._length = data if isinstance(data, int) else len(data)
        self._shuffle = shuffle
        self._seed = seed
        self._fixed_lanes = lanes
        self._epoch = 0
        self._processed_num = 0
        # Samples that were used in the epochs before.
        self._earlier = 0
        self.reset()

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._epoch

    @property
    def processed_num(self) -> int:
        """Number of samples of this epoch that all workers together have used."""
        return self._processed_num

    def __len__(self) -> int:
        """Number of samples that this worker has left; differs by at most one between workers."""
        return sum(len(range(lane, self._left(), self._lanes)) for lane in self._own_lanes())

    def __iter__(self) -> Iterator[int]:
        """Yields the indexes of this worker's samples.

        The last batch can be missing on some workers. A loop in which all workers communicate at each step
        uses :meth:`batches` instead.

        Raises:
            InvalidError: The number of lanes is fixed.
        """
        if self._fixed_lanes is not None:
            raise InvalidError("with a fixed number of lanes, batches are what is divided; use `batches`")
        return iter([index for lane in self._own_lanes() for index in self._lane(lane)])

    def batches(self, batch_size: int, *, drop_last: bool = False) -> "Batches":
        """Returns the batches of this worker: a batch sampler, for each epoch anew.

        All workers take the same number of steps; in each step a worker has one batch for each of its lanes.
        In the last step of an epoch batches can be smaller, or empty: such a batch adds nothing, but its
        worker takes part in the step.

        Args:
            batch_size: Samples of a batch. The same on all workers.
            drop_last: Whether to leave out a last step whose batches would not all be full, as
                ``DistributedDataParallel`` needs it: it takes the mean over workers, not over samples.
        """
        return Batches(self, batch_size, drop_last)

    def record_batch(self, batch_index: int, batch_size: int) -> None:
        """Records that this worker has used a batch, and so have the others in the same step.

        Args:
            batch_index: Number of the batch since the loop over the loader was begun, from 0.
            batch_size: Samples of a full batch.
        """
        steps = (batch_index + 1) // len(self._own_lanes())
        used = self._start + steps * batch_size * self._lanes
        self._processed_num = min(used, self._length)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; its samples are in another order. Continues it if it has been begun."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._earlier += self._processed_num
            self._processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Divides the samples that are left among the workers of the current round."""
        place = assignment()
        self._rank, self._world_size = place.rank, place.world_size
        self._lanes = self._fixed_lanes or place.world_size
        # Raises if there are fewer lanes than workers.
        own_lanes(self._rank, self._world_size, self._lanes)
        self._start = self._processed_num
        self._order = order_of(**self._decides_order(), epoch=self._epoch)[self._start :]

    def settings(self) -> List[Setting]:
        """Returns what decides which samples each worker uses; the same on all of them."""
        return [
            Setting("numbers of samples", self._length, "give all of them the same dataset"),
            Setting("`shuffle`", int(self._shuffle), words=("False", "True")),
            Setting("`seed`", self._seed),
            Setting("`lanes`", self._fixed_lanes or 0),
        ]

    def position(self, records: int) -> Position:
        """Returns the position as a job that counts records keeps it with each commit.

        Raises:
            InvalidError: The dataset has another number of samples than the job has records.
        """
        if self._length != records:
            raise InvalidError(f"the dataset has {self._length} samples, and the job `records = {records}`")
        return Position(self._epoch, self._processed_num, self._earlier + self._processed_num)

    def state_dict(self) -> Dict[str, Any]:
        """Returns the position within the data."""
        position = {"epoch": self._epoch, "processed_num": self._processed_num, "earlier": self._earlier}
        return {**position, "order": self._decides_order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a position, and divides the samples that are left.

        Raises:
            InvalidError: The position is within an epoch whose samples were in another order, that of another seed or
                number of samples.
        """
        own = self._decides_order()
        check_order(state.get("order", own), own, is_within=state["processed_num"] > 0)
        self._epoch = state["epoch"]
        self._processed_num = state["processed_num"]
        self._earlier = state.get("earlier", 0)
        self.reset()

    def _decides_order(self) -> Dict[str, Any]:
        """What decides the order of the samples of an epoch."""
        return {"samples": self._length, "shuffle": self._shuffle, "seed": self._seed}

    def _left(self) -> int:
        return len(self._order)

    def _own_lanes(self) -> range:
        return own_lanes(self._rank, self._world_size, self._lanes)

    def _lane(self, lane: int) -> List[int]:
        indexes: List[int] = self._order[lane :: self._lanes].tolist()
        return indexes

    def _batches(self, batch_size: int, drop_last: bool) -> Iterator[List[int]]:
        lanes = [self._lane(lane) for lane in self._own_lanes()]
        for step in range(self._steps(batch_size, drop_last)):
            for lane in lanes:
                yield lane[step * batch_size : (step + 1) * batch_size]

    def _steps(self, batch_size: int, drop_last: bool = False) -> int:
        of_step = self._lanes * batch_size
        return self._left() // of_step if drop_last else -(-self._left() // of_step)


class Batches:
    """The batches of one worker, as lists of indexes. Made by :meth:`ElasticSampler.batches`."""

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool) -> None:
        if batch_size < 1:
            raise InvalidError(f"`batch_size` is {batch_size}; it is at least 1")
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Number of batches that this worker has left."""
        return self._sampler._steps(self._batch_size, self._drop_last) * len(self._sampler._own_lanes())

    def __iter__(self) -> Iterator[List[int]]:
        """Yields the batches that are left."""
        return self._sampler._batches(self._batch_size, self._drop_last)
