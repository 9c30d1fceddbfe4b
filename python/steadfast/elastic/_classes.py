"""Objects by the name of their class, its built-in base, and their attributes."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from types import MemberDescriptorType
from typing import Any, Dict

from ..errors import InvalidError

__all__ = ["attributes", "base_of", "class_named", "make", "name_of", "set_attributes"]

_BASES = (OrderedDict, dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex)
"""The built-in classes whose subclasses are kept."""

_OWN = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
"""Methods by which a class says that its attributes are not what it consists of."""

_REMEDY = (
    "use numbers, strings, bytes, lists, tuples, dicts, sets, arrays, tensors, objects that consist of such attributes, "
    "or an object with `state_dict` and `load_state_dict`"
)


def base_of(path: str, kind: type) -> type:
    """Returns the built-in base of a class; ``object`` of a class that has only attributes.

    Raises:
        InvalidError: Objects of this class are not only a value and attributes. Names ``path``.
    """
    base = next((it for it in _BASES if issubclass(kind, it)), object)
    # It says of itself that it is a dict.
    known = Counter if issubclass(kind, Counter) else base
    has_own = any(getattr(kind, name, None) is not getattr(known, name, None) for name in _OWN)
    # It would run for an object that no constructor has made.
    has_finalizer = any("__del__" in vars(it) for it in kind.__mro__)
    # Objects of classes that are written in C cannot be made without their constructor.
    if not has_own and not has_finalizer and kind is not object and not issubclass(kind, type):
        try:
            make(kind, base, base())
            return base
        except TypeError:
            pass
    raise InvalidError(f"`{path}` is a {_shown(kind)}, which cannot be saved; {_REMEDY}")


def make(kind: type, base: type, value: Any) -> Any:
    """Returns an object of a class with the value of its base, without its constructor."""
    new: Any = base.__new__
    made: Any
    if issubclass(base, dict):
        made = new(kind)
        for key, it in value.items():
            base.__setitem__(made, key, it)
    elif base is list:
        made = new(kind)
        list.extend(made, value)
    elif base is set:
        made = new(kind)
        set.update(made, value)
    elif base is bytearray:
        made = new(kind)
        bytearray.extend(made, value)
    else:
        made = new(kind) if base is object else new(kind, value)
    return made


def attributes(path: str, value: Any) -> Dict[str, Any]:
    """Returns the attributes of an object, also those in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            # As Python stores names that begin with two underscores.
            is_private = name.startswith("__") and not name.endswith("__")
            stored = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if stored not in ("__dict__", "__weakref__") and hasattr(value, stored):
                found[stored] = getattr(value, stored)
    return found


def set_attributes(value: Any, found: Dict[str, Any]) -> None:
    """Sets attributes, without a method or a property of the class."""
    for name, it in found.items():
        slot = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
        if isinstance(slot, MemberDescriptorType):
            slot.__set__(value, it)
        else:
            value.__dict__[name] = it


def name_of(path: str, kind: type) -> str:
    """Returns the name by which :func:`class_named` finds a class.

    Raises:
        InvalidError: It is not found, such as a class within a function. Names ``path``.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        raise InvalidError(
            f"`{path}` is a {_shown(kind)}, which is not found by its name; define the class in a module, not in a "
            "function"
        )
    return name


def class_named(name: str) -> type:
    """Returns the class of a name, if this process has imported its module.

    Raises:
        InvalidError: There is none.
    """
    found = _find(name)
    if not isinstance(found, type):
        raise InvalidError(
            f"the saved state has a {name.replace(':', '.')}, which this worker does not know; import its module "
            "before the training function is called"
        )
    return found


def _find(name: str) -> Any:
    """Returns what has this name, without a call of any code: a module may import others when it is asked for more."""
    module, _, path = name.partition(":")
    first, *rest = path.split(".")
    found: Any = vars(sys.modules[module]).get(first) if module in sys.modules else None
    for part in rest:
        found = vars(found).get(part) if isinstance(found, type) else None
    return found


def _shown(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
