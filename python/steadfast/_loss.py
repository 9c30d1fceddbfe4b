"""Losses of PyTorch: whether they are what their model says, found by computing them."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional

import torch

from .errors import InvalidError

__all__ = ["LossCheck", "check_reduction", "explained"]

_RECORDS_MAX = 16
"""Records of a micro-batch whose losses are computed one by one."""

_EVERY = 64
"""The first micro-batches, as many as this, are all checked; later ones once in as many."""

_TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""What two sums of losses may differ by, relative to the losses: by far less than what is wrong with a loss."""

_TOLERANCE = 1e-3

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class LossCheck:
    """Checks that the loss of several records is the mean, or the sum, of their losses.

    It computes the loss of some records together and one by one, from the outputs of one call of the module: what
    the module itself shares between records, as BatchNorm does, and dropout make no difference.

    Not checked are outputs without one row for each record, and losses that draw random numbers. Micro-batches of one
    record pass.
    """

    def __init__(self, loss: Loss, reduction: str) -> None:
        self._loss = loss
        self._reduction = reduction
        self._seen = 0

    def __call__(self, output: Any, label: torch.Tensor) -> None:
        """Checks a micro-batch, unless enough were checked.

        Raises:
            InvalidError: The loss is not what the model says.
        """
        self._seen += 1
        if self._reduction == "coupled" or (self._seen > _EVERY and self._seen % _EVERY):
            return
        devices = [label.device] if label.device.type == "cuda" else []
        # The computation goes on as if nothing had been drawn here.
        with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            self._check(output, label, raised)

    def _check(self, output: Any, label: torch.Tensor, raised: List[warnings.WarningMessage]) -> None:
        records = len(label)
        count = min(records, _RECORDS_MAX)
        try:
            some, labels = _rows(output, 0, count, records), label[:count]
            whole = self._loss(some, labels)
            is_random = not torch.equal(whole, self._loss(some, labels))
        except Exception:
            # Such as one that takes the gradient of something.
            return
        if count < 2 or is_random or not torch.isfinite(whole):
            return
        parts = [self._of_one(some, labels, at) for at in range(count)]
        total = sum(parts)
        told = whole.item() * (count if self._reduction == "mean" else 1)
        tolerance = _TOLERANCES.get(whole.dtype, _TOLERANCE) * sum(map(abs, parts))
        if not abs(told - total) <= tolerance + 1e-6:
            if any("Using a target size" in str(it.message) for it in raised):
                raise InvalidError(_broadcast(some, labels))
            found = f"the loss of {count} records is {whole.item():.6g}, and the losses of each of them "
            found += f"add up to {total:.6g}: it is not their {self._reduction}"
            raise InvalidError(f"{found}; {self._remedy(whole.item(), total, tolerance, some, labels)}")

    def _of_one(self, output: Any, label: torch.Tensor, at: int) -> float:
        try:
            loss = self._loss(_rows(output, at, at + 1, len(label)), label[at : at + 1])
        except Exception as error:
            raise InvalidError(
                f"the loss of several records can be computed, that of one alone cannot: {error}; the last "
                "micro-batch of a pass may have one record (`squeeze` needs the number of a dimension), "
                'and a loss that compares records with each other needs `reduction="coupled"`'
            ) from error
        if loss.dim() != 0:
            raise InvalidError(
                f"the loss of one record has the shape {list(loss.shape)}, that of several is a number; return "
                "one number, the mean or the sum"
            )
        return float(loss.item())

    def _remedy(
        self, whole: float, total: float, tolerance: float, output: Any, label: torch.Tensor
    ) -> str:
        if self._reduction == "mean" and abs(whole - total) <= tolerance:
            return 'pass `reduction="sum"` to the model, or return the mean'
        if self._reduction == "sum" and abs(whole * len(label) - total) <= tolerance:
            return 'pass `reduction="mean"` to the model, or return the sum'
        is_tensor = isinstance(output, torch.Tensor)
        if is_tensor and output.shape != label.shape and output.numel() == label.numel():
            return _broadcast(output, label)
        return (
            'with class weights, `ignore_index` or padding use `reduction="sum"` in the loss and here; a loss '
            'that compares records with each other, as contrastive losses do, needs `reduction="coupled"`'
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
    if own in ("mean", "sum") and own != reduction:
        raise InvalidError(
            f'`{name}` has `reduction="{own}"`, the model `reduction="{reduction}"`; pass the same to both'
        )
    if reduction == "mean" and isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        if loss.weight is not None or loss.ignore_index != -100:
            raise InvalidError(
                "the mean of a loss with class weights or `ignore_index` is not the mean over the "
                'records; use `reduction="sum"` in the loss and here'
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
            parts = [(_rows(output, at, at + 1, len(label)), label[at : at + 1]) for at in range(len(label))]
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


def _rows(value: Any, start: int, end: int, records: int) -> Any:
    """Returns some records of an output."""
    if isinstance(value, torch.Tensor) and value.shape[:1] == (records,):
        return value.detach()[start:end]
    if type(value) in (tuple, list):
        return type(value)(_rows(it, start, end, records) for it in value)
    if type(value) is dict:
        return {key: _rows(it, start, end, records) for key, it in value.items()}
    raise _NotRows


def _broadcast(output: torch.Tensor, label: torch.Tensor) -> str:
    return (
        f"the output has the shape {list(output.shape)}, the labels {list(label.shape)}: the loss "
        "compares each with each; add `torch.nn.Flatten(0)` to the module"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
