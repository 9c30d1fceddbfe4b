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


def described(error: BaseException) -> str:
    """Returns what an exception says, and, indented below it, its traceback."""
    last = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    where = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n  ".join([*last, *(where if error.__traceback__ is not None else [])])
