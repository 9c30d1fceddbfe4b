"""The variables by which programs and libraries find the place of a worker."""

from __future__ import annotations

import os

from ._agent import Assignment

__all__ = ["follow"]


def follow(place: Assignment) -> None:
    """Sets the variables that the agent has set to those of a later round of the same process.

    Libraries read them whenever they are asked for a rank: with those of the first round two workers may be rank 0, or
    none.
    """
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.group_rank,
        "GROUP_WORLD_SIZE": place.group_world_size,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        "WORKER_NUM": place.world_size,
        "STEADFAST_ROUND": place.round,
    }
    for name, value in values.items():
        if name in os.environ:
            os.environ[name] = str(value)
