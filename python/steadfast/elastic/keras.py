"""Elastic training in Keras."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import numpy as np

from ..errors import InvalidError
from .state import ObjectState

__all__ = ["KerasState"]


class KerasState(ObjectState):
    """Keeps a Keras model, its optimizer, and attributes.

    ::

        state = steadfast.elastic.KerasState(model, epoch=0)

    All variables are kept: weights, running statistics, the state of random layers, and those of the
    optimizer.

    Args:
        model: The model, which is built.
        optimizer: Its optimizer; by default that with which the model was compiled.
        attributes: Other attributes, as of :class:`ObjectState`.

    Raises:
        InvalidError: The model is not built, or an attribute cannot be saved.
    """

    def __init__(self, model: Any, optimizer: Optional[Any] = None, **attributes: Any) -> None:
        if not getattr(model, "built", False):
            raise InvalidError("Model must be built first. Run `model.build(input_shape)`.")
        optimizer = optimizer or getattr(model, "optimizer", None)
        if optimizer is not None:
            # Its variables would appear with the first step only.
            optimizer.build(model.trainable_variables)
        kept = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
        super().__init__(**kept, **attributes)

    def _stateful(self, name: str) -> Optional[Any]:
        if name in ("model", "optimizer"):
            return _Variables(name, getattr(self, name))
        return super()._stateful(name)


class _Variables:
    """Saves and loads the variables of a model or an optimizer, in their order."""

    def __init__(self, name: str, owner: Any) -> None:
        self._name = name
        # Before Keras 3, a method in some optimizers.
        self._variables: List[Any] = list(owner.variables() if callable(owner.variables) else owner.variables)

    def state_dict(self) -> Dict[str, Any]:
        return {"values": [_plain(np.asarray(it)) for it in self._variables]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = state["values"]
        current = [np.asarray(it) for it in self._variables]
        if [it.shape for it in values] != [it.shape for it in current]:
            raise InvalidError(f"the saved state has another `{self._name}`: its variables have other shapes")
        for variable, value, old in zip(self._variables, values, current):
            variable.assign(value if value.dtype == old.dtype else value.view(old.dtype))


def _plain(array: Any) -> Any:
    """Returns the array with a type that NumPy has itself: bfloat16 is an extension."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array
