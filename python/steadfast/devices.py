"""The device that a trainer computes on, for models that are built without one."""

from __future__ import annotations

import contextlib
import os
from contextvars import ContextVar
from typing import Iterator, Optional

__all__ = ["current", "using"]

_device: ContextVar[Optional[str]] = ContextVar("steadfast_device", default=None)


def current() -> Optional[str]:
    """Returns the device of the model that is being built, or the one of ``STEADFAST_DEVICE``."""
    return _device.get() or os.environ.get("STEADFAST_DEVICE") or None


@contextlib.contextmanager
def using(device: Optional[str]) -> Iterator[None]:
    """Models that are built meanwhile compute on ``device``, unless they name another."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)
