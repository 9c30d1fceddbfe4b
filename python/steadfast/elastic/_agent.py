"""What a worker learns from the agent that started it."""

from __future__ import annotations

import os
import threading
from typing import List, NamedTuple, Optional, Protocol, Sequence, Tuple, Union

from .. import _native
from .._stacks import print_stacks_when_asked
from ..errors import InvalidError

__all__ = ["ADDED", "REMOVED", "Agent", "Assignment", "Buffer", "SoloAgent", "agent", "find_agent"]

REMOVED = 1
"""Bit of :meth:`Agent.changes`: a member was removed."""

ADDED = 2
"""Bit of :meth:`Agent.changes`: a member was added."""

AGENT_VARIABLE = "STEADFAST_AGENT"
"""Environment variable by which an agent tells its workers how to reach it."""

Buffer = Union[bytes, bytearray, memoryview]


class Assignment(NamedTuple):
    """The place of a worker in a round."""

    round: int
    """Number of the round; later rounds have larger numbers."""
    rank: int
    """Number of the worker, from 0; the oldest worker has 0."""
    local_rank: int
    """Number of the worker among those of its node."""
    world_size: int
    """Number of workers."""
    local_world_size: int
    """Number of workers of its node."""
    group_rank: int
    """Number of its node."""
    group_world_size: int
    """Number of nodes."""
    master_addr: str
    """Host of rank 0."""
    master_port: int
    """A free port there."""
    records: int = 0
    """Number of records of a pass, of a job that counts them; otherwise 0."""
    commit: int = 0
    """Number of the last commit that was decided before the round; 0 if there is none."""
    is_dynamic: bool = False
    """Whether records are dealt to workers as they ask for them."""


class Agent(Protocol):
    """The agent of this node, as a worker sees it."""

    def assignment(self) -> Assignment:
        """Returns the place of this worker in its current round."""

    def changes(self, since: int) -> Tuple[int, int]:
        """Returns the newest revision of the members, and the bits of all changes after revision ``since``.

        Revisions are those of the whole job: a change has the same one on all nodes. Changes that the current
        round of this worker includes already do not count. Does not block.
        """

    def next_round(self, after: int, timeout: Optional[float]) -> Assignment:
        """Says that this worker is ready to leave round ``after``, and waits until it is in a later one.

        Raises:
            TimeoutError: No later round was formed in time; names who is waited for.
        """

    def is_over(self, round: int) -> bool:
        """Returns whether a member of a round was added or lost, or a worker of one has failed.

        Waits until that is certain, as it is after the time to live of a lease at the latest, if a master acts.
        """

    def put_commit(self, number: int, parts: Sequence[Buffer]) -> None:
        """Keeps a commit in the memory of the agent, in place of the one before.

        In a job that counts records, the one before is kept until this one is decided.
        """

    def get_commit(self) -> Optional[Tuple[int, Buffer]]:
        """Returns the number and the contents of the commit that the agent keeps, if any."""

    def decide_commit(self, phase: int, pass_number: int, used: int, seen: int) -> bool:
        """Says that this worker has a copy of its state; waits until all have, and returns whether it counts.

        It is called in a job that counts records. If it returns ``False`` the round is over; the next one says whether
        the commit was decided.

        Args:
            phase: How many commits the round has decided before.
            pass_number: The pass that the state is in.
            used: Records of this pass that it has seen.
            seen: Records of all passes that it has seen.

        Raises:
            InvalidError: The state of another worker has seen others, or this position cannot follow the last one.
        """

    def get_commit_record(self) -> bytes:
        """Returns what the commit that the agent keeps has seen, for :meth:`decide_dynamic_commit`; empty if unknown."""

    def decide_dynamic_commit(self, phase: int, place: int, number: int, record: bytes) -> Optional[bytes]:
        """Does what :meth:`decide_commit` does, in a job that deals its records to workers as they ask for them.

        Args:
            phase: How many commits the round has decided before.
            place: How far this worker has used its list of records in the round.
            number: In phase 0, the number of the commit that the round begins with; 0 if it begins anew.
            record: In phase 0, what that commit has seen; empty if it is unknown, as it may be of the last one.

        Returns:
            What the commit has seen, if it counts.

        Raises:
            InvalidError: The workers do not begin with the same state, or with one of which it is not known what it has
                seen.
        """

    def fetch_records(
        self, round: int, place: int, wanted: int, least: int, end: int
    ) -> Tuple[int, List[Tuple[int, int]], bool]:
        """Returns a part of this worker's list of records in a round; can be called by any of its processes, again.

        Args:
            round: The round.
            place: Where the part begins.
            wanted: How many records it has at most.
            least: How many it has at least, unless the list ends before.
            end: The list has numbers below this; 0 means all.

        Returns:
            The present round, ranges of record numbers, and whether the list ends behind them. There are none if the
            present round is another one, or if they are not there yet.

        Raises:
            InvalidError: The job deals no records.
        """

    def progress(self, busy: float = 0.0, updates: int = 0) -> None:
        """Reports that this worker proceeds, and how many seconds it has computed for its last updates."""


class SoloAgent:
    """Stands for the agent of a program that was started alone: one worker, whose members never change."""

    def __init__(self) -> None:
        self._round = 0

    def assignment(self) -> Assignment:
        """Returns the place of the only worker."""
        return Assignment(self._round, 0, 0, 1, 1, 0, 1, "127.0.0.1", 0)

    def changes(self, since: int) -> Tuple[int, int]:
        """Returns that nothing has changed."""
        return since, 0

    def next_round(self, after: int, timeout: Optional[float]) -> Assignment:
        """Forms a round of this worker at once."""
        self._round = after + 1
        return self.assignment()

    def is_over(self, round: int) -> bool:
        """Returns that it is not."""
        return False

    def put_commit(self, number: int, parts: Sequence[Buffer]) -> None:
        """Does nothing: nothing outlives the process."""

    def get_commit(self) -> Optional[Tuple[int, Buffer]]:
        """Returns ``None``."""
        return None

    def decide_commit(self, phase: int, pass_number: int, used: int, seen: int) -> bool:
        """Returns that it is decided."""
        return True

    def get_commit_record(self) -> bytes:
        """Returns nothing."""
        return b""

    def decide_dynamic_commit(self, phase: int, place: int, number: int, record: bytes) -> Optional[bytes]:
        """Returns that it is decided."""
        return b""

    def fetch_records(
        self, round: int, place: int, wanted: int, least: int, end: int
    ) -> Tuple[int, List[Tuple[int, int]], bool]:
        """Returns all records in their order."""
        last = place + wanted if end == 0 else min(place + wanted, end)
        return self._round, [(place, last)] if place < last else [], end != 0 and end <= last

    def progress(self, busy: float = 0.0, updates: int = 0) -> None:
        """Does nothing."""


def agent() -> Agent:
    """Returns the agent of this process; a :class:`SoloAgent` if the program was started alone.

    Raises:
        InvalidError: The environment is that of several workers, but no agent started this one.
    """
    global _AGENT
    with _LOCK:
        if _AGENT is None:
            _AGENT = find_agent()
        return _AGENT


def find_agent() -> Agent:
    """Connects to the agent of this process, also in one that the worker has forked.

    Raises:
        InvalidError: The environment is that of several workers, but no agent started this one.
    """
    if os.environ.get(AGENT_VARIABLE):
        found: Agent = _native.Worker()
        print_stacks_when_asked()
        return found
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        # Each worker would train alone, and nothing would tell.
        raise InvalidError(
            f"WORLD_SIZE is {world_size}, but no agent started this worker; start the program with `steadfast run`"
        )
    return SoloAgent()


_AGENT: Optional[Agent] = None
_LOCK = threading.Lock()
"""Guards the creation of the agent."""
