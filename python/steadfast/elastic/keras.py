"""Elastic training in Keras."""

from __future__ import annotations

from typing import Any, Optional

from ..errors import InvalidError
from ._variables import Variables
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
            owner = getattr(self, name)
            # Before Keras 3, a method in some optimizers.
            return Variables(name, owner.variables() if callable(owner.variables) else owner.variables)
        return super()._stateful(name)
