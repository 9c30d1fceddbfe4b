"""Datasets whose records are dealt to the workers of an elastic program, whatever their number.

::

    service = steadfast.data.DataShardService(len(images), seed=1)
    dataset = steadfast.data.ElasticDataset(images, service)
    state = steadfast.elastic.TorchState(model=model, optimizer=optimizer, data=service)

Loops over epochs use :class:`steadfast.elastic.ElasticSampler`; this is for loops over updates, which have none. Workers
of unequal speed use :class:`TaskDataset`, which needs PyTorch. :class:`FileDataset` reads the records of files.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sized, Union

from ._file_dataset import FileDataset
from .elastic._alike import Setting
from .elastic._divided import Divided, Position
from .elastic._membership import assignment
from .elastic._order import check_order, order_of, order_settings
from .errors import InvalidError

if TYPE_CHECKING:
    from ._task_dataset import TaskDataset

__all__ = ["DataShardService", "ElasticDataset", "FileDataset", "TaskDataset"]


class DataShardService(Divided):
    """Tells each worker which record it uses next, for ever: one pass over the data follows the other.

    The records of a pass are shuffled by seed and pass, and dealt to the workers one each in turn. All workers use the
    same number of records between two commits of a state that has the service. When the workers change, those that no
    worker has used are dealt on: none is lost or repeated.

    Args:
        data: The dataset, or the number of its records.
        shuffle: Whether to shuffle the records. If not, they are used in their order.
        seed: Decides the order, with the pass. The same on all workers.
    """

    def __init__(self, data: Union[Sized, int], *, shuffle: bool = True, seed: int = 0) -> None:
        self._records = data if isinstance(data, int) else len(data)
        if self._records < 1:
            raise InvalidError("the dataset has no records")
        self._shuffle = shuffle
        self._seed = seed
        # Records of all passes that all workers had used when their present group was formed.
        self._start = 0
        self._fetched = 0
        self._pass: Optional[int] = None
        self._order: List[int] = []
        self._rank, self._world_size = 0, 1
        self.reset()

    @property
    def epoch(self) -> int:
        """The pass of the next record, from 0."""
        return self._used() // self._records

    def fetch_record_index(self) -> int:
        """Returns the index of the record that this worker uses next.

        Raises:
            InvalidError: It is called in a process of a ``DataLoader``, which reads ahead of what is used.
        """
        if _is_ahead():
            raise InvalidError(
                "records are fetched in a process of a DataLoader, which reads ahead of what the program uses; pass "
                "`num_workers=0`, or use `ElasticSampler.batches`, which deals records to any number of processes"
            )
        number = self._start + self._fetched * self._world_size + self._rank
        self._fetched += 1
        pass_number, index = divmod(number, self._records)
        if pass_number != self._pass:
            self._pass, self._order = pass_number, order_of(**self._decides_order(), epoch=pass_number).tolist()
        return self._order[index]

    def reset(self) -> None:
        """Deals the records that no worker has used to the workers of the current round."""
        self._start, self._fetched = self._used(), 0
        place = assignment()
        self._rank, self._world_size = place.rank, place.world_size

    def settings(self) -> List[Setting]:
        """Returns what decides which records each worker uses; the same on all of them."""
        return order_settings(self._decides_order())

    def position(self, records: int) -> Position:
        """Returns the position as a job that counts records keeps it with each commit.

        Raises:
            InvalidError: The dataset has another number of records than the job.
        """
        if self._records != records:
            raise InvalidError(f"the dataset has {self._records} records, and the job `records = {records}`")
        return Position(*divmod(self._used(), records), self._used())

    def state_dict(self) -> Dict[str, Any]:
        """Returns the position within the data."""
        return {"used": self._used(), "order": self._decides_order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a position, and deals the records that are left.

        Raises:
            InvalidError: The position is within a pass whose records were in another order.
        """
        check_order(state["order"], self._decides_order(), is_within=state["used"] % state["order"]["samples"] != 0)
        self._start, self._fetched = state["used"], 0
        self.reset()

    def _used(self) -> int:
        """Returns the records that all workers together have used."""
        return self._start + self._fetched * self._world_size

    def _decides_order(self) -> Dict[str, Any]:
        return {"samples": self._records, "shuffle": self._shuffle, "seed": self._seed}


class ElasticDataset:
    """A map-style dataset for ``torch.utils.data.DataLoader``, with a service or without one.

    With a service it has no end: the index is ignored, and a sample is that of the next record of this worker. Without
    one it is the dataset.

    ::

        class Images(steadfast.data.ElasticDataset):
            def read_sample(self, index):
                return decode(self.paths[index])

    Args:
        data: A dataset with ``len`` and ``[]``; a subclass may define :meth:`read_sample` and ``__len__`` itself.
        data_shard_service: Deals the records to the workers of an elastic program.
    """

    def __init__(self, data: Any = None, data_shard_service: Optional[DataShardService] = None) -> None:
        self.data = data
        self.data_shard_service = data_shard_service

    def __len__(self) -> int:
        """Returns ``sys.maxsize`` with a service: the number of samples of this worker is not known ahead."""
        return sys.maxsize if self.data_shard_service is not None else len(self.data)

    def __getitem__(self, index: int) -> Any:
        """Returns a sample: with a service that of the next record of this worker, whatever the index."""
        if self.data_shard_service is not None:
            index = self.data_shard_service.fetch_record_index()
        return self.read_sample(index)

    def read_sample(self, index: int) -> Any:
        """Returns the sample of a record."""
        return self.data[index]


def _is_ahead() -> bool:
    """Returns whether this is a process of a loader."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and torch_data.get_worker_info() is not None


def __getattr__(name: str) -> Any:
    if name == "TaskDataset":
        from ._task_dataset import TaskDataset

        return TaskDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
