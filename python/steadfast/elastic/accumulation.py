"""How many batches each worker computes, so that an update uses the same samples on any number of workers."""

from __future__ import annotations

from ..errors import InvalidError

__all__ = ["accumulation_steps", "own_lanes"]


def accumulation_steps(rank: int, world_size: int, lanes: int) -> int:
    """Returns the number of batches that a worker computes for one update.

    An update uses ``lanes`` batches, however many workers there are: ``lanes // world_size`` each, and one
    more on the first ``lanes % world_size`` ranks.

    Raises:
        InvalidError: There are fewer lanes than workers.
    """
    if lanes < world_size:
        raise InvalidError(f"{lanes} lanes are too few for {world_size} workers; each worker computes at least one")
    return lanes // world_size + (rank < lanes % world_size)


def own_lanes(rank: int, world_size: int, lanes: int) -> range:
    """Returns the lanes of a worker. They are neighbours, so that it can add many of them itself, in a fixed order.

    Raises:
        InvalidError: There are fewer lanes than workers.
    """
    first = rank * (lanes // world_size) + min(rank, lanes % world_size)
    return range(first, first + accumulation_steps(rank, world_size, lanes))
