"""Runs the closures of coordinators: see :mod:`steadfast.worker`."""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, Callable, Dict, Sequence, Tuple

from . import _native
from ._functions import Modules
from .errors import InvalidError, SteadfastError, described

__all__ = ["CurrentClosure", "current_closure", "main"]


@dataclass(frozen=True)
class CurrentClosure:
    """The closure that runs."""

    key: str
    """The same for each attempt to run this closure, and for no other one: makes effects outside idempotent."""
    attempt: int
    """Grows with each attempt: a later one of the same closure has a larger number."""
    worker: int
    """Index of this worker at the coordinator."""
    coordinator: str
    """Id of the coordinator."""
    _closure: _native.Closure

    @property
    def is_wanted(self) -> bool:
        """Whether the coordinator still waits for the closure. One that takes long may end early if not."""
        return self._closure.is_wanted


_CURRENT: "contextvars.ContextVar[CurrentClosure]" = contextvars.ContextVar("current_closure")

_IMPORTS = threading.local()


def current_closure() -> CurrentClosure:
    """Returns the closure that runs in this thread.

    Raises:
        RuntimeError: None runs: this is no function that a coordinator has called.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise RuntimeError("no closure runs here; a coordinator calls functions on workers") from None


def is_importing() -> bool:
    """Returns whether a worker imports its modules."""
    return getattr(_IMPORTS, "active", False)


def main(args: Sequence[str]) -> int:
    """Runs a worker, and returns the exit code of its process."""
    flags = [index for index, arg in enumerate(args) if arg.startswith("-")]
    first = flags[0] if flags else len(args)
    modules = [f"--modules={','.join(args[:first])}"] if first else []
    try:
        server = _native.ClosureWorker([*modules, *args[first:]])
        _Worker(server).run()
    except SteadfastError as error:
        return _report(str(error), error.exit_code)
    except Exception as error:
        return _report(described(error), InvalidError.exit_code)
    return 0


class _Worker:
    def __init__(self, server: _native.ClosureWorker) -> None:
        self._server = server
        _IMPORTS.active = True
        try:
            self._modules = Modules(server.modules)
        finally:
            _IMPORTS.active = False
        # By coordinator and number. A value of a coordinator is made by one thread, while others wait.
        self._values: Dict[Tuple[str, int], Any] = {}
        self._lock = threading.RLock()

    def run(self) -> None:
        """Runs closures until a signal arrives, and what it has then."""
        _leave_on_signals(self._server.leave)
        print(f"steadfast worker: listens on {self._server.address}", flush=True)
        threads = [threading.Thread(target=self._work) for _ in range(self._server.threads - 1)]
        for thread in threads:
            thread.start()
        self._work()
        for thread in threads:
            thread.join()
        self._server.close()

    def _work(self) -> None:
        while not self._server.is_done:
            closure = self._server.next()
            if closure is not None:
                self._run(closure)

    def _run(self, closure: _native.Closure) -> None:
        current = CurrentClosure(closure.key, closure.attempt, closure.worker, closure.coordinator, closure)
        token = _CURRENT.set(current)
        try:
            args, kwargs = closure.arguments(self._per_worker)
            closure.returned(self._modules.function(closure.function)(*args, **kwargs))
        except StopIteration:
            closure.end_of_data()
        except BaseException as error:
            shown = traceback.format_exception(type(error), error, _below(error))
            closure.raised(type(error).__name__, str(error), "".join(shown))
        finally:
            _CURRENT.reset(token)

    def _per_worker(self, number: int, function: str, arguments: bytes, iterates: bool) -> Any:
        key = (current_closure().coordinator, number)
        with self._lock:
            if key not in self._values:
                self._drop_values_of_others(key[0])
                args, kwargs = _native.decode_arguments(arguments, self._per_worker)
                value = self._modules.function(function)(*args, **kwargs)
                self._values[key] = iter(value) if iterates else value
            return self._values[key]

    def _drop_values_of_others(self, coordinator: str) -> None:
        """Drops what was made for coordinators that are gone."""
        others = {it for it, _ in self._values} - {coordinator}
        gone = {it for it in others if not self._server.is_attended_by(it)}
        self._values = {key: value for key, value in self._values.items() if key[0] not in gone}


def _below(error: BaseException) -> Any:
    """Returns the traceback without the frame of this module."""
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def _leave_on_signals(leave: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT lets the worker leave, the second ends it at once."""

    def first(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        leave()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, first)


def _report(message: str, code: int) -> int:
    for line in message.rstrip().splitlines():
        # A line that is indented belongs to the error above it.
        print(line if line[:1].isspace() else f"steadfast worker: error: {line}", file=sys.stderr)
    return code
