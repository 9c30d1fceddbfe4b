"""The place of this worker among the others, from one round to the next."""

from __future__ import annotations

import contextvars
import sys
from typing import Callable, Optional

from .. import _native
from ._agent import ADDED, REMOVED, Agent, Assignment, SoloAgent, agent
from ._divided import Position
from ._environment import follow
from ._failures import of_program
from ._group import Group, SoloGroup
from ._registered import Registered
from ._sockets import SocketGroup
from .errors import CollectiveError, HostsUpdatedInterrupt

__all__ = ["Listener", "Membership", "assignment", "group", "membership", "register_listener", "remove_listener"]

Connect = Callable[[Assignment], Group]

Listener = Callable[[bool, bool], None]
"""Called with whether members were added, and whether members were removed."""


class Membership:
    """The agent of a worker, its place in the current round, and the group of the round.

    Args:
        agent: The agent of this node.
        connect: Forms the group of a round. By default that of PyTorch if the program has imported it when the
            first group is formed, and otherwise one of plain connections.
    """

    def __init__(self, agent: Agent, connect: Optional[Connect] = None) -> None:
        self.agent = agent
        self.assignment = agent.assignment()
        self._connect = connect or self._connect_workers
        self._group: Optional[Group] = None
        # Whether groups are those of PyTorch. All workers run the same program, so at the first group all have
        # imported it, or none; later ones may have imported it at another time.
        self._has_torch: Optional[bool] = None
        # Revision of the newest change that all ranks have seen.
        self._revision = 0
        self._listeners: Registered[Listener] = Registered()
        # Commits that the round has decided.
        self._commits = 0
        # What was not reported yet: seconds that this worker has computed, and for how many updates.
        self._busy = (0.0, 0)

    @property
    def group(self) -> Group:
        """The group of the current round, which is formed at the first use."""
        if self._group is None:
            self._group = self._connect(self.assignment)
        return self._group

    def close(self) -> None:
        """Leaves the group, so workers that wait for this one do not wait for long."""
        left, self._group = self._group, None
        if left is not None:
            left.close()

    def next_round(self, timeout: Optional[float]) -> None:
        """Leaves the group and waits for the next round, whose group is formed at the next use.

        Raises:
            TimeoutError: No round was formed in time.
        """
        self.close()
        self.assignment = self.agent.next_round(self.assignment.round, timeout)
        self._commits = 0
        if not isinstance(self.agent, SoloAgent):
            follow(self.assignment)

    @property
    def next_commit(self) -> int:
        """The number of the next commit of the round, in a job that counts records."""
        return _native.commit_number(self.assignment.round, self._commits)

    def decide_commit(self, position: Position) -> None:
        """Waits until all workers have a copy of their state, which counts then.

        Raises:
            CollectiveError: The round is over. The next one says whether the commit was decided.
            InvalidError: The workers have seen different records.
        """
        if not self.agent.decide_commit(self._commits, *position):
            raise CollectiveError(f"round {self.assignment.round} ended before all workers had this commit")
        self._commits += 1

    def decide_dynamic_commit(self, place: int, number: int, record: bytes) -> bytes:
        """Waits until all workers have a copy of their state, which counts then; returns what it has seen.

        Raises:
            CollectiveError: The round is over. The next one says whether the commit was decided.
            InvalidError: The workers begin with different states.
        """
        decided = self.agent.decide_dynamic_commit(self._commits, place, number, record)
        if decided is None:
            raise CollectiveError(f"round {self.assignment.round} ended before all workers had this commit")
        self._commits += 1
        return decided

    def note_update(self, seconds: float) -> None:
        """Notes how long this worker has computed for an update, without the exchange with others."""
        busy, updates = self._busy
        self._busy = busy + seconds, updates + 1

    def is_over(self) -> bool:
        """Returns whether members of the round were added or lost; waits until that is certain."""
        return self.agent.is_over(self.assignment.round)

    def _has_changed(self) -> bool:
        return self.agent.changes(self._revision)[1] != 0

    def _connect_workers(self, assignment: Assignment) -> Group:
        if self._has_torch is None:
            self._has_torch = "torch" in sys.modules
        if self._has_torch:
            from .torch import ProcessGroup

            return ProcessGroup(assignment, is_over=self._has_changed)
        if assignment.world_size == 1:
            return SoloGroup()
        return SocketGroup(assignment, is_over=self._has_changed)

    def register_listener(self, listener: Listener) -> None:
        """Adds a function that :meth:`check_updates` calls on all ranks before it raises; once, however often."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Removes a function that was added.

        Raises:
            ValueError: It was not added.
        """
        self._listeners.remove(listener)

    def check_updates(self) -> None:
        """Reports progress, and raises on all ranks at once if any of them has learned of a change.

        Raises:
            HostsUpdatedInterrupt: Members were added or removed.
        """
        revision, bits = self.agent.changes(self._revision)
        revision, removed, added = self.group.max([revision, bits & REMOVED, bits & ADDED])
        (busy, updates), self._busy = self._busy, (0.0, 0)
        self.agent.progress(busy, updates)
        if removed or added:
            self._revision = max(self._revision, revision)
            for listener in self._listeners.all():
                with of_program():
                    listener(added != 0, removed != 0)
            raise HostsUpdatedInterrupt(skip_sync=not added)


def membership() -> Membership:
    """Returns the membership of this worker."""
    global _MEMBERSHIP
    chosen = CURRENT.get()
    if chosen is not None:
        return chosen
    if _MEMBERSHIP is None:
        _MEMBERSHIP = Membership(agent())
    return _MEMBERSHIP


def assignment() -> Assignment:
    """Returns the place of this worker in the current round."""
    return membership().assignment


def group() -> Group:
    """Returns the group of the current round, for states of one's own."""
    return membership().group


def register_listener(listener: Listener) -> None:
    """Adds a function to call when members of the round were added or removed.

    It is called with two booleans, whether members were added and whether some were removed, in the order in
    which functions were added: on all ranks at the same :meth:`State.commit` or
    :meth:`State.check_host_updates`, before :class:`HostsUpdatedInterrupt` is raised. The loss of a worker in
    the middle of a step shows as a failed collective and is not announced. An exception of the function passes
    through, unless it is by its type that of a failed operation of all workers.

    A function is called once, however often it was added. One that the training function adds is there until the
    training function begins again or ends.
    """
    membership().register_listener(listener)


def remove_listener(listener: Listener) -> None:
    """Removes a function that :func:`register_listener` added.

    Raises:
        ValueError: It was not added.
    """
    membership().remove_listener(listener)


CURRENT: "contextvars.ContextVar[Optional[Membership]]" = contextvars.ContextVar(
    "steadfast.elastic.membership", default=None
)
"""The membership that was passed to :func:`run`, for the code that it calls."""

_MEMBERSHIP: Optional[Membership] = None
