"""Layers of PyTorch whose weights are embedding tables on the parameter servers."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from .errors import InvalidError
from .model import Batch
from .tables import Rows, Table, as_ids, category_ids

__all__ = ["Embedding", "EmbeddingBag", "Tables", "column_ids"]

_SIGN = -(2**63)
"""Flips the order of signed integers to that of unsigned ones with the same bits."""


class Embedding(torch.nn.Module):
    """Looks up rows of a table that lives on the parameter servers, however many rows it has.

    A layer of a module that :class:`steadfast.torch.Model` trains. The rows of a batch are fetched before the
    computation, so the layer says which columns its ids come from. Integers are ids as they are: the same integer in
    two columns is the same row. Text and bytes are hashed with the name of their column
    (:func:`steadfast.category_ids`): the same text in two columns is two rows. Rows are float32.

    Layers with the same name share a table.

    Args:
        name: Name of the table.
        dim: Values of each row.
        columns: The columns of the batch whose values are the ids that the layer is called with. By default the
            column with the name of the table.
        initial: Values of a row before its first update; see :class:`steadfast.Table`.

    Raises:
        InvalidError: A value is invalid.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        columns: Union[str, Sequence[str], None] = None,
        initial: Union[str, Tuple[str, float]] = ("normal", 0.01),
    ) -> None:
        super().__init__()
        self.name = name
        self.table = Table(dim, initial)
        self.columns = [columns] if isinstance(columns, str) else list(columns or [name])
        self._weight: Optional[torch.Tensor] = None
        self._keys: Optional[torch.Tensor] = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of some ids, of any shape; the result has one dimension more."""
        places, weight = self._look_up(ids)
        return torch.nn.functional.embedding(places, weight)

    def _look_up(self, ids: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns the places of the rows of some ids, and all rows."""
        if self._weight is None or self._keys is None:
            raise InvalidError(
                f"the rows of table `{self.name}` are not here: only `steadfast.torch.Model` calls this layer"
            )
        if ids.numel() and ids.is_floating_point():
            raise InvalidError(f"ids of `{self.name}` are {ids.dtype}; ids are integers")
        keys = ids.to(torch.int64) ^ _SIGN
        if len(self._keys) == 0:
            if keys.numel():
                raise self._absent(ids)
            return keys, self._weight
        places = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        if not torch.equal(self._keys[places], keys):
            raise self._absent(ids)
        return places, self._weight

    def _absent(self, ids: torch.Tensor) -> InvalidError:
        return InvalidError(
            f"table `{self.name}` was asked for ids that are not in {', '.join(self.columns)}; pass the columns "
            "that the ids come from as `columns`, and seed the generators of a `transform` with `key.seed`"
        )

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.table.dim}"


class EmbeddingBag(Embedding):
    """As :class:`Embedding`, for lists of ids of any length: returns the sum or the mean of each record's rows.

    Args:
        mode: ``"sum"`` or ``"mean"``; of no rows, both are zero.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        columns: Union[str, Sequence[str], None] = None,
        initial: Union[str, Tuple[str, float]] = ("normal", 0.01),
        mode: str = "mean",
    ) -> None:
        super().__init__(name, dim, columns=columns, initial=initial)
        if mode not in ("sum", "mean"):
            raise InvalidError(f'`mode` is "{mode}"; use "sum" or "mean"')
        self.mode = mode

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, offsets: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Returns a row for each record.

        Args:
            ids: Either the ids of all records one after the other, or a matrix with a row of ids for each record.
            offsets: Where each record begins in ``ids``, and where the last one ends; absent with a matrix.
        """
        places, weight = self._look_up(ids)
        return torch.nn.functional.embedding_bag(
            places, weight, offsets, mode=self.mode, include_last_offset=offsets is not None
        )


class Tables:
    """The tables of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._layers: Dict[str, List[Embedding]] = {}
        for layer in module.modules():
            if isinstance(layer, Embedding):
                self._layers.setdefault(layer.name, []).append(layer)
        for name, layers in self._layers.items():
            if any(layer.table != layers[0].table for layer in layers):
                raise InvalidError(f"two layers have the table `{name}` with other `dim` or `initial`")
        self.declared: Dict[str, Table] = {name: layers[0].table for name, layers in self._layers.items()}
        self.columns = {column for layers in self._layers.values() for layer in layers for column in layer.columns}
        self._leaves: Dict[str, torch.Tensor] = {}

    def ids(self, batch: Batch) -> Dict[str, np.ndarray]:
        """Returns the ids of each table in a batch."""
        return {
            name: np.concatenate([self._ids(batch, column) for column in _columns(layers)])
            for name, layers in self._layers.items()
        }

    @staticmethod
    def _ids(batch: Batch, name: str) -> np.ndarray:
        if name not in batch:
            raise InvalidError(f"the batch has no column `{name}`, only {', '.join(batch)}")
        column = column_ids(name, batch[name])
        return as_ids(name, column[0] if isinstance(column, tuple) else column)

    def load(self, parameters: Mapping[str, Rows], device: torch.device) -> None:
        """Gives the layers the rows of a batch."""
        for name, layers in self._layers.items():
            rows = parameters[name]
            keys = torch.from_numpy(rows.ids.view(np.int64) ^ np.int64(_SIGN)).to(device)
            weight = torch.tensor(rows.values, device=device).requires_grad_()
            self._leaves[name] = weight
            for layer in layers:
                layer._weight, layer._keys = weight, keys

    def gradients(self) -> Dict[str, np.ndarray]:
        """Returns the gradients of the rows that :meth:`load` was given; without those that are zero."""
        return {name: weight.grad.cpu().numpy() for name, weight in self._leaves.items() if weight.grad is not None}


def _columns(layers: Sequence[Embedding]) -> List[str]:
    """Returns the columns of layers with the same table, once each."""
    return list(dict.fromkeys(column for layer in layers for column in layer.columns))


def column_ids(name: str, column: Any) -> Any:
    """Returns a column whose values are ids: text and bytes are hashed, other values stay as they are."""
    if isinstance(column, tuple):
        values, offsets = column
        return column_ids(name, values), offsets
    if isinstance(column, np.ndarray) and column.dtype == object:
        return category_ids(name, column)
    return column
