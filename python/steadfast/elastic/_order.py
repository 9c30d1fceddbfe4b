"""The order of the records of a pass, which is a function of the seed and the pass."""

from __future__ import annotations

from typing import Any, List, Mapping

import numpy as np

from ..errors import InvalidError
from ._alike import Setting

__all__ = ["check_order", "order_of", "order_settings"]


def order_of(*, samples: int, shuffle: bool, seed: int, epoch: int) -> Any:
    """Returns the indexes of the samples of an epoch in their order, as an array."""
    if not shuffle:
        return np.arange(samples)
    # The stream of RandomState is the same in all versions of NumPy.
    words = [part & 0xFFFFFFFF for part in (seed, seed >> 32, epoch, epoch >> 32)]
    return np.random.RandomState(words).permutation(samples)


def order_settings(order: Mapping[str, Any]) -> List[Setting]:
    """Returns what decides the order of the records, which is the same on all workers."""
    return [
        Setting("numbers of records", order["samples"], "give all of them the same dataset"),
        Setting("`shuffle`", int(order["shuffle"]), words=("False", "True")),
        Setting("`seed`", order["seed"]),
    ]


def check_order(found: Mapping[str, Any], own: Mapping[str, Any], *, is_within: bool) -> None:
    """Checks that a position can be gone on from.

    Args:
        found: What decided the order where the position was taken: ``samples``, ``shuffle``, ``seed``.
        own: What decides it here.
        is_within: Whether the position is within an epoch. At its beginning it has any order.

    Raises:
        InvalidError: The samples of the epoch are in another order here.
    """
    if is_within and found != own:
        raise InvalidError(
            f"the state is within an epoch of {_shown(found)}, and here are {_shown(own)}: they are in another order, so "
            "some would be used twice and others never"
        )


def _shown(order: Mapping[str, Any]) -> str:
    seed = f"the seed {order['seed']}" if order["shuffle"] else "`shuffle=False`"
    return f"{order['samples']} samples with {seed}"
