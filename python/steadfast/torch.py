"""Models in PyTorch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import reprlib
import tempfile
import warnings
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from . import _optimizer, devices
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
    raw,
    set_buffer,
    tensors,
    trained,
    untrained,
)
from ._tensor_file import encode, read
from .errors import InvalidError
from .model import Batch, Ranked, Sum, Sums, check_further, records_of
from .model import Model as _Model
from .randomness import seed_all
from .run import Run
from .tables import Table

__all__ = ["Embedding", "EmbeddingBag", "Model", "accuracy", "auc", "load", "optimizer_state", "save_optimizer_state"]

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


def auc(output: torch.Tensor, label: torch.Tensor) -> Ranked:
    """Ranks records by a module of two classes: the metric is the area under the ROC curve.

    The output has one logit for each record (records, or records × 1), or one for each of two classes. The label is 0 or
    1. Name it after the metric of the job: ``metrics={"accuracy": …, "auc": steadfast.torch.auc}``. Others rank by
    :class:`steadfast.Ranked`, such as one class against all others::

        metrics={"accuracy": …, "auc_3": lambda output, label: steadfast.Ranked(output[:, 3], label == 3)}

    Raises:
        InvalidError: The output is neither of these.
    """
    if output.dim() == 2 and output.shape[1] == 2:
        return Ranked(output[:, 1] - output[:, 0], label)
    if output.shape not in ((len(label),), (len(label), 1)):
        raise InvalidError(
            f"`auc` takes one logit for each record, or two, and the output of {len(label)} records has the shape "
            f"{list(output.shape)}; rank one class by `lambda output, label: steadfast.Ranked(output[:, 3], label == 3)`"
        )
    return Ranked(output.flatten(), label.flatten())


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
        metrics: Metrics by name, of which the first one is the metric of the job: each is called with output and label,
            and returns one value for each record, a tensor of the shape (records,). The job shows their mean over all
            held-out records. One whose records count differently, such as by their tokens, returns a pair of tensors:
            the sum for each record, and what it is over. The records are evaluated in parts, so of the values that
            compare them with each other there is one only: :class:`steadfast.Ranked`, as of :func:`auc`, for the area
            under the ROC curve. It is not the first metric.
        reduction: What ``loss`` returns: ``"mean"`` or ``"sum"`` of the records' losses; ``"weighted"`` for a pair, the
            sum of what counts and its weight, such as the number of tokens that are not padding or the sum of class
            weights; or ``"coupled"`` of a loss that compares the records of a micro-batch with each other, as
            contrastive losses do. The latter counts as a mean, which depends on ``micro_batch`` in the job file, and
            is not checked.
        weight: The column with what each record counts: ``"weight"`` with ``dataset.weight`` of the job file. ``loss``
            is called with its values as third argument, and needs ``reduction="weighted"``. Values of metrics are
            multiplied by them, and divided by their sum.
        inputs: The columns that the module is called with, in order, as tensors over the same memory. A column
            of lists of any length is two arguments, values and offsets, as of ``torch.nn.EmbeddingBag`` with
            ``include_last_offset=True``.
        target: The column that the loss is called with.
        label: Type of the target: ``torch.int64`` for classes, or ``torch.float32``. By default classes, if the
            target has whole numbers and the loss takes them, else ``torch.float32``.
        transform: Called with the batch and its key before each computation; returns the batch to compute
            with, in NumPy arrays or tensors. See :meth:`steadfast.Model.transform`.
        workers: Processes in which ``transform`` runs ahead of the computation, on each trainer; with 0 it runs before
            it. The bits are the same. ``transform`` is a function at the top of a module. Evaluations transform in
            the trainer, and so does a module with tables, which takes no workers.
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
        losses: Further losses by name, such as the parts that ``loss`` adds up: called, reduced and checked as ``loss``
            is, and shown as further metrics of the held-out records.
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
        loss: Callable[..., Any],
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
        losses: Optional[Mapping[str, Callable[..., Any]]] = None,
        weight: Optional[str] = None,
        workers: int = 0,
    ) -> None:
        if workers and transform is None:
            raise InvalidError("`workers` are processes in which `transform` runs, and there is none; remove it")
        if reduction not in ("mean", "sum", "weighted", "coupled"):
            raise InvalidError(f'`reduction` is "{reduction}"; use "mean", "sum", "weighted" or "coupled"')
        if weight is not None and reduction != "weighted":
            raise InvalidError(
                f'`weight` names the column `{weight}`, and the loss has `reduction="{reduction}"`; use "weighted", '
                "and return the weighted sum of the losses and the sum of the weights"
            )
        if buffers not in (None, "mean", "constant"):
            raise InvalidError(f'`buffers` is "{buffers}"; use "mean" or "constant"')
        if metrics is not None and not metrics:
            raise InvalidError("`metrics` is empty; name a metric, or leave it out")
        _check_names(list(metrics or {}), list(losses or {}))
        for it in [loss, *(losses or {}).values()]:
            check_reduction(it, reduction)
        check_wrappers(module)
        # Before the module is moved, which may replace its parameters.
        self._settings = {} if groups is None else settings_of(module, groups)
        self.device = _device(device)
        deterministic(threads)
        owners = move(module, self.device)
        self.module = module
        self._loss = loss
        self._reduction = reduction
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target = target
        self._weight = weight
        self._label = label
        # Whether the loss was found not to take classes.
        self._takes_numbers = False
        self._transform = transform
        self.workers = workers
        self.threads = threads
        self._metrics = dict(metrics or {})
        self._losses = dict(losses or {})
        # Without a metric, the loss is shown as one.
        self.metric_name = next(iter(self._metrics), "loss")
        self.further_metrics = [*list(self._metrics)[1:], *self._losses]
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
        self._untrained = untrained(module, self._state())
        self._crossing = _Crossing(self.device, self._state()) if self.device.type != "cpu" else None
        # Layers that the user has set to evaluation mode stay so.
        self._modes = {layer: layer.training for layer in module.modules()}
        needs_two = any(isinstance(it, torch.nn.BatchNorm1d) and it.training for it in self._modes)
        self.min_records = min_records or (2 if needs_two else 1)
        self._loss_check = self._check_of(loss, "the loss")
        self._further_checks = {name: self._check_of(it, f"the loss `{name}`") for name, it in self._losses.items()}

    def _check_of(self, loss: Callable[..., Any], named: str) -> LossCheck:
        of_rows = loss if self._weight is None else _of_rows(loss)
        return LossCheck(of_rows, self._reduction, self.min_records, named)

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

    def gradient(self, parameters: Mapping[str, Any], batch: Batch, key: Any) -> Tuple[Sum, Dict[str, np.ndarray]]:
        try:
            return self._gradient(parameters, batch, key.seed)
        except _TakesNumbers:
            # From the start: nothing may depend on what was computed in vain.
            return self._gradient(parameters, batch, key.seed)

    def _gradient(self, parameters: Mapping[str, Any], batch: Batch, seed: int) -> Tuple[Sum, Dict[str, np.ndarray]]:
        self._load(parameters)
        seed_all(seed)
        for layer, training in self._modes.items():
            layer.training = training
        for parameter in self._trained.values():
            parameter.grad = None
        inputs, label = self._tensors(batch)
        output = self._output(inputs, 0, len(label))
        weights = self._weights(batch, label)
        sample = self._loss_check.sample(_with(output, weights), label)
        loss, weight = self._sum(output, label, weights)
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
        return (loss_sum, weight) if self._reduction == "weighted" else loss_sum, gradients

    def evaluate(self, parameters: Mapping[str, Any], batch: Batch) -> Sums:
        try:
            return self._evaluate(parameters, batch)
        except _TakesNumbers:
            return self._evaluate(parameters, batch)

    def _evaluate(self, parameters: Mapping[str, Any], batch: Batch) -> Sums:
        self._load(parameters)
        seed_all(0)
        self.module.eval()
        inputs, label = self._tensors(batch)
        weights = self._weights(batch, label)
        sums = {name: (0.0, 0.0) for name in ["loss", *self._metrics, *self._losses]}
        ranked: Dict[str, List[Ranked]] = {}

        def add(name: str, found: Tuple[float, float]) -> None:
            sums[name] = (sums[name][0] + found[0], sums[name][1] + found[1])

        with torch.no_grad():
            # A task may have many more records than a micro-batch.
            for start in range(0, len(label), _EVALUATED):
                part = label[start : start + _EVALUATED]
                output = self._output(inputs, start, start + len(part))
                own = None if weights is None else weights[start : start + len(part)]
                checks = [self._loss_check, *self._further_checks.values()]
                samples = [check.sample(_with(output, own), part) for check in checks]
                loss, weight = self._sum(output, part, own)
                add("loss", (loss.item(), weight))
                for name, metric in self._metrics.items():
                    value = metric(output, part)
                    if isinstance(value, Ranked):
                        ranked.setdefault(name, []).append(self._ranked(name, value, own))
                    else:
                        add(name, self._metric_sum(value, output, part, own))
                for name, further in self._losses.items():
                    loss, weight = self._reduced(_called(further, own)(output, part), len(part), name)
                    add(name, (loss.item(), weight))
                for check, sample in zip(checks, samples):
                    check.check(sample, functools.partial(self._output_from, inputs, start))
        self._check_buffers()
        # One number where each record counts once.
        counts_once = self._reduction != "weighted"
        found: Dict[str, Any] = {
            name: it[0] if counts_once and it[1] == len(label) else it for name, it in sums.items()
        }
        found.update({name: _joined(parts) for name, parts in ranked.items()})
        if not self.further_metrics:
            return found["loss"], found[self.metric_name]
        return found["loss"], found[self.metric_name], {name: found[name] for name in self.further_metrics}

    def fixed(self) -> Optional[bytes]:
        found = self._untrained
        if not found.tensors and not found.aliases:
            return None
        # This may run while another thread computes, which replaces buffers.
        kept = {name: raw(self._as_built.get(name, it)) for name, it in found.tensors.items()}
        metadata = {"aliases": json.dumps(dict(sorted(found.aliases.items())))} if found.aliases else {}
        return encode(kept, metadata)

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

    def _ranked(self, name: str, ranked: Ranked, weights: Optional[torch.Tensor]) -> Ranked:
        """Returns ranked records in arrays, with the weights that they have."""
        if name == self.metric_name:
            raise InvalidError(f"`{name}`, the first metric, ranks records; name a mean over records before it")
        given = (ranked.scores, ranked.positive, weights if ranked.weights is None else ranked.weights)
        return Ranked(*(it.detach().cpu().float().numpy() if isinstance(it, torch.Tensor) else it for it in given))

    @staticmethod
    def _metric_sum(
        values: Any, output: Any, label: torch.Tensor, weights: Optional[torch.Tensor]
    ) -> Tuple[float, float]:
        """Returns the sum of a metric, which has one value or a pair of sum and weight for each record, and its weight.

        Of another shape it compares records with each other: an output of records × 1 and as many labels make
        records × records.
        """
        records = len(label)
        if isinstance(values, tuple) and len(values) == 2:
            (total, _), (weight, _) = (Model._metric_sum(it, output, label, weights) for it in values)
            return total, weight
        shape = tuple(getattr(values, "shape", ()))
        if shape == (records,):
            if weights is not None:
                return float((values * weights).sum().item()), float(weights.sum().item())
            return float(values.sum().item()), float(records)
        found = f"a {type(values).__name__}" if not hasattr(values, "shape") else f"the shape {list(shape)}"
        remedy = "for the area under a curve, `steadfast.torch.auc` or `steadfast.Ranked`"
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

    def transform_function(self) -> Callable[[Batch, Optional[Any]], Batch]:
        return self.transform if self._transform is None else self._transform

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

    def _weights(self, batch: Batch, label: torch.Tensor) -> Optional[torch.Tensor]:
        """Returns what each record counts, if a column says it."""
        if self._weight is None:
            # Another loss than a weighted one is refused by the trainer.
            if self._reduction == "weighted" and "weight" in batch and "weight" not in [*self._inputs, self._target]:
                raise InvalidError(
                    "the batch has a column `weight`, such as that of `dataset.weight`, which the loss does not get; "
                    'pass `weight="weight"` to the model and take the values as third argument, or remove the column'
                )
            return None
        weights = _tensor(self._weight, _column(batch, self._weight), self.device)
        if not isinstance(weights, torch.Tensor) or weights.shape != (len(label),):
            raise InvalidError(f"the column `{self._weight}` has no number for each record, as weights are")
        weights = weights.to(torch.float32)
        if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise InvalidError(f"the column `{self._weight}` has a weight that is not a finite number from 0 on")
        return weights

    def _sum(self, output: Any, label: torch.Tensor, weights: Optional[torch.Tensor]) -> Tuple[torch.Tensor, float]:
        """Returns the sum of the losses, and what it is over."""
        called = _called(self._loss, weights)
        try:
            loss = called(output, label)
        except Exception as error:
            refused = self._refused(called, output, label, error)
            if refused is None:
                raise
            raise refused from error
        return self._reduced(loss, len(label), "loss")

    def _reduced(self, loss: Any, records: int, name: str) -> Tuple[torch.Tensor, float]:
        """Returns the sum of the losses that a loss function returned, and what it is over."""
        which = "the loss" if name == "loss" else f"the loss `{name}`"
        weight = float(records)
        if self._reduction == "weighted":
            if not isinstance(loss, tuple) or len(loss) != 2:
                found = f"the shape {list(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
                raise InvalidError(f"{which} is {found}; return a pair, the sum of what counts and its weight")
            loss, weight = loss[0], float(loss[1])
        elif isinstance(loss, tuple):
            raise InvalidError(f'{which} is a pair; pass `reduction="weighted"` for a sum and its weight')
        if loss.dim() != 0:
            raise InvalidError(f"{which} has the shape {list(loss.shape)}; return one number, the mean or the sum")
        return loss if self._reduction in ("sum", "weighted") else loss * records, weight

    def _refused(self, loss: Any, output: Any, label: torch.Tensor, error: Exception) -> Optional[Exception]:
        """Returns what is wrong with a loss that raised an error."""
        is_open = self._label is None and label.dtype == torch.int64
        if is_open and computes(loss, output, label.to(torch.float32)):
            self._takes_numbers = True
            return _TakesNumbers()
        takes_classes = self._label is None and label.is_floating_point() and not self._takes_numbers
        if takes_classes and computes(loss, output, label.to(torch.int64)):
            return InvalidError(
                f"the target `{self._target}` has fractions, and the loss takes whole numbers, the classes; "
                "correct the target, or take a loss of numbers"
            )
        return explained(loss, output, label, error)


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
    ``buffers="constant"`` the buffers too, are copied if they are there, as they are in model files; else they stay as
    the module was built. Rows of embedding tables are not loaded. If something does not fit, the module is as it was.

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
    beside = untrained(module, expected)
    given = {name: it for name, it in _given(parameters).items() if name in expected or name not in beside.aliases}
    found = misfits(expected, beside.tensors, given)
    if found:
        hint = ""
        if buffers == "mean" and kept and not any(name in given for name in kept):
            hint = ' (pass `buffers="constant"` if the job has no buffers, since training does not change them)'
        raise InvalidError(f"the parameters do not fit the module: {'; '.join(found)}{hint}")
    with torch.no_grad():
        for name, tensor in {**beside.tensors, **expected}.items():
            if name in given:
                tensor.copy_(given[name])


def optimizer_state(
    source: Union[Run, str, "os.PathLike[str]"], module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Dict[str, Any]:
    """Returns the state of a job's optimizer as ``optimizer.load_state_dict`` takes it.

    ::

        run.export("model.safetensors", optimizer="optimizer.safetensors")
        steadfast.torch.load(net, "model.safetensors")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
        optimizer.load_state_dict(steadfast.torch.optimizer_state("optimizer.safetensors", net, optimizer))

    PyTorch then trains on with the numbers of the job, but for the rounding of floats: with SGD, Adam, AdamW, Adagrad,
    RMSprop, NAdam, RAdam and Adadelta. The settings of the groups, such as the learning rate, are those of
    ``optimizer``.

    Args:
        source: A job, or the path of a file that ``steadfast checkpoint export --optimizer`` has written. Of a job it
            is the state in the latest checkpoint; while it runs, export model and state together.
        module: Has the names and shapes of the one that was trained.
        optimizer: Made from the parameters of ``module``.

    Raises:
        InvalidError: The state is that of another optimizer or module; says what differs.
        SteadfastError: There is no checkpoint, or it cannot be read.
        OSError: The file cannot be read.
    """
    check_wrappers(module)
    if not isinstance(source, Run):
        return _optimizer.state_dict(source, module, optimizer)
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "optimizer.safetensors")
        source.export(os.path.join(directory, "model.safetensors"), optimizer=file, checkpoint="latest")
        return _optimizer.state_dict(file, module, optimizer)


def save_optimizer_state(
    path: Union[str, "os.PathLike[str]"], module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Writes the state of one of PyTorch's optimizers as a file for ``start.optimizer`` of a job file.

    ::

        state = {name: it.clone() for name, it in net.state_dict().items()}
        safetensors.torch.save_file(state, "model.safetensors")
        steadfast.torch.save_optimizer_state("optimizer.safetensors", net, optimizer)

    A job with ``[start] file = "model.safetensors"`` and ``optimizer = "optimizer.safetensors"`` then trains on with
    the numbers of PyTorch, but for the rounding of floats. Its settings are those of the job file. The copies are for
    tied parameters: ``save_file`` refuses tensors that share memory, and ``save_model`` keeps only one of their names,
    which may be another one than here.

    Raises:
        InvalidError: A job cannot continue this state; says why.
        OSError: The file cannot be written.
    """
    check_wrappers(module)
    content = _optimizer.encoded(module, optimizer)
    with open(path, "wb") as file:
        file.write(content)


def _given(parameters: Union[Mapping[str, Any], str, "os.PathLike[str]"]) -> Dict[str, torch.Tensor]:
    if isinstance(parameters, (str, os.PathLike)):
        return tensors(read(parameters)[0])
    # A copy of arrays that are read-only, about which PyTorch would warn.
    return {
        name: it if isinstance(it, torch.Tensor) else torch.from_numpy(np.array(it)) for name, it in parameters.items()
    }


def _called(loss: Callable[..., Any], weights: Optional[torch.Tensor]) -> Callable[[Any, torch.Tensor], Any]:
    """Returns a loss of output and label."""
    return loss if weights is None else lambda output, label: loss(output, label, weights)


def _with(output: Any, weights: Optional[torch.Tensor]) -> Any:
    """Returns an output with the weights of its records, as :func:`_of_rows` takes it."""
    return output if weights is None else (output, weights)


def _of_rows(loss: Callable[..., Any]) -> Callable[[Any, torch.Tensor], Any]:
    return lambda rows, label: loss(rows[0], label, rows[1])


def _joined(parts: List[Ranked]) -> Ranked:
    """Returns the records of all parts."""
    if len(parts) == 1:
        return parts[0]
    columns = ([np.asarray(getattr(it, name)) for it in parts] for name in ("scores", "positive"))
    scores, positive = (np.concatenate(column) for column in columns)
    weights = None if parts[0].weights is None else np.concatenate([np.asarray(it.weights) for it in parts])
    return Ranked(scores, positive, weights)


def _check_names(metrics: Sequence[str], losses: Sequence[str]) -> None:
    """Checks that the names of metrics and further losses differ, also from that of the loss."""
    for name in [*metrics, *losses]:
        if not isinstance(name, str) or not name:
            raise InvalidError(f"a metric is named {name!r}; names are text")
        if name == "loss":
            raise InvalidError("a metric or a further loss is named `loss`, as that of the job is; rename it")
        if name in metrics and name in losses:
            raise InvalidError(f"`metrics` and `losses` both have `{name}`; give each a name of its own")
    check_further(next(iter(metrics), "loss"), [*metrics[1:], *losses])


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


def deterministic(threads: int) -> None:
    """Lets operations give the same bits each time, with so many threads."""
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
