"""Values that depend on the number of workers, such as a learning rate or a batch size."""

from __future__ import annotations

from typing import Mapping, TypeVar

from ..errors import InvalidError
from ._membership import assignment

__all__ = ["by_workers", "scaled", "world_size"]

Value = TypeVar("Value")

_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}


def world_size() -> int:
    """Returns the number of workers in the current round."""
    return assignment().world_size


def by_workers(values: Mapping[int, Value]) -> Value:
    """Returns the value for the number of workers in the current round.

    ::

        batch = steadfast.elastic.by_workers({1: 64, 4: 32, 8: 16})

    Each value holds from its number of workers on, up to the next one. Call it within the training function, which
    is called in each round: the state may come from a round with another number of workers.

    Args:
        values: A value by the number of workers from which it holds.

    Raises:
        InvalidError: There are fewer workers than the smallest number in ``values``.
    """
    workers = world_size()
    known = [number for number in values if number <= workers]
    if not known:
        smallest = f"the smallest number is {min(values)}" if values else "there is none"
        raise InvalidError(f"`by_workers` has no value for {workers} workers: {smallest}")
    return values[max(known)]


def scaled(value: float, *, workers: int, rule: str = "linear") -> float:
    """Returns a value, such as a learning rate, that was chosen for ``workers`` workers, for those of the current round.

    ::

        for group in optimizer.param_groups:
            group["lr"] = steadfast.elastic.scaled(0.1, workers=8)

    Call it within the training function, as :func:`by_workers`.

    Args:
        value: The value for ``workers`` workers.
        workers: The number of workers that the value was chosen for.
        rule: ``"linear"`` multiplies by the ratio of the workers, ``"sqrt"`` by its square root.

    Raises:
        InvalidError: ``workers`` is less than 1, or the rule is unknown.
    """
    if workers < 1:
        raise InvalidError(f"`workers` is {workers}; it is at least 1")
    if rule not in _EXPONENTS:
        raise InvalidError(f'`rule` is "{rule}"; use "linear" or "sqrt"')
    return float(value * (world_size() / workers) ** _EXPONENTS[rule])
