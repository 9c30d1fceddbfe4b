"""Stacks of a process that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import signal

__all__ = ["print_stacks_when_asked"]


def print_stacks_when_asked() -> None:
    """Lets SIGUSR1 print the stacks of all threads, unless the program handles that signal itself.

    An agent sends it to workers that hang, and a trainer to itself before it ends because its model hangs.
    """
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no file behind stderr
            faulthandler.register(signal.SIGUSR1, all_threads=True)
