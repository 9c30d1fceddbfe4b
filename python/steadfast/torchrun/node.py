"""What a handler needs of its node, which the extension module implements."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    TypeVar,
)

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from .. import errors
from .settings import Settings

__all__ = ["Member", "Node", "Round", "is_lost", "is_over", "open_node", "torch_errors", "until_answered"]

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0


class Member(NamedTuple):
    """A node of a round."""

    node_id: str
    address: str
    slots: int
    first_rank: int


class Round(Protocol):
    """A formed group of nodes, as one of them sees it."""

    @property
    def round(self) -> int:
        """Its number. Numbers only grow."""

    @property
    def rank(self) -> int:
        """The rank of this node."""

    @property
    def members(self) -> Sequence[Tuple[str, str, int, int]]:
        """The nodes by rank: see :class:`Member`."""


class Node(Protocol):
    """This node as the master sees it: it is registered, and kept registered, until it is closed.

    Every method raises UnavailableError if the master does not answer.
    """

    def join(self, after: int, timeout: float) -> Round:
        """Waits until the node is a member of a round later than ``after``.

        Raises:
            RendezvousTimeout: Too few nodes joined.
            RendezvousClosed: The job has ended.
            NodeRangeMismatch: Another node stated another number of nodes.
        """

    def waiting(self, round: int) -> int:
        """Returns how many nodes wait to be added to the round or, negative, how many of its nodes are lost."""

    def barrier(self, round: int, tag: str, data: bytes, timeout: float) -> Dict[str, bytes]:
        """Waits until all members of the round have called this, and returns the data of each by node id.

        Raises:
            RoundEnded: The round is over.
            RendezvousTimeout: Members did not call this in time.
        """

    def succeed(self, round: int, timeout: float) -> bool:
        """Notes that the workers of this node have succeeded in the round, and waits for the other members.

        Returns:
            Whether all members, and with them the job, have succeeded; false if some still run.

        Raises:
            RoundEnded: Another member failed or was lost: the workers of all have to run again.
        """

    def get_state(self) -> Optional[Tuple[bytes, int]]:
        """Returns the job's state and its token."""

    def set_state(self, state: bytes, token: Optional[int]) -> Tuple[bytes, int, bool]:
        """Sets the state if ``token`` is its token. Returns the state and token after, and whether it did."""

    def is_closed(self) -> bool:
        """Returns whether the job has ended."""

    def set_closed(self) -> None:
        """Ends the job for all nodes."""

    def close(self) -> None:
        """Leaves the job. May be called again."""


def open_node(settings: Settings) -> Node:
    """Registers this node, as soon as a master answers."""
    from .. import _native

    native: Any = _native

    def opened(_left: float) -> Node:
        try:
            return native.Node(
                list(settings.endpoints),
                settings.job,
                address=settings.address,
                slots=1,
                nodes_min=settings.nodes_min,
                nodes_max=settings.nodes_max,
                settings=settings.for_node(),
            )
        except errors.UnavailableError as error:
            raise errors.UnavailableError(
                f"cannot register with job `{settings.job}` at {', '.join(settings.endpoints)}: {error}"
            ) from error

    with torch_errors():
        return until_answered(opened, time.monotonic() + settings.join_timeout)


def is_lost(node: Node, formed: Round) -> bool:
    """Returns whether the round has lost a member, as far as the master answers."""
    try:
        return node.waiting(formed.round) < 0
    except errors.UnavailableError:
        return False
    except errors.SteadfastError:
        return True


def is_over(node: Node, formed: Round) -> bool:
    """Returns whether the members of the round have to join another one, as far as the master answers."""
    try:
        return node.waiting(formed.round) != 0
    except errors.RendezvousClosed:
        return False
    except errors.UnavailableError:
        return False
    except errors.SteadfastError:
        return True


def until_answered(call: Callable[[float], T], deadline: float) -> T:
    """Calls with the time that is left, again while the master does not answer: another may take over."""
    reason = ""
    while True:
        try:
            return call(max(0.0, deadline - time.monotonic()))
        except errors.UnavailableError as error:
            if deadline < time.monotonic() + RETRY_SECONDS:
                raise
            if str(error) != reason:
                reason = str(error)
                log.warning("trying again: %s", reason)
        time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def torch_errors() -> Iterator[None]:
    """Raises errors of this package as those that PyTorch documents for handlers."""
    try:
        yield
    except errors.RendezvousTimeout as error:
        raise RendezvousTimeoutError(str(error)) from error
    except errors.RendezvousClosed as error:
        raise RendezvousClosedError(str(error)) from error
    except errors.UnavailableError as error:
        raise RendezvousConnectionError(str(error)) from error
    except errors.SteadfastError as error:
        raise RendezvousError(str(error)) from error
