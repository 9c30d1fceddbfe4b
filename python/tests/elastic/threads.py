"""Workers that are threads: a group in memory, and a way to run a program on several."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence

from steadfast.elastic import Assignment, Membership, WorkerLost

from coordinator import Coordinator


class Killed(BaseException):
    """Ends a worker, as a signal would."""


class _Room:
    """Where the workers of one round meet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._values: Dict[int, Dict[int, Any]] = {}
        self._is_broken = False

    def exchange(self, step: int, rank: int, value: Any) -> Dict[int, Any]:
        with self._changed:
            values = self._values.setdefault(step, {})
            values[rank] = value
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_broken or len(values) == self._size, 30)
            if len(values) < self._size:
                raise WorkerLost("a worker has left")
            return values

    def leave(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()


class MemoryGroup:
    """The group of one worker of a round."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room = room
        self._rank = rank
        self._step = 0

    def exchange(self, value: Any) -> List[Any]:
        """Returns the values of all ranks."""
        self._step += 1
        values = self._room.exchange(self._step, self._rank, value)
        return [values[rank] for rank in sorted(values)]

    def broadcast_bytes(self, data: Optional[Any], root: int) -> Any:
        return bytes(self.exchange(None if data is None else bytes(data))[root])

    def max(self, values: Sequence[int]) -> List[int]:
        return [max(column) for column in zip(*self.exchange(list(values)))]

    def close(self) -> None:
        self._room.leave()


class Threads:
    """Runs a program on workers that are threads."""

    def __init__(self, *members: str) -> None:
        self.coordinator = Coordinator(members)
        self._rooms: Dict[int, _Room] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(16)

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def membership(self, member: str) -> Membership:
        return Membership(self.coordinator.agent(member), self._connect)

    def start(self, program: Callable[[str, Membership], Any], *members: str) -> List["Future[Any]"]:
        """Starts the program on new threads; it is called with the member and its membership."""
        return [self._pool.submit(self._run, program, member) for member in members]

    def run(self, program: Callable[[str, Membership], Any], *members: str) -> List[Any]:
        """Runs the program, and returns its results."""
        return [it.result(60) for it in self.start(program, *members)]

    def _run(self, program: Callable[[str, Membership], Any], member: str) -> Any:
        membership = self.membership(member)
        try:
            return program(member, membership)
        except Killed:
            membership.close()
            self.coordinator.remove(member)
            return None

    def _connect(self, assignment: Assignment) -> MemoryGroup:
        with self._lock:
            room = self._rooms.setdefault(assignment.round, _Room(assignment.world_size))
        return MemoryGroup(room, assignment.rank)
