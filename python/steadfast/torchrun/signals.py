"""Signals while torchrun has no workers yet: they would end it before it could leave the job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any, Iterator, List

from torch.distributed.elastic.multiprocessing import SignalException

__all__ = ["as_exceptions"]


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Raises signals that would end the process as torchrun does itself, once it has workers."""
    replaced: List[int] = []
    if threading.current_thread() is threading.main_thread():
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM").split(","):
            number = getattr(signal, name.strip(), None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _raise)
                replaced.append(number)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, _frame: Any) -> None:
    received = signal.Signals(number)
    raise SignalException(f"process {os.getpid()} got {received.name}", received)
