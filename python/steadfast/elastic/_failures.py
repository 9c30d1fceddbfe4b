"""Tells a failed operation of all workers from an error of the program, by the type of the exception."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Iterator, Optional, Tuple, Type

from .errors import CollectiveError, WorkerLost

Types = Tuple[Type[BaseException], ...]

__all__ = ["collective_failure", "may_be_collective", "of_program"]

_MARK = "_steadfast_is_of_program"
"""Attribute of exceptions that :func:`of_program` has seen."""


@contextlib.contextmanager
def of_program() -> Iterator[None]:
    """Runs a callback of the program: its exceptions are not taken for failed operations, unless by their type.

    Callbacks are called when workers were lost or added, so the agent knows of a loss whatever raised the exception.
    """
    try:
        yield
    except Exception as error:
        setattr(error, _MARK, True)
        raise


def collective_failure(error: BaseException) -> Optional[CollectiveError]:
    """Returns the failure that an exception stands for; ``None`` if its type is not that of a failed operation."""
    if isinstance(error, CollectiveError):
        return error
    lost, failed = _types()
    if not isinstance(error, (*lost, *failed)):
        return None
    return (WorkerLost if isinstance(error, lost) else CollectiveError)(str(error))


def may_be_collective(error: BaseException) -> bool:
    """Returns whether the exception may be that of a failed operation.

    gloo, like much else, raises RuntimeError; TensorFlow raises various errors once an operation was aborted.
    """
    if hasattr(error, _MARK):
        return False
    tensorflow = sys.modules.get("tensorflow")
    return type(error) is RuntimeError or isinstance(error, _of(tensorflow, "errors", "OpError"))


def _types() -> Tuple[Types, Types]:
    """Returns the types of exceptions that say that a worker was lost, and of those that say that an operation failed."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    lost = _of(torch, "distributed", "DistNetworkError") + _of(tensorflow, "errors", "UnavailableError")
    return lost, _of(torch, "distributed", "DistError") + _of(tensorflow, "errors", "AbortedError")


def _of(framework: Optional[ModuleType], module: str, name: str) -> Types:
    """Returns a type of exceptions, if the program has imported the framework and that has it."""
    found = getattr(getattr(framework, module, None), name, None)
    return () if found is None else (found,)
