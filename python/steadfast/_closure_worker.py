"""Runs the closures of coordinators: see :mod:`steadfast.worker`."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Mapping, Sequence, Tuple

from . import _native
from ._functions import Modules
from .errors import InvalidError, SteadfastError, described

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CurrentClosure", "current_closure", "main"]

TEXT_MAX = 64 << 10
"""Most characters of the message of an exception, and of its traceback."""

KEPT_SECONDS = 30
"""How long a worker keeps the values of a coordinator without a connection."""


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

    def get_parameters(self) -> Dict[str, "np.ndarray[Any, Any]"]:
        """Pulls the newest values of the parameters of the coordinator from the parameter servers.

        Returns:
            Read-only arrays of float32 by name. Waits while parameter servers are away.

        Raises:
            InvalidError: The coordinator has no parameters.
            UnavailableError: The coordinator does not wait for the closure any more.
        """
        return self._closure.get_parameters()

    def push(self, gradient: Mapping[str, Any]) -> None:
        """Pushes a gradient to the parameter servers, which apply it with the optimizer of the job.

        It leaves when the function has returned, and counts once, however often the closure runs. If the function
        raises an exception, nothing is pushed. A closure pushes once.

        Args:
            gradient: The mean gradient over the closure's data: arrays by name, in the shapes of the parameters. Those
                that are missing count as zero.

        Raises:
            InvalidError: The closure has pushed before, or the coordinator has no parameters.
            ValueError: There is no such parameter, or its shape is another one.
        """
        self._closure.push(dict(gradient))


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
        # When each coordinator that has values was seen last.
        self._seen: Dict[str, float] = {}

    def run(self) -> None:
        """Runs closures until a signal arrives, and what it has then."""
        listens = f"listens on {self._server.address} (admin port: {self._server.admin_address})"
        print(f"steadfast worker: {listens}", flush=True)
        threads = [threading.Thread(target=self._work) for _ in range(self._server.threads - 1)]
        for thread in threads:
            thread.start()
        self._work()
        for thread in threads:
            thread.join()
        self._server.close()

    def _work(self) -> None:
        try:
            while not self._server.is_done:
                closure = self._server.next()
                self._drop_values()
                if closure is not None:
                    self._run(closure)
        except BaseException:
            # A worker that takes closures and runs none would be worse than none.
            traceback.print_exc()
            os._exit(1)

    def _run(self, closure: _native.Closure) -> None:
        current = CurrentClosure(closure.key, closure.attempt, closure.worker, closure.coordinator, closure)
        token = _CURRENT.set(current)
        try:
            args, kwargs = closure.arguments(self._per_worker)
            closure.returned(self._modules.function(closure.function)(*args, **kwargs))
        except StopIteration:
            closure.end_of_data()
        except BaseException as error:
            self._report(closure, error)
        finally:
            _CURRENT.reset(token)

    def _report(self, closure: _native.Closure, error: BaseException) -> None:
        name = type(error).__name__
        if name == "OutOfRangeError":
            # TensorFlow's word for the end of a dataset.
            closure.end_of_data()
            return
        # Without the frame of this module.
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        shown = _text(lambda: "".join(traceback.format_exception(type(error), error, below)))
        closure.raised(name, _text(lambda: str(error)), shown)

    def _per_worker(self, number: int, function: str, arguments: bytes, iterates: bool) -> Any:
        key = (current_closure().coordinator, number)
        with self._lock:
            if key not in self._values:
                args, kwargs = _native.decode_arguments(arguments, self._per_worker)
                value = self._modules.function(function)(*args, **kwargs)
                if iterates:
                    value = iter(value)
                    value = _Alone(value) if 1 < self._server.threads else value
                self._values[key] = value
            return self._values[key]

    def _drop_values(self) -> None:
        """Drops what no closure needs any more, and what was made for coordinators that are gone."""
        dropped = self._server.take_dropped()
        if not dropped and not self._values:
            return
        with self._lock:
            for key in dropped:
                self._values.pop(key, None)
            now = time.monotonic()
            for coordinator in {it for it, _ in self._values}:
                if self._server.is_attended_by(coordinator):
                    self._seen[coordinator] = now
                elif KEPT_SECONDS < now - self._seen.setdefault(coordinator, now):
                    del self._seen[coordinator]
                    self._values = {key: it for key, it in self._values.items() if key[0] != coordinator}


class _Alone:
    """An iterator of which one thread at a time takes the next item."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._lock = threading.Lock()

    def __iter__(self) -> "_Alone":
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._iterator)


def _text(show: Callable[[], str]) -> str:
    """Returns a text that can be sent, whatever the object that it describes does."""
    try:
        text = show()
    except Exception as error:
        text = f"(its text cannot be shown: {type(error).__name__})"
    if TEXT_MAX < len(text):
        half = TEXT_MAX // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _report(message: str, code: int) -> int:
    for line in message.rstrip().splitlines():
        # A line that is indented belongs to the error above it.
        print(line if line[:1].isspace() else f"steadfast worker: error: {line}", file=sys.stderr)
    return code
