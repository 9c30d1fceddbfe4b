"""What is divided among the workers of a round."""

from __future__ import annotations

from typing import List, NamedTuple

from ..errors import InvalidError
from ._alike import Setting

__all__ = ["Divided", "Position"]


class Position(NamedTuple):
    """A position in the data, which the states of all workers have reached."""

    pass_number: int
    """The pass, from 0."""
    used: int
    """Records of this pass that the state has seen: those at the beginning of its order."""
    seen: int
    """Records of all passes that it has seen."""


class Divided:
    """Data of which each worker has a part. A state divides what is left anew in each round."""

    def reset(self) -> None:
        """Divides what is left among the workers of the current round."""
        raise NotImplementedError

    def settings(self) -> List[Setting]:
        """Returns what is the same on all workers, as each of them would use other records otherwise."""
        return []

    def position(self, records: int) -> Position:
        """Returns the position in a pass of this many records.

        Raises:
            InvalidError: The data has another number of records, or does not count them.
        """
        raise InvalidError(
            f"the job counts records (`records = {records}`), and {type(self).__name__} does not; "
            "use an ElasticSampler or a DataShardService, or leave out `records`"
        )

    def place(self, records: int) -> int:
        """Returns how far the list of records that this worker was dealt in the round is used.

        Raises:
            InvalidError: The data has another number of records, or does not use what is dealt.
        """
        raise InvalidError(
            f'the job deals its records (`order = "dynamic"`), and {type(self).__name__} does not use what is dealt; '
            "use a TaskDataset, or leave out `order`"
        )
