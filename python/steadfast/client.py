"""A trainer in this process, for a training loop of one's own."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Union

from . import _native
from ._stacks import print_stacks_when_asked
from .entry import build
from .model import Model, settings_of

if TYPE_CHECKING:
    import numpy

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
    :meth:`get_parameters` and :meth:`save_model` work from the first work on, and after the last pass.

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
        print_stacks_when_asked()
        self._has_begun = False
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
        # Before they are read.
        settings_of(self._model)
        return self._model

    def __iter__(self) -> "Trainer":
        return self

    def __next__(self) -> _native.Work:
        self._has_begun = True
        return next(self._trainer)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_parameters(self, values: Mapping[str, Any]) -> None:
        """Sets the values with which training begins, in place of ``Model.initialize``.

        They have an effect only in a job that has not begun, and only if the master elects this trainer to
        initialize: all trainers of a job set the same values. Values of a job that has begun change only by
        gradients. Rows of tables begin as their ``initial`` says.

        Args:
            values: An array for each parameter, by name and in its shape, that converts to float32; one with a
                missing name, or ``None``, begins as ``Model.initialize`` says. Arrays are read when they are needed.
                The loop ends with :class:`SteadfastError` if one has another name or shape.

        Raises:
            RuntimeError: The trainer has yielded a work already.
        """
        if self._has_begun:
            raise RuntimeError("initial values are set before the first work")
        self._trainer.set_parameters(dict(values))

    def get_parameters(self) -> Dict[str, "numpy.ndarray[Any, numpy.dtype[numpy.float32]]"]:
        """Pulls the parameters of the job from the parameter servers: read-only float32 arrays by name.

        In a synchronous job all have the same version, which may be newer than ``work.parameters``; in an
        asynchronous one each block is as new as can be. After the last pass they are the final ones. Tables are
        left out.

        Raises:
            UnavailableError: The job begins another generation. Go on with the loop, and ask at the next work.
            SteadfastError: The trainer has yielded no work yet, or has left the job before its end.
        """
        return self._trainer.get_parameters()

    def save_model(self, path: Union[str, "os.PathLike[str]"]) -> str:
        """Writes the parameters as a safetensors file, whole or not at all, and returns their SHA-256.

        An earlier file is replaced. After the last pass, the file has the bytes of the model that the job saves,
        unless that is an earlier one (``evaluation.keep``).
        To resume from, a job has checkpoints: see ``steadfast checkpoint``.

        Args:
            path: A path, or a URL of an object (``s3://…``).

        Raises:
            InvalidError: The model has tables, or the path is invalid or cannot be written.
            UnavailableError: The store does not answer, or as :meth:`get_parameters`.
            SteadfastError: As :meth:`get_parameters`.
        """
        return self._trainer.save_model(os.fspath(path))

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
