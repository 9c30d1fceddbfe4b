"""A trainer in this process: a loop of your own, or ``python -m steadfast.trainer`` for Steadfast's."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import traceback
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

from . import _native
from .entry import build
from .errors import SteadfastError
from .model import Model

__all__ = ["Trainer", "main"]


class Trainer:
    """Takes part in a job, and yields the gradients to compute.

    ::

        with steadfast.Trainer() as trainer:
            for work in trainer:
                loss_sum, gradients = my_gradient(work.parameters, work.batch, work.key)
                work.push(gradients, loss_sum=loss_sum)

    In a synchronous job a work is one lane's micro-batch of a step, in an asynchronous one a mini-batch of
    a task. What happens to the job (a process is lost, a lane moves, the job is rolled back) is dealt with
    inside: a push that the job does not need any more has no effect.

    Logs go to the logger ``steadfast`` if it or the root logger has a handler, else to stderr, in the format
    of the other processes.

    Args:
        args: Command-line arguments as for ``steadfast-trainer``, such as ``["--job", "digits"]``. They
            override the ``STEADFAST_...`` variables, which ``steadfast local`` sets for its trainers.
        model: Describes the parameters, sets their initial values, and evaluates. By default
            ``model.entry`` of the job file names the function that builds it.

    Raises:
        InvalidError: A setting is invalid.
    """

    def __init__(
        self, args: Sequence[str] = (), *, model: Optional[Model] = None
    ) -> None:
        self.model: Optional[Model] = model
        """The model; ``None`` until the trainer has read the job."""
        # Without handlers, Python would show warnings only.
        emit = _emit if logging.getLogger("steadfast").hasHandlers() else None
        self._trainer = _native.Trainer(list(args), self._build, emit)

    def _build(self, spec: Mapping[str, Any], features: int) -> Model:
        if self.model is None:
            self.model = build(spec, features)
        return self.model

    def __iter__(self) -> Iterator[_native.Work]:
        return self._trainer

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        self.leave()
        try:
            for work in self._trainer:
                work.fail("the program has left its loop")
        except SteadfastError:
            # The exception that ended the loop says more.
            if kind is None:
                raise

    def leave(self) -> None:
        """Leaves the job once the work in progress is pushed; the loop ends."""
        self._trainer.leave()


def main(args: Sequence[str]) -> int:
    """Runs a trainer with the model that the job file names, and returns the exit code."""
    try:
        trainer = Trainer(args)
        _leave_on_signals(trainer.leave)
        for work in trainer:
            try:
                loss_sum, gradients = trainer.model.gradient(work.parameters, work.batch, work.key)
                work.push(gradients, loss_sum=float(loss_sum))
            except Exception:
                _fail(work, traceback.format_exc())
    except SteadfastError as error:
        for line in str(error).splitlines():
            print(f"steadfast-trainer: error: {line}", file=sys.stderr)
        return 2
    return 0


def _emit(logger: str, level: int, message: str) -> None:
    logging.getLogger(logger).log(level, "%s", message)


def _fail(work: _native.Work, reason: str) -> None:
    try:
        work.fail(reason.rstrip())
    except RuntimeError:
        # `push` has reported the error already.
        pass


def _leave_on_signals(leave: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT leaves the job, the second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def first(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        leave()

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, first)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
