"""Elastic training in PyTorch."""

from __future__ import annotations

import atexit
import gc
import logging
import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ..errors import InvalidError
from ._accumulator import GradientAccumulator
from ._agent import Assignment, Buffer
from ._distributed_optimizer import DistributedOptimizer
from ._failures import collective_failure
from ._iterable import ElasticDataset, collate
from .errors import CollectiveError
from .sampler import ElasticSampler
from .state import ObjectState

__all__ = ["DistributedOptimizer", "ElasticDataset", "GradientAccumulator", "ProcessGroup", "TorchState", "collate"]

_BROADCAST_BYTES = 1 << 28
"""Bytes of one broadcast; larger data is sent in several."""

_LEAVE_SECONDS = 5.0
"""Longest wait for operations that have begun when a group is left."""

_CONNECT_TIMEOUT = timedelta(seconds=10)
"""Longest wait for a store that has just been served."""

_PAUSE_SECONDS_MIN = 0.002
_PAUSE_SECONDS_MAX = 0.25
"""Pauses between looks whether others are there."""

_LOG = logging.getLogger("steadfast.elastic")


class TorchState(ObjectState):
    """Keeps a model, its optimizer, and attributes.

    ::

        state = steadfast.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    Everything is kept through ``state_dict`` and ``load_state_dict``, learning rate schedules too if they are
    passed as attributes.

    Args:
        model: The module. It is wrapped in ``DistributedDataParallel`` within the training function, if at
            all: the wrapper belongs to one process group.
        optimizer: Its optimizer.
        sampler: The position within the data.
        attributes: Other attributes, as of :class:`ObjectState`.

    Raises:
        InvalidError: An attribute cannot be saved, or has the name of a method.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sampler: ElasticSampler

    def __init__(
        self,
        model: Optional[torch.nn.Module] = None,
        optimizer: Optional[torch.optim.Optimizer] = None,
        sampler: Optional[ElasticSampler] = None,
        **attributes: Any,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise InvalidError(
                "`model` is a DistributedDataParallel, which belongs to one process group; pass its module, and "
                "wrap it within the training function"
            )
        kept: Dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
        super().__init__(**{name: it for name, it in kept.items() if it is not None}, **attributes)


class ProcessGroup:
    """The process group of one round: ``torch.distributed`` in this process, until it is closed.

    Args:
        assignment: The place of this worker.
        backend: Name of a backend, as of ``torch.distributed.init_process_group``. By default gloo for the
            CPU and NCCL for GPUs.
        timeout: Seconds after which an operation fails if a worker does not take part in it.
        form_timeout: Seconds after which forming the group fails if a worker does not take part.
        is_over: Whether the round is over. Then workers that are missing are not waited for.

    Raises:
        CollectiveError: The group was not formed; another worker may be gone.
        InvalidError: ``torch.distributed`` is initialized already.
    """

    def __init__(
        self,
        assignment: Assignment,
        *,
        backend: Optional[str] = None,
        timeout: float = 600.0,
        form_timeout: float = 60.0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        if dist.is_initialized():
            raise InvalidError("torch.distributed is initialized already; the process group is formed by steadfast")
        if backend is None:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            _form(assignment, backend, timedelta(seconds=form_timeout), is_over)
            _set_timeout(timedelta(seconds=timeout))
        except Exception as error:
            self.close()
            # Alone, no other worker can have caused it.
            failure = None if assignment.world_size == 1 else collective_failure(error)
            if failure is None:
                raise
            raise failure from error
        # A program may go on with the group when its training has ended. Threads of a group that is there when the
        # interpreter ends may abort the process.
        atexit.register(_leave)

    def broadcast_bytes(self, data: Optional[Buffer], root: int) -> Buffer:
        """Returns the data of the rank ``root``; that of the others is ignored."""
        sent = memoryview(b"")
        if dist.get_rank() == root and data is not None:
            sent = memoryview(data).cast("B")
        size = torch.tensor([len(sent)])
        self._broadcast(size, root)
        if not size.item():
            return b""
        # PyTorch takes memory that can be written only.
        received = bytearray(sent or int(size)) if sent.readonly else sent
        for part in torch.frombuffer(received, dtype=torch.uint8).split(_BROADCAST_BYTES):  # type: ignore[no-untyped-call]
            self._broadcast(part, root)
        return received

    def max(self, values: Sequence[int]) -> List[int]:
        """Returns the maximum of each value over all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise _failure(error) from error
        found: List[int] = tensor.tolist()
        return found

    def close(self) -> None:
        """Leaves the group without waiting for others. Operations that wait for this worker fail."""
        if dist.is_initialized():
            atexit.unregister(_leave)
            last, group = [dist.group.WORLD], weakref.ref(dist.group.WORLD)
            dist.destroy_process_group()
            # Waits for operations that have begun, which can take until they time out.
            leaving = threading.Thread(target=_drop, args=(last, group), name="leave-group", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_SECONDS)
            if leaving.is_alive() or group() is not None:
                _LOG.info("connections of a round stay open: its process group is in use, or is referred to")

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        try:
            dist.broadcast(tensor, root)
        except RuntimeError as error:
            raise _failure(error) from error


def _form(place: Assignment, backend: str, timeout: timedelta, is_over: Callable[[], bool]) -> None:
    store: Store
    if place.world_size == 1:
        store = HashStore()
    else:
        deadline = time.monotonic() + timeout.total_seconds()
        if place.rank != 0:
            _until_served(place, deadline, is_over)
        store = TCPStore(
            place.master_addr,
            place.master_port,
            is_master=place.rank == 0,
            # Rank 0 may have left already.
            timeout=min(timeout, _CONNECT_TIMEOUT),
            wait_for_workers=False,
        )
        store.set_timeout(timeout)
        _gather(PrefixStore(f"gather/{place.round}", store), place.world_size, deadline, is_over)
    # PyTorch numbers groups, also those that were not formed, and the number is part of their keys in the store:
    # workers whose numbers differ would never find each other.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=PrefixStore(f"round/{place.round}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


# PyTorch waits for the store, and for each worker, too; but its waits do not end with the round.
def _until_served(place: Assignment, deadline: float, is_over: Callable[[], bool]) -> None:
    """Waits until rank 0 serves the store."""
    pauses = _pauses("rank 0 does not serve its store", deadline, is_over)
    while True:
        try:
            socket.create_connection((place.master_addr, place.master_port), 1.0).close()
            return
        except OSError:
            next(pauses)


def _gather(store: Store, world_size: int, deadline: float, is_over: Callable[[], bool]) -> None:
    """Waits until all workers have called this. Either all of them go on, or none: the first one decides."""
    pauses = _pauses(f"not all of {world_size} workers have come to its group", deadline, is_over)
    here = store.add("here", 1)
    while here < world_size and not store.check(["decision"]):
        try:
            next(pauses)
        except CollectiveError:
            if store.compare_set("decision", "", "leave") == b"leave":
                raise
        here = store.add("here", 0)
    if store.compare_set("decision", "", "form") != b"form":
        raise CollectiveError("the round is over: a worker has left its group")


def _pauses(state: str, deadline: float, is_over: Callable[[], bool]) -> Iterator[None]:
    """Sleeps at each step, longer and longer.

    Raises:
        CollectiveError: The round or the time is over. Says what was waited for.
    """
    pause = _PAUSE_SECONDS_MIN
    while True:
        if is_over():
            raise CollectiveError(f"the round is over: {state}")
        if deadline <= time.monotonic():
            raise CollectiveError(f"the group was not formed in time: {state}")
        time.sleep(pause)
        pause = min(pause * 1.5, _PAUSE_SECONDS_MAX)
        yield


def _leave() -> None:
    """Leaves the group at the end of the program, when no thread can be started any more."""
    if dist.is_initialized():
        last, group = [dist.group.WORLD], weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        _drop(last, group)


def _drop(last: List[Any], group: "weakref.ref[Any]") -> None:
    """Drops the last reference to a group, with which its connections close."""
    last.clear()
    if group() is not None:
        # Others are in the reference cycles of DistributedDataParallel.
        gc.collect()


def _set_timeout(timeout: timedelta) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:
        # In older releases.
        dist.distributed_c10d._set_pg_timeout(timeout)


def _failure(error: RuntimeError) -> CollectiveError:
    return collective_failure(error) or CollectiveError(str(error))
