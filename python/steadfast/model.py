"""The interface of models, for any framework."""

from __future__ import annotations

import abc
import hashlib
import json
import math
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .errors import InvalidError
from .randomness import seed_all
from .tables import Table

if TYPE_CHECKING:
    from ._native import Key

__all__ = ["Batch", "Model", "Ranked", "identity"]

SETTINGS = ("weight_decay", "learning_rate", "frozen")
"""What a model sets for parameters."""

CURVES = ("seconds", "step", "examples", "loss", "metric")
"""Columns of :meth:`steadfast.Run.curves` that every job has."""

Batch = Mapping[str, Any]
"""Columns by name.

With ``[dataset] features`` and ``label``: ``features`` (records x features, float32) and ``label`` (float32).

With ``[dataset] columns``, those: numbers as an array of one element for each record, lists of a fixed length
as a row for each record, text and bytes as an array of objects. Lists of any length are a pair of arrays: the
elements of all records, and the offsets at which each record begins; the last offset is the number of elements
(``torch.nn.EmbeddingBag`` takes both with ``include_last_offset=True``).
"""


@dataclass(frozen=True)
class Ranked:
    """What a further metric has in place of a sum if it is the area under the ROC curve.

    That is the probability that a positive record has a larger score than a negative one, over all held-out records.
    Scores are rounded down to bfloat16 for it, and ties count half.
    """

    scores: Any
    """A number for each record: the larger it is, the more likely the record is positive."""

    positive: Any
    """For each record, whether it is positive: booleans, or 0 and 1."""

    weights: Optional[Any] = None
    """What each record counts; 1 by default."""


class Model(abc.ABC):
    """A differentiable model with a loss.

    The same arguments must give the same bits: take random numbers from the global states, which are seeded for
    each gradient, or from a generator that is seeded with ``key.seed``, and keep no state between calls. Arrays of
    parameters are read-only, and float32.
    """

    rebuild: Optional[Callable[[int], "Model"]] = None
    """Builds the model once more, with all random states seeded; set when the job file names its entry."""

    metric_name = "metric"
    """Name of the metric that :meth:`evaluate` sums, such as ``accuracy``; the job shows its mean."""

    further_metrics: Sequence[str] = ()
    """Names of the further metrics that :meth:`evaluate` sums; the job shows the mean of each."""

    workers = 0
    """Processes in which :meth:`transform` runs ahead of the computation; with 0, the default, it runs before it. The
    bits are the same. What :meth:`transform_function` returns must be picklable: a function at the top of a module is,
    and the method of a model whose attributes are."""

    threads = 1
    """Threads of one operation of PyTorch, in the trainer and in :attr:`workers`."""

    min_records = 1
    """The fewest records of which :meth:`gradient` computes a gradient. A job whose last micro-batches have fewer is
    refused, with what to set in its job file (``model.min_records``)."""

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Sequence[int]]:
        """Returns the shapes of the parameters by name, in the same order in every process."""

    def averaged(self) -> Collection[str]:
        """Returns the names of parameters that are averaged over the records, and not trained.

        Such are the running statistics of a normalization. In place of its gradient, :meth:`gradient`
        returns the change of the value times the number of records; the mean over all records is added.
        """
        return ()

    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns settings of the optimizer for parameters by name: ``weight_decay`` in place of that of the job,
        ``learning_rate``, a factor of that of the job, or ``frozen``. Others have the settings of the job."""
        return {}

    def tables(self) -> Mapping[str, Table]:
        """Returns the embedding tables by name, in the same order in every process.

        A table takes no memory for rows that training never met. In ``parameters`` it is a :class:`steadfast.Rows`
        with the rows that :meth:`ids` names; its gradient has the shape of their values.
        """
        return {}

    def ids(self, batch: Batch) -> Mapping[str, Any]:
        """Returns the ids that a batch needs, by table: integers, in any order, and as often as they occur.

        The batch is what :meth:`transform` returned. The rows are fetched before the computation.
        """
        return {}

    def transform(self, batch: Batch, key: Optional["Key"]) -> Batch:
        """Returns the batch to compute with: tokenizes, decodes, or augments. The default returns it as it is.

        Every column has as many records as before. It runs before the computation, and is part of it: random
        numbers come from the global states, which are seeded before, or from a generator that is seeded with
        ``key.seed``. Without a key, the records are evaluated. For a model with tables it runs twice for each
        batch: for its ids, and for its gradient.
        """
        return batch

    def transform_function(self) -> Callable[[Batch, Optional["Key"]], Batch]:
        """Returns what the processes of :attr:`workers` transform with. The default is :meth:`transform`."""
        return self.transform

    def fixed(self) -> Optional[bytes]:
        """Returns the tensors that the model has beside its parameters, and that training does not change, as a
        safetensors file: they become a part of each file of the model. ``None``, as the default, without any.

        The entry ``aliases`` of its metadata, a JSON object, gives parameters and tensors further names. The bytes are
        the same in all trainers.
        """
        return None

    @abc.abstractmethod
    def initialize(self, seed: int) -> Mapping[str, np.ndarray]:
        """Returns initial values by name. A parameter that is missing starts at zero."""

    @abc.abstractmethod
    def gradient(
        self, parameters: Mapping[str, Any], batch: Batch, key: "Key"
    ) -> Tuple["Sum", Mapping[str, Optional[Any]]]:
        """Returns the *sum* of the records' losses, and its gradient by name (``None`` for zero).

        A pair in place of the sum is the sum and what the records count together, such as the number of tokens that
        are not padding: the mean gradient of a step is the sum of all gradients divided by all that counts. A model
        returns a pair always or never.
        """

    @abc.abstractmethod
    def evaluate(self, parameters: Mapping[str, Any], batch: Batch) -> "Sums":
        """Returns the sums of loss and metric over the records, two numbers, without random numbers.

        With :attr:`further_metrics`, a dict with the sum of each follows, or its :class:`Ranked` scores. A pair in place of a sum is a sum and the
        weight of what it is over, such as the number of tokens that are not padding: the job divides by that in place
        of the number of records.

        The sum of a comparison of arrays whose shapes differ, such as records × 1 and records, is that of each
        record with each: nothing notices it.
        """

    def numerics(self) -> str:
        """Returns a text that is the same on all machines on which this model computes the same bits.

        The default hashes a fixed NumPy computation. A model of another library adds to it.
        """
        return f"numpy {np.__version__} {_numpy_digest()[:16]} on {platform.machine()}"


def transformed(model: Model, batch: Batch, key: Optional["Key"], records: int) -> Batch:
    """Returns what the model's ``transform`` makes of a batch, with all random states seeded before."""
    seed_all(transform_seed(key))
    return checked(model.transform(batch, key), records)


def transform_seed(key: Optional["Key"]) -> int:
    """Returns the seed of a transform, whose random numbers are others than those of the computation after it."""
    return 0 if key is None else (key.seed ^ 0x5DEECE66D) & (2**63 - 1)


def checked(found: Any, records: int) -> Batch:
    """Returns what a ``transform`` has made of so many records.

    Raises:
        InvalidError: It has not as many records.
    """
    if not isinstance(found, Mapping):
        raise InvalidError(f"`transform` returned a {type(found).__name__}; return a dict of columns")
    for name, column in found.items():
        count = records_of(column)
        if count not in (None, records):
            raise InvalidError(
                f"`transform` returned {count} values of `{name}` for {records} records; return one for each"
                " (a column of lists is a pair of values and offsets, with the last offset)"
            )
    return found


def evaluated(model: Model, parameters: Mapping[str, Any], batch: Batch, records: int) -> List[Tuple[Any, ...]]:
    """Returns the sums that a model's ``evaluate`` returns for so many records, each with its weight.

    They are those of the loss, of the metric, and of the further metrics in their order; of ranked records their scores,
    labels and weights.
    """
    found: Any = model.evaluate(parameters, batch)
    further = further_metrics(model)
    if not isinstance(found, (tuple, list)) or len(found) != (3 if further else 2):
        wanted = "two numbers, the sums of loss and metric"
        if further:
            wanted += f", and a dict with those of {', '.join(further)}"
        raise InvalidError(f"`evaluate` returned a {type(found).__name__}; return {wanted}")
    sums: List[Tuple[Any, ...]] = [
        weighted_sum("loss", found[0], records),
        weighted_sum(model.metric_name, found[1], records),
    ]
    if not further:
        return sums
    given = found[2]
    if not isinstance(given, Mapping) or set(given) != set(further):
        have = ", ".join(map(str, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise InvalidError(f"`evaluate` returned the further metrics {have}; the model names {', '.join(further)}")
    for name in further:
        value = given[name]
        sums.append(_ranks(name, value) if isinstance(value, Ranked) else weighted_sum(name, value, records))
    return sums


def _ranks(name: str, ranked: Ranked) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the scores, labels and weights of ranked records."""
    scores = np.asarray(ranked.scores, dtype=np.float32)
    labels = np.asarray(ranked.positive)
    weights = np.ones(scores.shape) if ranked.weights is None else np.asarray(ranked.weights, dtype=np.float64)
    if scores.ndim != 1 or labels.shape != scores.shape or weights.shape != scores.shape:
        raise InvalidError(
            f"`{name}` ranks records by scores of the shape {list(scores.shape)}, with labels of the shape "
            f"{list(labels.shape)} and weights of the shape {list(weights.shape)}; give each one number for each record"
        )
    if np.isnan(scores).any():
        raise InvalidError(f"`{name}` has a score that is no number")
    if not np.isin(labels, (0, 1)).all():
        raise InvalidError(
            f"`{name}` has a label that is neither 0 nor 1; say which records are positive, as `label == 3`"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise InvalidError(f"`{name}` has weights that are not finite, or negative")
    return scores, labels.astype(bool), weights


def further_metrics(model: Model) -> List[str]:
    """Returns the names of a model's further metrics.

    Raises:
        InvalidError: They are not names that differ from each other and from the columns of curves.
    """
    names = model.further_metrics
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidError("`further_metrics` of the model is not a list of names")
    check_further(model.metric_name, list(names))
    return list(names)


def check_further(metric: str, further: Sequence[str]) -> None:
    """Checks that each further metric has a name of its own, beside the metric of the job and the columns of curves."""
    for at, name in enumerate(further):
        if name in CURVES:
            raise InvalidError(f"a further metric or loss is named `{name}`, as a column of curves is; rename it")
        if name == metric or name in further[:at]:
            raise InvalidError(f"two metrics or losses are named `{name}`; give each a name of its own")


def settings_of(model: Model) -> Dict[str, Dict[str, Any]]:
    """Returns the settings of the optimizer that a model gives its parameters.

    Raises:
        InvalidError: They are not settings, or not of trained parameters.
    """
    given = model.settings()
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise InvalidError("`settings` of the model must return a dict with a dict for each parameter")
    averaged, tables = set(model.averaged()), set(model.tables())
    known = [name for name in model.parameters() if name not in averaged and name not in tables]
    return {name: _settings(name, own, known, averaged, tables) for name, own in given.items()}


def _settings(
    name: str, own: Mapping[str, Any], known: List[str], averaged: Collection[str], tables: Collection[str]
) -> Dict[str, Any]:
    if name in averaged:
        raise InvalidError(f"`settings` of the model has `{name}`, which is averaged and not trained; remove it")
    if name in tables:
        raise InvalidError(f"`settings` of the model has the table `{name}`; use `[tables]` of the job file")
    if name not in known:
        raise InvalidError(f"`settings` of the model has `{name}`, which it does not train; it has {', '.join(known)}")
    where = f"`{name}` in `settings` of the model"
    unknown = [key for key in own if key not in SETTINGS]
    if unknown:
        raise InvalidError(f"{where} sets `{unknown[0]}`; use {', '.join(SETTINGS)}")
    if not isinstance(own.get("frozen", False), bool):
        raise InvalidError(f"{where} has `frozen` = {own['frozen']!r}; use True or False")
    numbers = {key: setting(where, key, value) for key, value in own.items() if key != "frozen"}
    if not own.get("frozen"):
        return numbers
    if numbers:
        raise InvalidError(f"`{next(iter(numbers))}` does not apply to {where}, which is frozen; remove it")
    return {"frozen": True}


def setting(where: str, key: str, value: Any) -> float:
    """Returns a number that a model sets for a parameter."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidError(f"{where} has `{key}` = {value!r}; use a number") from None
    if not math.isfinite(number) or number < 0:
        raise InvalidError(f"{where} has `{key}` = {number}; it must be finite and at least 0")
    return number


def weighted_sum(name: str, value: Any, records: int) -> Tuple[float, float]:
    """Returns a sum over so many records and its weight: the number of records, unless a pair says another one."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return as_sum(name, value, records), float(records)
    total, weight = as_sum(name, value[0], records), as_sum(f"weights of the {name}", value[1], records)
    if not (np.isfinite(weight) and weight >= 0):
        raise InvalidError(
            f"the weight of the {name} of {records} records is {weight}; weights are finite and not negative"
        )
    return total, weight


def as_sum(name: str, value: Any, records: int) -> float:
    """Returns a sum over so many records as a number; refuses values that were not added."""
    shape = tuple(getattr(value, "shape", ()))
    if shape != ():
        raise InvalidError(
            f"the sum of the {name} of {records} records has the shape {list(shape)}; return one number, the sum "
            "over the records"
        )
    return float(value)


Sum = Union[float, Tuple[float, float]]
"""A sum over the records of a batch, or a sum and the weight of what it is over."""

Sums = Union[Tuple[Sum, Sum], Tuple[Sum, Sum, Mapping[str, Union[Sum, Ranked]]]]
"""The sums of loss and metric, and those of further metrics by name."""


def records_of(column: Any) -> Optional[int]:
    """Returns the number of records of a column; ``None`` of what is not a column."""
    if isinstance(column, tuple) and len(column) == 2:
        return len(column[1]) - 1
    try:
        return len(column)
    except TypeError:
        return None


def identity(model: Model) -> str:
    """Returns a text that is the same in all trainers that compute the same bits with the same parameters."""
    averaged = set(model.averaged())
    described = [(name, [int(side) for side in shape], name in averaged) for name, shape in model.parameters().items()]
    tables = [(name, table.dim, table.initial) for name, table in model.tables().items()]
    settings = [(name, sorted(own.items())) for name, own in sorted(settings_of(model).items())]
    digest = hashlib.sha256(json.dumps([*described, *tables, *settings]).encode()).hexdigest()
    return f"{model.numerics()}; parameters {digest[:16]}"


def _numpy_digest() -> str:
    digest = hashlib.sha256()
    # The last one is large enough to be divided among threads.
    for rows, inner, columns in ((3, 64, 5), (16, 784, 33), (130, 17, 9), (301, 517, 259)):
        left = _ramp(rows * inner).reshape(rows, inner)
        right = _ramp(inner * columns).reshape(inner, columns)
        product = left @ right
        digest.update(product.tobytes())
        digest.update(np.exp(product).tobytes())
        digest.update(np.tanh(product).sum(axis=0).tobytes())
    return digest.hexdigest()


def _ramp(count: int) -> np.ndarray:
    """Fixed numbers from -1 to 1 in an order without a pattern."""
    return (np.arange(count, dtype=np.int64) * 7919 % 1009).astype(np.float32) / 504.5 - 1
