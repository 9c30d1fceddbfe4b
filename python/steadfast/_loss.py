"""Losses of PyTorch: whether they are what their model says, found by computing them."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, NamedTuple, Optional

import torch

from .errors import InvalidError
from .randomness import random_states, restored_states

__all__ = ["LossCheck", "check_reduction", "explained"]

_RECORDS_MAX = 16
"""Records of a micro-batch whose losses are computed in parts."""

_EVERY = 64
"""The first micro-batches, as many as this, are all checked; later ones once in as many."""

_TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""What two sums of losses may differ by, relative to the losses: by far less than what is wrong with a loss."""

_TOLERANCE = 1e-3

Loss = Callable[[Any, torch.Tensor], Any]


class Sample(NamedTuple):
    """Outputs and labels of some records of a micro-batch, copied before its loss is computed."""

    output: Any
    label: torch.Tensor
    records: int
    """Number of records of the micro-batch."""


class LossCheck:
    """Checks that the loss of several records is the mean, or the sum, of their losses.

    Of a loss with weights both are checked, the sum and the weight.

    It computes the loss of some records together and of every ``min_records`` of them that follow each other, from the
    outputs of one call of the module: what the module itself shares between records, as BatchNorm does, and dropout
    make no difference. Each record is in as many of these parts, so their sums add up to a multiple of the whole sum.

    Not checked are outputs without one row for each record, losses that draw random numbers, and micro-batches of no
    more than ``min_records`` records.
    """

    def __init__(self, loss: Loss, reduction: str, min_records: int = 1, named: str = "the loss") -> None:
        self._loss = loss
        self._named = named
        self._reduction = reduction
        self._part = min_records
        self._seen = 0
        # Whether an output was found to have no row for each record: then the loss cannot be checked.
        self._is_shared = False

    def sample(self, output: Any, label: torch.Tensor) -> Optional[Sample]:
        """Returns what :meth:`check` needs of a micro-batch, before its loss may change it.

        Returns ``None`` if enough micro-batches were checked, or this one cannot be checked.
        """
        self._seen += 1
        if self._reduction == "coupled" or (self._seen > _EVERY and self._seen % _EVERY):
            return None
        records = len(label)
        if self._is_shared or records <= self._part:
            return None
        index = torch.arange(min(records, max(_RECORDS_MAX, self._part + 1)), device=label.device)
        try:
            return Sample(_rows(output, index, records), _rows(label, index, records), records)
        except _NotRows:
            return None

    def check(self, sample: Optional[Sample], output_of: Optional[Callable[[int], Any]] = None) -> None:
        """Checks a micro-batch.

        Args:
            sample: Its records.
            output_of: Returns the output of the module for so many of its first records. It is called before a loss is
                refused: a dimension of the output may have the size of the micro-batch by chance.

        Raises:
            InvalidError: The loss is not what the model says.
        """
        if sample is None:
            return
        # The computation goes on as if nothing had been drawn here.
        with torch.no_grad(), restored_states(sample.label.device), warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            try:
                self._check(sample.output, sample.label, raised)
            except InvalidError:
                if output_of is None or _has_rows(sample, output_of):
                    raise
                self._is_shared = True

    def _check(self, output: Any, label: torch.Tensor, raised: List[warnings.WarningMessage]) -> None:
        count = len(label)
        every = torch.arange(count, device=label.device)
        before = random_states(label.device)
        try:
            whole = self._of(output, label, every)
            again = self._of(output, label, every)
            is_random = random_states(label.device) != before or not all(map(torch.equal, whole, again))
        except Exception:
            # Such as one that takes the gradient of something.
            return
        # A loss may draw without a difference in two computations.
        if is_random or not all(map(torch.isfinite, whole)):
            return
        # Around the end, so that each record is in as many parts.
        indexes = ((every[: self._part] + at) % count for at in range(count))
        parts = [self._of_part(output, label, index) for index in indexes]
        self._compare(whole[0], [it[0] for it in parts], output, label, raised)
        if self._reduction == "weighted":
            self._compare_weights(whole[1], [it[1] for it in parts])

    def _compare(
        self,
        whole: torch.Tensor,
        parts: List[float],
        output: Any,
        label: torch.Tensor,
        raised: List[warnings.WarningMessage],
    ) -> None:
        count = len(label)
        total = sum(parts) / self._part
        told = whole.item() * (count if self._reduction == "mean" else 1)
        tolerance = self._tolerance(whole, parts)
        if not abs(told - total) <= tolerance + 1e-6:
            if any("Using a target size" in str(it.message) for it in raised):
                raise InvalidError(_broadcast(output, label))
            found = f"{self._named} of {count} records is {whole.item():.6g}, and the losses of {self._each()} "
            found += (
                f"add up to {total:.6g}: it is not their {'sum' if self._reduction == 'weighted' else self._reduction}"
            )
            raise InvalidError(f"{found}; {self._remedy(whole.item(), total, tolerance, output, label)}")

    def _compare_weights(self, whole: torch.Tensor, parts: List[float]) -> None:
        total = sum(parts) / self._part
        if not abs(whole.item() - total) <= self._tolerance(whole, parts) + 1e-6:
            raise InvalidError(
                f"the weight of {self._named} of {len(parts)} records is {whole.item():.6g}, and the weights of "
                f"{self._each()} add up to {total:.6g}: it is not their sum; return what the records count, such as "
                "the number of their tokens, without a least value: a step of which nothing counts changes nothing"
            )

    def _each(self) -> str:
        return "each of them" if self._part == 1 else f"every {self._part} of them"

    def _tolerance(self, whole: torch.Tensor, parts: List[float]) -> float:
        return _TOLERANCES.get(whole.dtype, _TOLERANCE) * sum(map(abs, parts)) / self._part

    def _of(self, output: Any, label: torch.Tensor, index: torch.Tensor) -> List[torch.Tensor]:
        """Returns the loss of some records, which may change its copy of them, and its weight, if it has one."""
        loss = self._loss(_rows(output, index, len(label)), _rows(label, index, len(label)))
        if self._reduction != "weighted":
            return [loss]
        total, weight = loss
        is_tensor = isinstance(weight, torch.Tensor)
        return [total, weight.reshape(()) if is_tensor else torch.tensor(float(weight), dtype=torch.float64)]

    def _of_part(self, output: Any, label: torch.Tensor, index: torch.Tensor) -> List[float]:
        """Returns the sum of the losses of a part of the records, and its weight, if it has one."""
        named = "one record" if self._part == 1 else f"{self._part} records"
        try:
            loss, *weight = self._of(output, label, index)
        except Exception as error:
            raise InvalidError(
                f"{self._named} of several records can be computed, that of {named} cannot: {error}; the last "
                f"micro-batch of a pass may have {named} (`squeeze` needs the number of a dimension; "
                "`min_records=2` in the model excludes single ones), "
                'and a loss that compares records with each other needs `reduction="coupled"`'
            ) from error
        if loss.dim() != 0:
            raise InvalidError(
                f"{self._named} of {named} has the shape {list(loss.shape)}, that of several is a number; return "
                "one number, the mean or the sum"
            )
        return [float(loss.item()) * (self._part if self._reduction == "mean" else 1), *map(float, weight)]

    def _remedy(self, whole: float, total: float, tolerance: float, output: Any, label: torch.Tensor) -> str:
        if self._reduction == "weighted":
            return "return the sum of what counts and its weight, not a mean"
        if self._reduction == "mean" and abs(whole - total) <= tolerance:
            return 'pass `reduction="sum"` to the model, or return the mean'
        if self._reduction == "sum" and abs(whole * len(label) - total * self._part) <= tolerance * self._part:
            return 'pass `reduction="mean"` to the model, or return the sum'
        is_tensor = isinstance(output, torch.Tensor)
        if is_tensor and output.shape != label.shape and output.numel() == label.numel():
            return _broadcast(output, label)
        return (
            'with class weights, `ignore_index` or padding use `reduction="weighted"`, and return the sum and what it '
            "is over; a loss that compares records with each other, as contrastive losses do, needs "
            '`reduction="coupled"`'
        )


def check_reduction(loss: Any, reduction: str) -> None:
    """Checks what a loss of PyTorch says of itself.

    Raises:
        InvalidError: It returns something else than ``reduction``.
    """
    own = getattr(loss, "reduction", None)
    is_known = isinstance(loss, torch.nn.Module) and type(loss).__module__.startswith("torch.nn.")
    if not is_known or reduction == "coupled":
        return
    name = type(loss).__name__
    if reduction == "weighted":
        raise InvalidError(
            f'`{name}` returns one number; with `reduction="weighted"` the loss returns a pair, the sum of what counts '
            "and its weight: call it in a function of your own"
        )
    if own in ("mean", "sum") and own != reduction:
        raise InvalidError(
            f'`{name}` has `reduction="{own}"`, the model `reduction="{reduction}"`; pass the same to both'
        )
    if reduction == "mean" and isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        if loss.weight is not None or loss.ignore_index != -100:
            raise InvalidError(
                "the mean of a loss with class weights or `ignore_index` is not the mean over the "
                'records; use `reduction="weighted"`, and return the sum and what it is over'
            )


def explained(loss: Loss, output: Any, label: torch.Tensor, error: Exception) -> Optional[InvalidError]:
    """Returns what is wrong with the labels, if the loss cannot be computed because of them."""
    with torch.no_grad():
        other = torch.int64 if label.is_floating_point() else torch.float32
        if computes(loss, output, label.to(other)):
            return InvalidError(
                f"the loss does not take labels of {label.dtype}: {_first_line(error)}; pass `label={other}`"
            )
        try:
            indexes = torch.arange(len(label), device=label.device).split(1)  # type: ignore[no-untyped-call]
            parts = [(_rows(output, index, len(label)), label[index]) for index in indexes]
        except _NotRows:
            return None
        wrong = [at for at, part in enumerate(parts) if not computes(loss, *part)]
    if not wrong or len(wrong) == len(label) > 1:
        return None
    value = label[wrong[0]].tolist()
    classes = ""
    if isinstance(output, torch.Tensor) and output.dim() > 1 and not label.is_floating_point():
        classes = f"; the output has {output.shape[1]} classes, from 0 to {output.shape[1] - 1}: correct the "
        classes += "data, or give the module an output for each class"
    return InvalidError(
        f"the loss cannot be computed for record {wrong[0]} of a micro-batch of {len(label)}, whose label is "
        f"{value}: {_first_line(error)}{classes}"
    )


def computes(loss: Loss, output: Any, label: torch.Tensor) -> bool:
    """Whether a loss can be computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loss(output, label)
        except Exception:
            return False
    return True


class _NotRows(Exception):
    """An output does not have one row for each record."""


def _rows(value: Any, index: torch.Tensor, records: int) -> Any:
    """Returns a copy of some records of an output."""
    if isinstance(value, torch.Tensor) and value.shape[:1] == (records,):
        return value.detach()[index]
    if type(value) in (tuple, list):
        return type(value)(_rows(it, index, records) for it in value)
    if type(value) is dict:
        return {key: _rows(it, index, records) for key, it in value.items()}
    raise _NotRows


def _has_rows(sample: Sample, output_of: Callable[[int], Any]) -> bool:
    """Whether the rows of an output are records: then it has fewer for fewer records."""
    fewer = sample.records - 1
    try:
        output = output_of(fewer)
    except Exception:
        return True
    try:
        _rows(output, torch.arange(0, device=sample.label.device), fewer)
    except _NotRows:
        return False
    return True


def _broadcast(output: torch.Tensor, label: torch.Tensor) -> str:
    return (
        f"the output has the shape {list(output.shape)}, the labels {list(label.shape)}: the loss "
        "compares each with each; add `torch.nn.Flatten(0)` to the module"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
