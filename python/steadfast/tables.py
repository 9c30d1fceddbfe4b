"""Embedding tables of models: parameters with a row for each 64-bit id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from ._native import category_ids as _category_ids
from .errors import InvalidError

if TYPE_CHECKING:
    from .model import Batch, Model

__all__ = ["Rows", "Table", "category_ids"]


@dataclass(frozen=True)
class Table:
    """An embedding table: a parameter with a row for each id that training has met.

    Args:
        dim: Values of each row, from 1 to 4096.
        initial: The values of a row before its first update: ``"zeros"``, ``("normal", deviation)`` or
            ``("uniform", bound)``. They depend on the job's seed, the table and the id alone.

    Raises:
        InvalidError: A value is invalid.
    """

    dim: int
    initial: Union[str, Tuple[str, float]] = ("normal", 0.01)

    def __post_init__(self) -> None:
        # Integers of numpy are welcome.
        is_integer = isinstance(self.dim, (int, np.integer)) and not isinstance(self.dim, bool)
        if not is_integer or not 1 <= self.dim <= 4096:
            raise InvalidError(f"`dim` is {self.dim!r}; rows have 1 to 4096 values")
        object.__setattr__(self, "dim", int(self.dim))
        initial: Any = ("zeros", 0.0) if self.initial == "zeros" else self.initial
        is_known = isinstance(initial, tuple) and len(initial) == 2
        if not is_known or initial[0] not in ("zeros", "normal", "uniform") or not 0 <= initial[1] < 1e30:
            raise InvalidError(
                f'`initial` is {self.initial!r}; use "zeros", ("normal", deviation) or ("uniform", bound)'
            )
        object.__setattr__(self, "initial", (initial[0], float(initial[1])))


class Rows(NamedTuple):
    """The rows of a table that a batch needs."""

    ids: np.ndarray
    """Their ids, ascending: uint64, one for each row."""
    values: np.ndarray
    """float32, rows x ``dim``. The gradient of the table has this shape."""
    places: np.ndarray
    """For each id that :meth:`steadfast.Model.ids` returned, in order, the index of its row: int64."""


def category_ids(column: str, values: Union[Sequence[Union[str, bytes]], np.ndarray]) -> np.ndarray:
    """Returns the ids of categories, as uint64: the 64-bit FNV-1a hash of the column's name, a zero byte and the value.

    The same text in two columns has two ids, so that columns can be in one table without sharing rows. To share them,
    hash with one name. The ids are those of ``dataset.categories``.

    Raises:
        TypeError: A value is neither text nor bytes.
    """
    return _category_ids(column, values)


def ids_of(model: "Model", batch: "Batch") -> List[np.ndarray]:
    """Returns the ids of each table of a model in a batch, as uint64."""
    found = model.ids(batch)
    tables = model.tables()
    unknown = [name for name in found if name not in tables]
    if unknown:
        raise InvalidError(f"`ids` returned ids of `{unknown[0]}`, which is not among the tables")
    return [as_ids(name, found.get(name, ())) for name in tables]


def as_ids(name: str, values: Any) -> np.ndarray:
    """Returns integers as ids; negative ones as the unsigned integers with the same bits."""
    # A `transform` may return tensors on any device.
    array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    if array.size == 0:
        return np.zeros(0, np.uint64)
    if array.dtype.kind not in "biu":
        raise InvalidError(
            f"ids of `{name}` are {array.dtype}; ids are integers: use `steadfast.category_ids` for text"
        )
    wide = np.int64 if array.dtype.kind == "i" else np.uint64
    return np.ascontiguousarray(array.reshape(-1).astype(wide)).view(np.uint64)
