"""Runs a training function again and again, for one group of workers after the other."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Optional, TypeVar, Union, overload

from ._failures import collective_failure, may_be_collective
from ._membership import CURRENT, Membership
from ._membership import membership as current_membership
from .errors import CollectiveError, HostsUpdatedInterrupt, ResetLimitError
from .state import State

__all__ = ["run"]

Function = TypeVar("Function", bound=Callable[..., Any])

_LOG = logging.getLogger("steadfast.elastic")


@overload
def run(function: Function) -> Function: ...


@overload
def run(
    *,
    reset_limit: Optional[int] = None,
    timeout: Optional[float] = 600.0,
    membership: Optional[Membership] = None,
) -> Callable[[Function], Function]: ...


def run(
    function: Optional[Function] = None,
    *,
    reset_limit: Optional[int] = None,
    timeout: Optional[float] = 600.0,
    membership: Optional[Membership] = None,
) -> Union[Function, Callable[[Function], Function]]:
    """Lets a function train while workers come and go.

    ::

        @steadfast.elastic.run
        def train(state):
            while state.epoch < 10:
                ...
                state.commit()

        train(steadfast.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))

    The function's first argument is its :class:`State`. It is called once the workers have formed a group and
    have the same state, and again after each change: it continues from the state, wherever that is.

    - A worker fails: the others go back to the last commit and form a group without it. A ``RuntimeError``
      is taken for the loss of another worker only if the agents know of one.
    - Members are added or removed: all leave the function at the same :meth:`State.commit` or
      :meth:`State.check_host_updates`, lose no work, and form a new group.

    What refers to the process group, such as ``DistributedDataParallel``, is made within the function.
    Exceptions of the function pass through. A program that was started alone trains as the only worker.

    Args:
        function: The function.
        reset_limit: How often the workers may be regrouped. Unlimited by default.
        timeout: Seconds to wait for a new group.
        membership: The place of this worker. By default what its agent says.

    Raises:
        TimeoutError: No new group was formed in time.
        ResetLimitError: The workers would be regrouped more often than ``reset_limit``.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
            current = membership or current_membership()
            token = CURRENT.set(current)
            try:
                return _run(current, lambda: function(state, *args, **kwargs), state, reset_limit, timeout)
            except BaseException:
                # The others learn at once that this worker leaves.
                current.close()
                raise
            finally:
                CURRENT.reset(token)
                for registered in (state._reset_callbacks, current._listeners):
                    registered.end()

        return wrapper  # type: ignore[return-value]

    return decorate if function is None else decorate(function)


def _run(
    current: Membership,
    train: Callable[[], Any],
    state: State,
    reset_limit: Optional[int],
    timeout: Optional[float],
) -> Any:
    resets = 0
    skip_sync = False
    while True:
        try:
            return _run_round(current, train, state, is_new=resets > 0, skip_sync=skip_sync)
        except HostsUpdatedInterrupt as interrupt:
            _LOG.info("leaving round %d: %s", current.assignment.round, interrupt)
            skip_sync = _save(current, state) and interrupt.skip_sync
        except _NotFormed:
            # The state is as it was.
            pass
        except Exception as error:
            _check_failure(current, error)
            state.restore()
            skip_sync = False
        # The exceptions are gone, and with them what the function referred to.
        if resets == reset_limit:
            raise ResetLimitError(resets)
        resets += 1
        current.next_round(timeout)
        place = current.assignment
        _LOG.info("joined round %d as rank %d of %d", place.round, place.rank, place.world_size)


def _save(current: Membership, state: State) -> bool:
    """Makes the state of this moment what a failure goes back to; returns whether that succeeded."""
    try:
        state.save()
    except Exception as error:
        # Others were lost before all had their copy.
        _check_failure(current, error)
        state.restore()
        return False
    return True


class _NotFormed(Exception):
    """The workers of a round did not find each other."""


def _run_round(current: Membership, train: Callable[[], Any], state: State, *, is_new: bool, skip_sync: bool) -> Any:
    try:
        # Forms the group: callbacks may use it.
        group = current.group
        if is_new:
            state.on_reset()
        state.on_round()
        # Workers that are new need what the others could do without. A job that counts records begins each round with a
        # commit.
        (needs_sync,) = group.max([int(not skip_sync or current.assignment.records > 0)])
    except Exception as error:
        _check_failure(current, error)
        raise _NotFormed from error
    if needs_sync:
        state.sync()
    for registered in (state._reset_callbacks, current._listeners):
        registered.begin()
    return train()


def _check_failure(current: Membership, error: Exception) -> None:
    """Raises the error again, unless a collective operation has failed."""
    number = current.assignment.round
    if not isinstance(error, CollectiveError) and current.assignment.world_size == 1:
        # No other worker can have caused it.
        raise error
    if collective_failure(error) is None:
        if not may_be_collective(error):
            raise error
        _LOG.warning("round %d failed; was another worker lost?", number, exc_info=error)
        if not current.is_over():
            _LOG.warning("round %d goes on: the error is one of the program", number)
            raise error
        return
    _LOG.warning("round %d failed", number, exc_info=error)
