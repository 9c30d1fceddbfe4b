"""Operations of all workers of a round."""

from __future__ import annotations

from typing import List, Optional, Protocol, Sequence

from ._agent import Buffer

__all__ = ["Group", "SoloGroup"]


class Group(Protocol):
    """The workers of one round. All call the same operations in the same order.

    An operation raises :class:`CollectiveError` on each worker that cannot complete it. The group is of no
    use afterwards.
    """

    def broadcast_bytes(self, data: Optional[Buffer], root: int) -> Buffer:
        """Returns the data of the rank ``root``; that of the others is ignored."""

    def max(self, values: Sequence[int]) -> List[int]:
        """Returns the maximum of each value over all ranks. The values fit in 64 bits."""

    def close(self) -> None:
        """Leaves the group without waiting for others. Operations that wait for this worker fail."""


class SoloGroup:
    """A group of one worker."""

    def broadcast_bytes(self, data: Optional[Buffer], root: int) -> Buffer:
        """Returns the data."""
        assert data is not None, "rank 0 has the data"
        return data

    def max(self, values: Sequence[int]) -> List[int]:
        """Returns the values."""
        return list(values)

    def close(self) -> None:
        """Does nothing."""
