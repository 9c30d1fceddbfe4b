"""Tells a failed operation of all workers from an error of the program, by the type of the exception."""

from __future__ import annotations

import sys
from typing import Optional

from .errors import CollectiveError, WorkerLost

__all__ = ["collective_failure", "may_be_collective"]


def collective_failure(error: BaseException) -> Optional[CollectiveError]:
    """Returns the failure that an exception stands for; ``None`` if its type is not that of a failed operation."""
    if isinstance(error, CollectiveError):
        return error
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, getattr(torch.distributed, "DistError", ())):
        return None
    is_lost = isinstance(error, getattr(torch.distributed, "DistNetworkError", ()))
    return (WorkerLost if is_lost else CollectiveError)(str(error))


def may_be_collective(error: BaseException) -> bool:
    """Returns whether the exception may be that of a failed operation: gloo, like much else, raises RuntimeError."""
    return type(error) is RuntimeError
