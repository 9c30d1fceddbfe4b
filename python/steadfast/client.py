"""A trainer in this process, for a training loop of one's own."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Mapping, Optional, Sequence

from . import _native
from .entry import build
from .model import Model

__all__ = ["Trainer", "leave_all"]


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

    Leaving the ``with`` block in the middle of the loop leaves the job: other trainers continue the work.

    Logs go to the logger ``steadfast`` if it or the root logger has a handler, else to stderr, in the format
    of the other processes.

    Args:
        args: Command-line arguments as for ``steadfast-trainer``, such as ``["--job", "digits"]``. They
            override the ``STEADFAST_...`` variables, which ``steadfast local`` sets for its trainers.
        model: Describes the parameters, sets their initial values, and evaluates. By default
            ``model.entry`` of the job file names the function that builds it.
        device: Device of a model in PyTorch that the job file names: ``"cpu"`` or ``"cuda"``. Overrides
            ``STEADFAST_DEVICE``, which overrides ``model.device`` in the job file.

    Raises:
        InvalidError: A setting is invalid.
    """

    def __init__(
        self, args: Sequence[str] = (), *, model: Optional[Model] = None, device: Optional[str] = None
    ) -> None:
        self._model = model
        self._device = device or os.environ.get("STEADFAST_DEVICE")
        # The native trainer lives as long as this object: it must not refer to it strongly.
        this = weakref.ref(self)

        def build_model(spec: Mapping[str, Any], features: int) -> Model:
            trainer = this()
            if trainer is None:
                raise RuntimeError("the trainer was deleted")
            return trainer._build(spec, features)

        # Without handlers, Python would show warnings only.
        emit = _emit if logging.getLogger("steadfast").hasHandlers() else None
        self._trainer = _native.Trainer(list(args), build_model, emit)
        _OPEN.add(self)

    @property
    def model(self) -> Model:
        """The model.

        Raises:
            RuntimeError: The job file names it, and it is built only with the first work.
        """
        if self._model is None:
            raise RuntimeError("the model is built when the trainer yields its first work")
        return self._model

    def _build(self, spec: Mapping[str, Any], features: int) -> Model:
        if self._model is None:
            self._model = build(spec, features, self._device or spec.get("device"))
        return self._model

    def __iter__(self) -> "Trainer":
        return self

    def __next__(self) -> _native.Work:
        return next(self._trainer)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leave(self) -> None:
        """Leaves the job once the work in progress is pushed; the loop ends."""
        self._trainer.leave()

    def close(self) -> None:
        """Leaves the job at once. Work in progress is computed by other trainers."""
        _OPEN.discard(self)
        self._trainer.close()


_OPEN: "weakref.WeakSet[Trainer]" = weakref.WeakSet()


def leave_all() -> bool:
    """Makes the trainers of this process leave the job, as :meth:`Trainer.leave`. Returns whether there are any."""
    trainers = list(_OPEN)
    for trainer in trainers:
        trainer.leave()
    return bool(trainers)


def _emit(logger: str, level: int, message: str) -> None:
    logging.getLogger(logger).log(level, "%s", message)
