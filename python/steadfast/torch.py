"""Models in PyTorch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import reprlib
import warnings
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from . import _native, devices
from ._embedding import Embedding, EmbeddingBag, Tables, column_ids
from ._groups import Groups, settings_of
from ._loss import LossCheck, check_reduction, computes, explained
from ._state import (
    buffer_at,
    buffer_places,
    check_averaged,
    check_wrappers,
    misfits,
    move,
    persistent,
    set_buffer,
    trained,
)
from .errors import InvalidError
from .model import Batch, records_of
from .model import Model as _Model
from .randomness import seed_all
from .tables import Table

__all__ = ["Embedding", "EmbeddingBag", "Model", "accuracy", "load"]

_EVALUATED = 1024
"""Records that are evaluated at a time."""


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns 1 for each record whose largest output is that of its label, else 0.

    The output has a number for each class (records × classes), the label the number of a class. With one output for
    each record there is no largest one, so a module with one logit takes a metric of its own::

        metrics={"accuracy": lambda output, label: ((output.flatten() > 0) == label).float()}

    Raises:
        InvalidError: The output has no classes, or the label another shape than the output without them.
    """
    if output.dim() < 2 or output.shape[-1] == 1:
        raise InvalidError(
            f"`accuracy` compares the outputs of the classes, and the output has the shape {list(output.shape)}, one "
            "number for each record; for one logit pass a metric of your own, such as "
            "`lambda output, label: ((output.flatten() > 0) == label).float()`"
        )
    if label.shape != output.shape[:-1]:
        raise InvalidError(
            f"`accuracy` takes labels of the shape {list(output.shape[:-1])} for the output "
            f"{list(output.shape)}, and these have {list(label.shape)}; {_label_remedy(output, label)}"
        )
    return (output.argmax(dim=-1) == label).to(torch.float32)


def _label_remedy(output: torch.Tensor, label: torch.Tensor) -> str:
    """Returns what to do about labels that are not one class for each output."""
    if label.shape == (*output.shape[:-1], 1):
        return "squeeze the label: `lambda output, label: steadfast.torch.accuracy(output, label.squeeze(-1))`"
    if label.shape == output.shape:
        return "take the class: `lambda output, label: steadfast.torch.accuracy(output, label.argmax(dim=-1))`"
    return "pass a metric of your own that compares them"


class Model(_Model):
    """Trains a module.

    Args:
        module: Called with the columns of ``inputs``; returns the output. Its layers may be :class:`Embedding` and
            :class:`EmbeddingBag`, whose weights are tables on the parameter servers.
        loss: Called with output and label; returns the mean loss of the records, as PyTorch's loss
            functions do, or their sum with ``reduction="sum"``. That it is what ``reduction`` says is checked by
            computing it for some records together and one by one, or ``min_records`` by ``min_records``: with the
            first micro-batches, and from time to time.
        metrics: One metric by name: called with output and label, returns one value for each record, a tensor of the
            shape (records,). The job shows their mean over all held-out records. They are evaluated in parts, so a
            value that compares records with each other, such as the area under a curve, is no such metric.
        reduction: What ``loss`` returns: ``"mean"`` or ``"sum"`` of the records' losses, or ``"coupled"`` of a loss
            that compares the records of a micro-batch with each other, as contrastive losses do. The latter
            counts as a mean, which depends on ``micro_batch`` in the job file, and is not checked.
        inputs: The columns that the module is called with, in order, as tensors over the same memory. A column
            of lists of any length is two arguments, values and offsets, as of ``torch.nn.EmbeddingBag`` with
            ``include_last_offset=True``.
        target: The column that the loss is called with.
        label: Type of the target: ``torch.int64`` for classes, or ``torch.float32``. By default classes, if the
            target has whole numbers and the loss takes them, else ``torch.float32``.
        transform: Called with the batch and its key before each computation; returns the batch to compute
            with, in NumPy arrays or tensors. See :meth:`steadfast.Model.transform`.
        threads: Threads of one operation. Results depend on it, so it is the same in all trainers.
        buffers: What happens to buffers in the module's state, such as the running statistics of
            BatchNorm. ``"mean"`` averages their changes over the records of a step, as gradients are.
            ``"constant"`` declares that training does not change them; they stay as built. Without it, a
            module with such buffers is rejected.
        device: ``"cpu"``, or ``"cuda"`` with or without a number; the module is moved there. By default the
            device of the trainer (``--device``, ``model.device`` in the job file), or the CPU. Parameters and
            gradients cross once each way, by way of pinned memory.
        master_weights: Trains float16 and bfloat16 parameters as float32 ones: before each computation they
            are rounded to the type of the module, and their gradients are converted to float32. Without it, a
            module with such parameters is rejected.
        groups: Settings of the optimizer for some parameters, as ``[[optimizer.groups]]`` of the job file sets them:
            dicts with ``params`` and ``weight_decay``, ``learning_rate`` (a factor of that of the job file) or
            ``frozen=True``. ``params`` are names, in which ``*`` stands for any text, or parameters: these must then be
            all that are trained. Or an optimizer of PyTorch's, whose groups it takes: each ``weight_decay``, and each
            ``lr`` as a factor of the optimizer's, which is that of the job file. The optimizer itself is that of the
            job file.
        min_records: The fewest records of a micro-batch: 2 by default of a module with a ``BatchNorm1d`` that is
            trained, which normalizes no single record, else 1. See :attr:`steadfast.Model.min_records`.

    Raises:
        InvalidError: The module has parameters or buffers that cannot be trained faithfully, or is or has a wrapper
            that changes their names, such as the result of ``torch.compile``. Or a parameter is in two groups, in none
            of those given by parameters, or not one of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        metrics: Optional[Mapping[str, Callable[..., torch.Tensor]]] = None,
        *,
        reduction: str = "mean",
        inputs: Union[str, Sequence[str]] = "features",
        target: str = "label",
        label: Optional[torch.dtype] = None,
        transform: Optional[Callable[[Batch, Optional[Any]], Batch]] = None,
        threads: int = 1,
        buffers: Optional[str] = None,
        device: Optional[str] = None,
        master_weights: bool = False,
        groups: Optional[Groups] = None,
        min_records: Optional[int] = None,
    ) -> None:
        if reduction not in ("mean", "sum", "coupled"):
            raise InvalidError(f'`reduction` is "{reduction}"; use "mean", "sum" or "coupled"')
        if buffers not in (None, "mean", "constant"):
            raise InvalidError(f'`buffers` is "{buffers}"; use "mean" or "constant"')
        if metrics is not None and len(metrics) != 1:
            raise InvalidError("`metrics` takes one metric by name")
        check_reduction(loss, reduction)
        check_wrappers(module)
        # Before the module is moved, which may replace its parameters.
        self._settings = {} if groups is None else settings_of(module, groups)
        self.device = _device(device)
        _deterministic(threads)
        owners = move(module, self.device)
        self.module = module
        self._loss = loss
        self._reduction = reduction
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target = target
        self._label = label
        # Whether the loss was found not to take classes.
        self._takes_numbers = False
        self._transform = transform
        self._metric: Optional[Callable[..., Any]] = None
        self.metric_name = "loss"
        if metrics:
            self.metric_name, self._metric = next(iter(metrics.items()))
        self._tables = Tables(module)
        self._trained = _trained(module, master_weights, bool(self._tables.declared))
        kept = persistent(module, owners)
        if kept and buffers is None:
            raise InvalidError(
                f"the buffer `{kept[0]}` is part of the module's state but no parameter, so its changes "
                'would be lost; pass `buffers="mean"` to average it over the records, or '
                '`buffers="constant"` if training does not change it'
            )
        self._owners = owners
        self._averaged = kept if buffers == "mean" else []
        self._constant = kept if buffers == "constant" else []
        # A module may replace its buffers, so they are looked up by name each time.
        self._as_built = {name: self._buffer(name).detach().clone() for name in owners}
        for name in self._averaged:
            check_averaged(name, self._as_built[name])
        self._initial = {
            name: it.detach().to("cpu", torch.float32, copy=True).numpy() for name, it in self._state().items()
        }
        self._crossing = _Crossing(self.device, self._state()) if self.device.type != "cpu" else None
        # Layers that the user has set to evaluation mode stay so.
        self._modes = {layer: layer.training for layer in module.modules()}
        needs_two = any(isinstance(it, torch.nn.BatchNorm1d) and it.training for it in self._modes)
        self.min_records = min_records or (2 if needs_two else 1)
        self._loss_check = LossCheck(loss, reduction, self.min_records)

    def parameters(self) -> Dict[str, List[int]]:
        return {name: list(it.shape) for name, it in self._state().items()}

    def averaged(self) -> Collection[str]:
        return self._averaged

    def settings(self) -> Dict[str, Dict[str, Any]]:
        return self._settings

    def tables(self) -> Dict[str, Table]:
        return self._tables.declared

    def ids(self, batch: Batch) -> Dict[str, np.ndarray]:
        return self._tables.ids(batch)

    def initialize(self, seed: int) -> Dict[str, np.ndarray]:
        fresh = self.rebuild(seed) if self.rebuild else None
        return fresh._initial if isinstance(fresh, Model) else self._initial

    def gradient(self, parameters: Mapping[str, Any], batch: Batch, key: Any) -> Tuple[float, Dict[str, np.ndarray]]:
        try:
            return self._gradient(parameters, batch, key.seed)
        except _TakesNumbers:
            # From the start: nothing may depend on what was computed in vain.
            return self._gradient(parameters, batch, key.seed)

    def _gradient(self, parameters: Mapping[str, Any], batch: Batch, seed: int) -> Tuple[float, Dict[str, np.ndarray]]:
        self._load(parameters)
        seed_all(seed)
        for layer, training in self._modes.items():
            layer.training = training
        for parameter in self._trained.values():
            parameter.grad = None
        inputs, label = self._tensors(batch)
        output = self._output(inputs, 0, len(label))
        sample = self._loss_check.sample(output, label)
        loss = self._sum(output, label)
        loss.backward()
        leaving = {name: it.grad for name, it in self._trained.items() if it.grad is not None}
        leaving.update({name: self._buffer(name) for name in self._averaged})
        gradients = self._to_host(leaving)
        for name in self._averaged:
            gradients[name] = (gradients[name] - parameters[name]) * np.float32(len(label))
        gradients.update(self._tables.gradients())
        self._check_buffers()
        loss_sum = loss.item()
        # After all that counts: it may call the module.
        self._loss_check.check(sample, functools.partial(self._output_from, inputs, 0))
        return loss_sum, gradients

    def evaluate(self, parameters: Mapping[str, Any], batch: Batch) -> Tuple[float, float]:
        try:
            return self._evaluate(parameters, batch)
        except _TakesNumbers:
            return self._evaluate(parameters, batch)

    def _evaluate(self, parameters: Mapping[str, Any], batch: Batch) -> Tuple[float, float]:
        self._load(parameters)
        seed_all(0)
        self.module.eval()
        inputs, label = self._tensors(batch)
        loss_sum = metric_sum = 0.0
        with torch.no_grad():
            # A task may have many more records than a micro-batch.
            for start in range(0, len(label), _EVALUATED):
                part = label[start : start + _EVALUATED]
                output = self._output(inputs, start, start + len(part))
                sample = self._loss_check.sample(output, part)
                loss_sum += self._sum(output, part).item()
                if self._metric is not None:
                    metric_sum += self._metric_sum(self._metric(output, part), output, part)
                self._loss_check.check(sample, functools.partial(self._output_from, inputs, start))
        self._check_buffers()
        return loss_sum, loss_sum if self._metric is None else metric_sum

    def numerics(self) -> str:
        """Covers also what does not travel: frozen parameters and buffers."""
        digest = hashlib.sha256()
        for name, tensor in [*self.module.named_parameters(), *self._as_built.items()]:
            if name not in self._trained and name not in self._averaged:
                digest.update(name.encode())
                fixed = tensor.detach().cpu().reshape(-1).view(torch.uint8)
                digest.update(fixed.numpy().tobytes())
        return (
            f"torch {torch.__version__} {_digest(self.device)[:16]} with {torch.get_num_threads()} threads"
            f"{_describe(self.device)}, fixed tensors {digest.hexdigest()[:16]}"
        )

    def _state(self) -> Dict[str, torch.Tensor]:
        """Returns what travels: trained parameters and averaged buffers."""
        return {**self._trained, **{name: self._buffer(name) for name in self._averaged}}

    def _buffer(self, name: str) -> torch.Tensor:
        return buffer_at(self._owners[name])

    def _check_buffers(self) -> None:
        """Checks what a computation has left in the buffers: one that layers share is looked up in the first one."""
        for name in self._constant:
            if not all(torch.equal(self._as_built[name], it) for it in self._shared(name)):
                raise InvalidError(
                    f'the computation changes the buffer `{name}`; pass `buffers="mean"`, not "constant"'
                )
        for name in self._averaged:
            if any(it is not self._buffer(name) for it in self._shared(name)):
                raise InvalidError(
                    f"the computation replaces the buffer `{name}`, which several layers share, in one of them; change "
                    "it in place, such as with `copy_`"
                )

    def _shared(self, name: str) -> List[Any]:
        """Returns the buffer of each layer that has it."""
        return [layer._buffers[key] for layer, key in self._owners[name]]

    @staticmethod
    def _metric_sum(values: Any, output: Any, label: torch.Tensor) -> float:
        """Returns the sum of a metric, which has one value for each record.

        Of another shape it compares records with each other: an output of records × 1 and as many labels make
        records × records.
        """
        shape = tuple(getattr(values, "shape", ()))
        records = len(label)
        if shape == (records,):
            return float(values.sum().item())
        found = f"a {type(values).__name__}" if not hasattr(values, "shape") else f"the shape {list(shape)}"
        remedy = "a metric of all records together, such as the area under a curve, has no such values"
        if shape[:1] == (records,):
            remedy = "take the mean over the other dimensions, such as `.flatten(1).mean(dim=1)`"
        if len(shape) == 2 and shape[0] == records and shape[1] in (1, records):
            given = f"the output {list(output.shape)}, " if isinstance(output, torch.Tensor) else ""
            remedy = f"{given}the labels {list(label.shape)}: give both one dimension, with `squeeze(1)`"
        raise InvalidError(
            f"the metric of {records} records has {found}; return one value for each record, of the shape "
            f"[{records}] ({remedy})"
        )

    def _load(self, parameters: Mapping[str, Any]) -> None:
        """Copies the arrays into the module: its code may change parameters and buffers in place."""
        self._tables.load(parameters, self.device)
        with warnings.catch_warnings():
            # The arrays are read-only, and nothing here writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            given = {
                name: torch.from_numpy(array) for name, array in parameters.items() if name not in self._tables.declared
            }
        if self._crossing is not None:
            given = self._crossing.arriving(given)
        for name, parameter in self._trained.items():
            parameter.data.copy_(given[name], non_blocking=True)
        for name, places in self._owners.items():
            if name in self._averaged:
                like = self._as_built[name]
                set_buffer(places, given[name].to(like.device, like.dtype, copy=True))
            elif name not in self._constant:
                set_buffer(places, self._as_built[name].clone())

    def _to_host(self, tensors: Mapping[str, torch.Tensor]) -> Dict[str, np.ndarray]:
        """Returns the tensors as float32 arrays; those of the CPU with the same memory."""
        for name, it in tensors.items():
            if it.layout != torch.strided:
                raise InvalidError(
                    f"the gradient of `{name}` is sparse; leave out `sparse=True`, or use "
                    "`steadfast.torch.Embedding`, of which only the rows of a batch travel"
                )
        if self._crossing is not None:
            tensors = self._crossing.leaving(tensors)
        return {name: it.detach().to(torch.float32).numpy() for name, it in tensors.items()}

    def transform(self, batch: Batch, key: Optional[Any]) -> Batch:
        return batch if self._transform is None else self._transform(batch, key)

    def _tensors(self, batch: Batch) -> Tuple[List[Any], torch.Tensor]:
        """Returns the inputs, each a tensor or a pair of values and offsets, and the target."""
        inputs = [_tensor(name, self._input(batch, name), self.device) for name in self._inputs]
        target = _tensor(self._target, _column(batch, self._target), self.device)
        if isinstance(target, tuple):
            raise InvalidError(f"the target `{self._target}` is a list of any length in each record")
        for name, given in zip(self._inputs, inputs):
            if records_of(given) != len(target):
                raise InvalidError(
                    f"the input `{name}` has {records_of(given)} records, the target `{self._target}` "
                    f"{len(target)}; offsets of lists end with the number of values"
                )
        return inputs, self._as_label(target)

    def _as_label(self, target: torch.Tensor) -> torch.Tensor:
        if self._label is None and self._takes_numbers:
            return target.to(torch.float32)
        label = target.to(self._label or torch.int64)
        has_fractions = target.is_floating_point() and not label.is_floating_point()
        if not has_fractions or torch.equal(target, label):
            return label
        if self._label is not None:
            raise InvalidError(
                f"the target `{self._target}` has fractions; pass `label=torch.float32` for numbers in place of classes"
            )
        return target.to(torch.float32)

    def _output_from(self, inputs: Sequence[Any], start: int, records: int) -> Any:
        """Calls the module with so many records from ``start`` on."""
        return self._output(inputs, start, start + records)

    def _output(self, inputs: Sequence[Any], start: int, end: int) -> Any:
        """Calls the module with the records from ``start`` to ``end``."""
        arguments = _arguments(inputs, start, end)
        try:
            return self.module(*arguments)
        except TypeError as error:
            raise self._wrong_arguments(inputs, arguments, error) or error from None
        except IndexError as error:
            # On the CPU: an index beyond the rows of a layer.
            raise self._wrong_record(inputs, start, end) or error from None
        except ValueError as error:
            if end - start == 1 and "more than 1 value per channel" in str(error):
                raise InvalidError(
                    f"the module cannot normalize a micro-batch of one record: {error}; set `min_records = 2` in "
                    "`[model]` of the job file"
                ) from error
            raise

    def _wrong_arguments(
        self, inputs: Sequence[Any], arguments: Sequence[Any], error: TypeError
    ) -> Optional[InvalidError]:
        """Returns which inputs are two arguments each, if the module does not take as many as there are."""
        lists = [name for name, it in zip(self._inputs, inputs) if isinstance(it, tuple)]
        if not lists or _takes(self.module, arguments):
            return None
        return InvalidError(
            f"the module was called with {len(arguments)} arguments for the inputs {', '.join(self._inputs)}: "
            f"{', '.join(lists)} has lists of any length, which are two arguments, values and offsets; take "
            f'both, or set a fixed length in `dataset.types`, such as {{ {lists[0]} = "float32[64]" }} ({error})'
        )

    def _wrong_record(self, inputs: Sequence[Any], start: int, end: int) -> Optional[InvalidError]:
        """Returns which record the module cannot be called with, if it can be called with others."""
        errors: Dict[int, IndexError] = {}
        with torch.no_grad():
            for at in range(start, end):
                try:
                    self.module(*_arguments(inputs, at, at + 1))
                except IndexError as error:
                    errors[at] = error
                except Exception:
                    # It needs more than one record.
                    return None
        if not errors or len(errors) == end - start > 1:
            return None
        at, first = next(iter(errors.items()))
        values = [reprlib.repr(it.tolist()) for it in _arguments(inputs, at, at + 1)]
        return InvalidError(
            f"the module cannot be called with record {at - start} of a micro-batch of {end - start}, whose "
            f"{', '.join(self._inputs)} are {', '.join(values)}: {first}; ids are from 0 to `num_embeddings` - 1 "
            "of their layer: correct the data or the layer, or use `steadfast.torch.Embedding`, which takes any "
            "id"
        )

    def _input(self, batch: Batch, name: str) -> Any:
        column = _column(batch, name)
        return column_ids(name, column) if name in self._tables.columns else column

    def _sum(self, output: Any, label: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses."""
        try:
            loss = self._loss(output, label)
        except Exception as error:
            refused = self._refused(output, label, error)
            if refused is None:
                raise
            raise refused from error
        if loss.dim() != 0:
            raise InvalidError(f"the loss has the shape {list(loss.shape)}; return one number, the mean or the sum")
        return loss if self._reduction == "sum" else loss * len(label)

    def _refused(self, output: Any, label: torch.Tensor, error: Exception) -> Optional[Exception]:
        """Returns what is wrong with a loss that raised an error."""
        is_open = self._label is None and label.dtype == torch.int64
        if is_open and computes(self._loss, output, label.to(torch.float32)):
            self._takes_numbers = True
            return _TakesNumbers()
        takes_classes = self._label is None and label.is_floating_point() and not self._takes_numbers
        if takes_classes and computes(self._loss, output, label.to(torch.int64)):
            return InvalidError(
                f"the target `{self._target}` has fractions, and the loss takes whole numbers, the classes; "
                "correct the target, or take a loss of numbers"
            )
        return explained(self._loss, output, label, error)


def load(
    module: torch.nn.Module,
    parameters: Union[Mapping[str, Any], str, "os.PathLike[str]"],
    *,
    buffers: str = "mean",
) -> None:
    """Copies what a job has trained into a module, whose tensors keep their types and devices.

    ::

        net = make_net()
        steadfast.torch.load(net, run.model())

    All of it is needed, and nothing else is taken: the parameters that require a gradient, tied ones under their first
    name, and the buffers in the module's state. Parameters that do not require a gradient, and with
    ``buffers="constant"`` the buffers too, are in no job: they stay as the module was built, so build it as in the
    job. Rows of embedding tables are not loaded. If something does not fit, the module is as it was.

    Args:
        module: Has the names and shapes of the one that was trained, and its ``requires_grad``.
        parameters: Arrays or tensors by name, as :meth:`steadfast.Run.model` and
            :meth:`steadfast.Trainer.get_parameters` return them, or the path of a model file (safetensors).
        buffers: ``"mean"`` or ``"constant"``, as it was passed to :class:`Model`.

    Raises:
        InvalidError: Something is missing, is not trained in this module, or has another shape; names it. Or the file
            is none of a model.
        OSError: The file cannot be read.
    """
    if buffers not in ("mean", "constant"):
        raise InvalidError(f'`buffers` is "{buffers}"; use "mean" or "constant"')
    check_wrappers(module)
    expected: Dict[str, torch.Tensor] = {**trained(module)}
    places = buffer_places(module)
    kept = {name: buffer_at(places[name]) for name in persistent(module, places)}
    if buffers == "mean":
        expected.update(kept)
    given = _given(parameters)
    found = misfits(expected, given)
    if found:
        hint = ""
        if buffers == "mean" and kept and not any(name in given for name in kept):
            hint = ' (pass `buffers="constant"` if the job has no buffers, since training does not change them)'
        raise InvalidError(f"the parameters do not fit the module: {'; '.join(found)}{hint}")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(given[name])


def _given(parameters: Union[Mapping[str, Any], str, "os.PathLike[str]"]) -> Dict[str, torch.Tensor]:
    if isinstance(parameters, (str, os.PathLike)):
        path = os.fspath(parameters)
        try:
            parameters = _native.read_tensors(path)
        except ValueError as error:
            raise InvalidError(f"{path}: {error}") from None
    # A copy of arrays that are read-only, about which PyTorch would warn.
    return {
        name: it if isinstance(it, torch.Tensor) else torch.from_numpy(np.array(it, np.float32))
        for name, it in parameters.items()
    }


class _TakesNumbers(Exception):
    """The loss does not take classes as labels, but numbers."""


def _column(batch: Batch, name: str) -> Any:
    if name not in batch:
        raise InvalidError(f"the batch has no column `{name}`, only {', '.join(batch)}")
    return batch[name]


def _tensor(name: str, column: Any, device: torch.device) -> Any:
    if isinstance(column, tuple):
        return tuple(_tensor(name, it, device) for it in column)
    if isinstance(column, torch.Tensor):
        return column.to(device)
    column = np.asarray(column)
    if column.dtype == object:
        raise InvalidError(f"the column `{name}` holds text or bytes; convert it in `transform`")
    if column.dtype == np.uint64:
        # PyTorch computes little with unsigned integers.
        column = column.view(np.int64)
    return torch.from_numpy(column).to(device)


def _takes(module: torch.nn.Module, arguments: Sequence[torch.Tensor]) -> bool:
    """Returns whether a module has so many parameters."""
    try:
        inspect.signature(module.forward).bind(*arguments)
    except TypeError:
        return False
    return True


def _arguments(inputs: Sequence[Any], start: int, end: int) -> List[torch.Tensor]:
    """Returns the records from ``start`` to ``end`` of each input."""
    arguments: List[torch.Tensor] = []
    for it in inputs:
        if isinstance(it, tuple):
            values, offsets = it
            ends = offsets[start : end + 1]
            arguments += [values[int(ends[0]) : int(ends[-1])], ends - ends[0]]
        else:
            arguments.append(it[start:end])
    return arguments


class _Crossing:
    """Host memory through which tensors move to and from a device.

    It is pinned, so the device copies by itself, and allocated once.
    """

    def __init__(self, device: torch.device, state: Mapping[str, torch.Tensor]) -> None:
        def staging() -> Dict[str, torch.Tensor]:
            pinned = device.type == "cuda"
            return {name: torch.empty(it.shape, dtype=torch.float32, pin_memory=pinned) for name, it in state.items()}

        self._device = device
        self._arriving = staging()
        self._leaving = staging()

    def arriving(self, tensors: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Returns the tensors in pinned memory, where they are valid until the next call."""
        self._wait()
        return {name: self._arriving[name].copy_(tensor) for name, tensor in tensors.items()}

    def leaving(self, tensors: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Returns tensors of the device on the host, as float32, where they are valid until the next call."""
        for name, tensor in tensors.items():
            self._leaving[name].copy_(tensor.detach(), non_blocking=True)
        self._wait()
        return {name: self._leaving[name] for name in tensors}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _device(wanted: Optional[str]) -> torch.device:
    """Returns the device that `wanted`, or else the trainer, names."""
    name = wanted or devices.current() or "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidError(f"`device` is `{name}`: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidError(f'`device` is `{name}`; use "cpu" or "cuda"')
    if device.type == "cuda" and torch.cuda.device_count() <= (device.index or 0):
        raise InvalidError(
            f"`device` is `{name}`, but PyTorch {torch.__version__} finds {torch.cuda.device_count()} GPUs; "
            'use "cpu", or install a driver and a PyTorch that fit'
        )
    return device


def _describe(device: torch.device) -> str:
    """Describes what results depend on besides the CPU."""
    if device.type == "cpu":
        return ""
    return (
        f" on {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, float32 products {torch.get_float32_matmul_precision()}, "
        f"TF32 in cuDNN {torch.backends.cudnn.allow_tf32}"
    )


def _trained(module: torch.nn.Module, master_weights: bool, has_tables: bool) -> Dict[str, torch.nn.Parameter]:
    """Returns the parameters that are trained, by name; tied ones once."""
    found = trained(module)
    if not found and not has_tables:
        raise InvalidError("the module has no parameter that requires a gradient")
    for name, parameter in found.items():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            if not master_weights:
                raise InvalidError(
                    f"the parameter `{name}` is {parameter.dtype}; pass `master_weights=True` to train it as "
                    "float32, or convert the module with `.float()`"
                )
        elif parameter.dtype != torch.float32:
            raise InvalidError(f"the parameter `{name}` is {parameter.dtype}; convert the module with `.float()`")
    return found


def _deterministic(threads: int) -> None:
    # cuBLAS reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def _digest(device: torch.device) -> str:
    """Hashes the bits of a small fixed computation."""
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        image, matrix = torch.randn(2, 3, 12, 12).to(device), torch.randn(33, 130).to(device)
        weight = torch.randn(5, 3, 3, 3).to(device).requires_grad_()
        found = torch.nn.functional.conv2d(image, weight)
        (slope,) = torch.autograd.grad(found.square().mean(), weight)
        results: Sequence[torch.Tensor] = (
            found,
            slope,
            matrix @ matrix.T,
            torch.softmax(matrix, dim=1),
            torch.nn.functional.layer_norm(matrix, (130,)),
            torch.nn.functional.gelu(matrix),
        )
    finally:
        torch.set_rng_state(state)
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
