"""Transforms of batches in processes of their own, ahead of their computation."""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Tuple

from .errors import InvalidError
from .model import Batch, Model, checked, transform_seed
from .randomness import seed_all

if TYPE_CHECKING:
    from ._native import Key

__all__ = ["prepare", "prepares", "transformed"]

_KEPT = 64
"""The most batches that are transformed, or wait for their computation."""

_LOSSES_MAX = 3
"""How often in a row a process may die before its batch is transformed."""

_logger = logging.getLogger(__name__)


def prepares(model: Model) -> bool:
    """Returns whether the batches of a model are transformed in processes of their own."""
    workers = model.workers
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
        raise InvalidError(f"`workers` of the model is {workers!r}; it is a number of processes, from 0")
    if workers and model.tables():
        raise InvalidError("`workers` does not apply to a model with tables, whose ids are transformed first; use 0")
    return workers > 0


def prepare(model: Model, batch: Batch, key: "Key", digest: int) -> None:
    """Begins to transform a batch, unless that has begun."""
    _pool(model).submit(batch, key, digest)


def transformed(model: Model, batch: Batch, key: "Key", digest: int, records: int) -> Batch:
    """Returns what the model's ``transform`` makes of a batch; sets all random states for its computation."""
    found = _pool(model).take(key, digest) if model.workers else None
    if found is None:
        seed_all(transform_seed(key))
        found = model.transform(batch, key)
    seed_all(key.seed)
    return checked(found, records)


def _pool(model: Model) -> "_Pool":
    pool: Optional[_Pool] = getattr(model, "_ahead", None)
    if pool is None:
        pool = _Pool(model)
        model._ahead = pool  # type: ignore[attr-defined]
    return pool


class _Pool:
    """Processes that transform, and the batches that they have begun."""

    def __init__(self, model: Model) -> None:
        try:
            self._transform = pickle.dumps(model.transform_function())
        except Exception as error:
            raise InvalidError(
                f"`transform` cannot be sent to a process of its own (`workers`): {error}; define it at the top of a "
                "module, or use `workers=0`"
            ) from None
        self._workers = model.workers
        self._threads = model.threads
        self._executor: Optional[concurrent.futures.ProcessPoolExecutor] = None
        self._losses = 0
        self._begun: "OrderedDict[Tuple[Any, ...], concurrent.futures.Future[Batch]]" = OrderedDict()

    def submit(self, batch: Batch, key: "Key", digest: int) -> None:
        identity = _identity(key, digest)
        if identity in self._begun:
            return
        if self._executor is None:
            self._executor = concurrent.futures.ProcessPoolExecutor(
                self._workers, multiprocessing.get_context("spawn"), _begin, (self._transform, self._threads)
            )
        try:
            self._begun[identity] = self._executor.submit(_run, dict(batch), key)
        except concurrent.futures.BrokenExecutor:
            self._lost()
        while len(self._begun) > _KEPT:
            self._begun.popitem(last=False)[1].cancel()

    def take(self, key: "Key", digest: int) -> Optional[Batch]:
        """Returns a batch that was begun; ``None`` if none was, or its process has died."""
        future = self._begun.pop(_identity(key, digest), None)
        if future is None:
            return None
        try:
            found = future.result()
        except (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError):
            self._lost()
            return None
        self._losses = 0
        return found

    def _lost(self) -> None:
        """Begins anew with other processes: one has died."""
        self._losses += 1
        if self._losses > _LOSSES_MAX:
            raise InvalidError(
                f"a process that transforms batches (`workers`) has died {self._losses} times in a row; it has said why "
                "on stderr, or was killed"
            )
        if self._executor is not None:
            _logger.warning("a process that transforms batches has died; others are started")
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = None
        self._begun.clear()


def _identity(key: "Key", digest: int) -> Tuple[Any, ...]:
    return key.pass_number, key.step, key.lane, digest


_function: Optional[Callable[[Batch, "Key"], Batch]] = None
"""What a process of a pool transforms with."""


def _begin(transform: bytes, threads: int) -> None:
    """Begins a process of a pool."""
    global _function
    # The trainer decides what Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The trainer may be killed, and then says nothing.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _function = pickle.loads(transform)
    if "torch" in sys.modules:
        from .torch import deterministic

        deterministic(threads)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _run(batch: Mapping[str, Any], key: "Key") -> Batch:
    assert _function is not None, "a process begins before it transforms"
    seed_all(transform_seed(key))
    return _function(batch, key)
