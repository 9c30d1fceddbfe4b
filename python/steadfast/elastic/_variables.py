"""Variables of TensorFlow and Keras."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping

import numpy as np

from ..errors import InvalidError

__all__ = ["Variables", "variables_of"]


def variables_of(value: Any) -> List[Any]:
    """Returns a variable, or those of a list or tuple that has nothing else; none of other values."""
    some = list(value) if type(value) in (list, tuple) else [value]
    return some if all(_is_variable(it) for it in some) else []


def _is_variable(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("assign", "numpy"))


class Variables:
    """Saves and loads variables, in their order."""

    def __init__(self, name: str, variables: Iterable[Any]) -> None:
        self._name = name
        self._variables = list(variables)

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
