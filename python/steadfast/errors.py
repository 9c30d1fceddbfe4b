"""The exceptions of this package, by what the caller can do."""

from __future__ import annotations

import traceback
from typing import Any, Mapping, Optional, Sequence, Tuple


class SteadfastError(Exception):
    """An error of Steadfast. Raised itself only for internal errors; the log of the process has more."""

    exit_code = 1
    """Exit code of a process that ends with this error, as in docs/configuration.md."""


class InvalidError(SteadfastError, ValueError):
    """The input is invalid: a job file, a setting, a model. A retry without changes fails again."""

    exit_code = 2


class BadJobFile(InvalidError):
    """A job is described wrongly. ``errors`` has one message for each error, with the key that it is about."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = list(errors)

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.errors,)


class JobFailed(SteadfastError):
    """A job has failed. ``reason`` says why, ``summary`` is its summary as far as there is one."""

    def __init__(self, reason: str, summary: Optional[Mapping[str, Any]] = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.summary = dict(summary or {})

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.reason, self.summary)


class UnavailableError(SteadfastError, ConnectionError):
    """etcd, the master or a store does not answer; retry."""

    exit_code = 6


class DeniedError(SteadfastError, PermissionError):
    """The caller lacks permission, or this machine computes other bits than the rest of the job."""

    exit_code = 8


class NotFoundError(SteadfastError, LookupError):
    """What was asked for does not exist."""

    exit_code = 3


class ConflictError(SteadfastError):
    """Something else exists in its place, such as a job of the same name with another job file."""

    exit_code = 4


class ForkedError(SteadfastError, RuntimeError):
    """The process was forked after it had joined a job. Threads and connections do not survive a fork."""


class RendezvousTimeout(SteadfastError, TimeoutError):
    """Too few nodes joined in time. The message names those that are missing."""

    exit_code = 6


class RendezvousClosed(SteadfastError):
    """The job has ended: no node can join it any more."""

    exit_code = 5


class NodeRangeMismatch(ConflictError):
    """The nodes of a job state different minimum or maximum numbers of nodes."""


class RoundEnded(SteadfastError):
    """A round is over: a member was lost, or asked to join the next round. Join again."""

    exit_code = 5


class ClosureError(SteadfastError):
    """A closure failed: its function raised an exception on a worker, or it cannot run."""

    def __init__(
        self,
        number: int,
        function: str,
        name: Optional[str],
        exception: str,
        message: str,
        traceback: str = "",
        worker: Optional[str] = None,
    ) -> None:
        self.number = number
        """The number of the closure, as :attr:`steadfast.RemoteValue.number`."""
        self.function = function
        """The function, as ``module:function``."""
        self.name = name
        """The name that the closure was given."""
        self.exception = exception
        """Class of the exception; empty if the closure cannot run."""
        self.message = message
        """What the exception says."""
        self.traceback = traceback
        """The traceback on the worker, as text."""
        self.worker = worker
        """Address of the worker."""
        super().__init__(self.describe())

    def describe(self) -> str:
        """Returns one line: function, closure, worker, and what went wrong."""
        place = f", on worker {self.worker}" if self.worker else ""
        kind = f"{self.exception}: " if self.exception else ""
        name = f" `{self.name}`" if self.name else ""
        return f"{self.function} (closure #{self.number}{name}{place}): {kind}{self.message}"

    def __str__(self) -> str:
        return f"{self.describe()}\n{self.traceback}".rstrip()

    def __reduce__(self) -> Tuple[Any, ...]:
        state = (self.number, self.function, self.name, self.exception, self.message, self.traceback, self.worker)
        return type(self), state


class WorkerLost(ClosureError):
    """Too many workers were lost while they ran a closure: it may end its process."""


class ClosureErrors(SteadfastError):
    """Closures failed. ``errors`` has a :class:`ClosureError` for each, ``more`` the number of those beyond 1 000."""

    def __init__(self, errors: Sequence[ClosureError], more: int = 0) -> None:
        self.errors = list(errors)
        self.more = more
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.errors) + self.more
        if count == 1:
            return str(self.errors[0])
        lines = [f"{count} closures failed:", *(f"  {error.describe()}" for error in self.errors[:20])]
        if 20 < count:
            lines.append(f"  and {count - 20} more, see `errors`")
        first = self.errors[0].traceback if self.errors else ""
        return "\n".join([*lines, *(["The first one:", first] if first else [])]).rstrip()

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.errors, self.more)


class ClosureCancelled(SteadfastError):
    """A closure was cancelled: by the program, since another one had failed, or since its worker was removed."""


def described(error: BaseException) -> str:
    """Returns what an exception says, and, indented below it, its traceback."""
    last = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    where = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n  ".join([*last, *(where if error.__traceback__ is not None else [])])
