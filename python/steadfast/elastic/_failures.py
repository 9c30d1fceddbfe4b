"""Tells a failed operation of all workers from an error of the program."""

from __future__ import annotations

import re
import sys
from typing import Optional

from .errors import CollectiveError, WorkerLost

__all__ = ["collective_failure"]

_LOST = re.compile(
    "Connection (closed|reset|refused)|connection was closed|Broken pipe|Socket closed|remote process exited",
    re.IGNORECASE,
)
_BACKEND = re.compile(r"\bgloo\b|\bNCCL\b|ProcessGroup|TCPStore", re.IGNORECASE)
"""Messages of backends that raise a plain RuntimeError."""


def collective_failure(error: BaseException) -> Optional[CollectiveError]:
    """Returns the failure that an exception stands for; ``None`` if it is an error of the program."""
    if isinstance(error, CollectiveError):
        return error
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return None
    message = str(error)
    known = getattr(torch.distributed, "DistError", ())
    if not isinstance(error, known) and not (type(error) is RuntimeError and _BACKEND.search(message)):
        return None
    return (WorkerLost if _LOST.search(message) else CollectiveError)(message)
