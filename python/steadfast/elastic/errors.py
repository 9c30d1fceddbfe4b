"""The exceptions of elastic training."""

from __future__ import annotations

from typing import Any, Tuple

from ..errors import SteadfastError

__all__ = ["CollectiveError", "HostsUpdatedInterrupt", "ResetLimitError", "WorkerLost"]


class CollectiveError(SteadfastError):
    """An operation of all workers failed. :func:`run` restores the last commit and joins the next round."""

    exit_code = 6


class WorkerLost(CollectiveError):
    """An operation of all workers failed because one of them is gone."""


class ResetLimitError(SteadfastError):
    """The workers were regrouped more often than ``reset_limit`` allows."""

    def __init__(self, reset_limit: int) -> None:
        super().__init__(f"the workers were regrouped {reset_limit} times, which is the limit; see `reset_limit`")
        self.reset_limit = reset_limit

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.reset_limit,)


class HostsUpdatedInterrupt(Exception):
    """Members were added or removed. Raised on all ranks at the same step; :func:`run` handles it.

    Nothing has failed: the state stays as it is.

    Args:
        skip_sync: Whether members were only removed, so all that remain have the same state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("members were removed" if skip_sync else "members were added or removed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.skip_sync,)
