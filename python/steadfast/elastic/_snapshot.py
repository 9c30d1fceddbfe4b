"""Values as bytes: JSON for the structure, raw memory for arrays and tensors. Never code, and never pickle.

A snapshot is the magic, the length of the JSON (8 bytes, little-endian), the JSON, and the memory of each
array, at multiples of 64 bytes. The JSON is ``{"values": {name: value}, "parts": [bytes of each array]}``; a
value that JSON does not have is an object with the key ``$``. An object of a class is described by the name of
the class, the value of its built-in base, and its attributes: it is made without its constructor.
"""

from __future__ import annotations

import enum
import json
import math
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from ..errors import InvalidError
from ._agent import Buffer
from ._classes import attributes, base_of, class_named, make, name_of, set_attributes

__all__ = ["decode", "encode"]

_MAGIC = b"steadfs1"
_ALIGNMENT = 64
_KIND = "$"
_DEPTH_MAX = 100


def encode(values: Mapping[str, Any]) -> bytearray:
    """Returns a copy of the values as bytes.

    Raises:
        InvalidError: A value is of a type that :func:`decode` could not give back. Names it.
    """
    writer = _Writer()
    described = {name: writer.describe(name, value, 0) for name, value in values.items()}
    sizes = [_size(array) for array in writer.arrays]
    head = json.dumps({"values": described, "parts": sizes}, allow_nan=False).encode()
    start = len(_MAGIC) + 8 + len(head)
    offsets, end = _offsets(start, sizes)
    data = bytearray(end)
    data[:start] = _MAGIC + len(head).to_bytes(8, "little") + head
    for array, offset in zip(writer.arrays, offsets):
        _copy(array, data, offset)
    return data


def decode(data: Buffer) -> Dict[str, Any]:
    """Returns the values of a snapshot; they share no memory with it.

    Raises:
        InvalidError: The bytes are no snapshot.
    """
    try:
        return _decode(memoryview(data).cast("B"))
    except InvalidError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidError(f"the saved state is damaged: {error}") from error


class _Writer:
    """Describes values in JSON, and collects their arrays."""

    def __init__(self) -> None:
        self.arrays: List[Any] = []

    def describe(self, path: str, value: Any, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise InvalidError(f"`{path}` is nested too deeply, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if kind is list:
            return self._items(path, value, depth)
        if kind is tuple:
            return {_KIND: "tuple", "items": self._items(path, value, depth)}
        if kind is dict or kind is OrderedDict:
            return self._mapping(path, value, depth)
        if kind in (set, frozenset):
            return {_KIND: kind.__name__, "items": self._items(path, value, depth)}
        if kind is complex:
            return {_KIND: "complex", "value": repr(value)}
        if kind in (bytes, bytearray):
            array = np.frombuffer(value, np.uint8) if value else np.empty(0, np.uint8)
            return {_KIND: kind.__name__, "part": self._part(array)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(path, value)
        if "torch" in sys.modules:
            described = self._of_torch(path, value)
            if described is not None:
                return described
        if kind is deque:
            return {_KIND: "deque", "items": self._items(path, value, depth), "most": value.maxlen}
        if kind is defaultdict:
            return self._default(path, value, depth)
        if isinstance(value, enum.Enum):
            return self._member(path, value, depth)
        return self._object(path, value, depth)

    def _items(self, path: str, items: Any, depth: int) -> List[Any]:
        return [self.describe(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(items)]

    def _mapping(self, path: str, mapping: Dict[Any, Any], depth: int) -> Dict[str, Any]:
        values = {key: self.describe(f"{path}[{key!r}]", it, depth + 1) for key, it in mapping.items()}
        if type(mapping) is dict and all(type(key) is str for key in mapping) and _KIND not in mapping:
            return values
        keys = self._items(f"a key of {path}", mapping, depth)
        kind = "dict" if type(mapping) is dict else "ordered"
        return {_KIND: kind, "items": [list(item) for item in zip(keys, values.values())]}

    def _array(self, path: str, value: Any) -> Dict[str, Any]:
        if value.dtype.hasobject or value.dtype.kind not in "biufcSUmM":
            raise InvalidError(f"`{path}` is an array of {value.dtype}, which cannot be saved")
        kind = "array" if type(value) is np.ndarray else "scalar"
        described = {_KIND: kind, "dtype": value.dtype.str, "shape": list(value.shape)}
        return {**described, "part": self._part(np.asarray(value))}

    def _default(self, path: str, value: Any, depth: int) -> Dict[str, Any]:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES:
            raise InvalidError(
                f"`{path}` is a defaultdict of {factory!r}, which cannot be saved; use "
                f"{', '.join(it.__name__ for it in _FACTORIES)}, or a dict"
            )
        name = None if factory is None else factory.__name__
        return {_KIND: "default", "of": name, "values": self._mapping(path, dict(value), depth)}

    def _member(self, path: str, value: Any, depth: int) -> Dict[str, Any]:
        described = {_KIND: "enum", "class": name_of(path, type(value))}
        if isinstance(value, enum.Flag):
            return {**described, "flags": value.value}
        return {**described, "name": value.name}

    def _object(self, path: str, value: Any, depth: int) -> Dict[str, Any]:
        base = base_of(path, type(value))
        described: Dict[str, Any] = {_KIND: "object", "class": name_of(path, type(value))}
        if base is not object:
            described["value"] = self.describe(path, _as_base(base, value), depth + 1)
        found = attributes(path, value)
        if found:
            described["attributes"] = {
                name: self.describe(f"{path}.{name}", it, depth + 1) for name, it in found.items()
            }
        return described

    def _of_torch(self, path: str, value: Any) -> Any:
        """Describes what PyTorch has; ``None`` of anything else."""
        import torch

        if type(value) is torch.Tensor:
            return self._tensor(path, value)
        if type(value) is torch.Size:
            return {_KIND: "size", "items": list(value)}
        if type(value) is torch.dtype:
            return {_KIND: "dtype", "name": str(value).partition(".")[2]}
        if type(value) is torch.device:
            return {_KIND: "device", "type": value.type}
        return None

    def _tensor(self, path: str, value: Any) -> Dict[str, Any]:
        import torch

        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise InvalidError(f"`{path}` is a {value.layout} tensor of {value.dtype}, which cannot be saved")
        described = {"requires_grad": True} if value.requires_grad and value.is_leaf else {}
        value = value.detach()
        return {
            **described,
            _KIND: "tensor",
            "dtype": str(value.dtype).partition(".")[2],
            "shape": list(value.shape),
            # Without the number: each worker has its own current device.
            "device": value.device.type,
            "part": self._part(value),
        }

    def _part(self, array: Any) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


_FACTORIES = (bool, bytes, dict, float, int, list, set, str, tuple)
"""What a defaultdict may make its values with."""


def _as_base(base: Any, value: Any) -> Any:
    """Returns the value as one of its built-in base, whatever methods its class has."""
    if issubclass(base, dict):
        return base(base.items(value))
    if base in (list, tuple, set, frozenset):
        return base(base.__iter__(value))
    return base.__getnewargs__(value)[0] if base in (int, float, str, bytes) else base(value)


def _size(array: Any) -> int:
    """Returns the number of bytes of an array or tensor."""
    if isinstance(array, np.ndarray):
        return array.nbytes
    return int(array.numel() * array.element_size())


def _offsets(start: int, sizes: List[int]) -> Tuple[List[int], int]:
    """Returns where the parts start, and where the last one ends."""
    offsets, end = [], start
    for size in sizes:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(offset)
        end = offset + size
    return offsets, end


def _copy(array: Any, data: bytearray, offset: int) -> None:
    if not _size(array):
        return
    if isinstance(array, np.ndarray):
        place = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
        place[...] = array
        return
    import torch

    view = torch.frombuffer(data, dtype=array.dtype, count=array.numel(), offset=offset)
    view.view(array.shape).copy_(array)


def _decode(data: memoryview) -> Dict[str, Any]:
    start = len(_MAGIC) + 8
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin as one")
    size = int.from_bytes(data[len(_MAGIC) : start], "little")
    head = json.loads(bytes(data[start : start + size]))
    sizes = head["parts"]
    if any(type(it) is not int or it < 0 for it in sizes):
        raise ValueError("sizes are no numbers")
    offsets, end = _offsets(start + size, sizes)
    if end != len(data):
        raise ValueError(f"it has {len(data)} bytes, not {end}")
    parts = [data[offset : offset + it] for offset, it in zip(offsets, sizes)]
    return {name: _value(value, parts) for name, value in head["values"].items()}


def _value(value: Any, parts: List[memoryview]) -> Any:
    if isinstance(value, list):
        return [_value(item, parts) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _value(item, parts) for key, item in value.items()}
    kind = value[_KIND]
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_value(item, parts) for item in value["items"])
    if kind in ("set", "frozenset"):
        items = [_value(item, parts) for item in value["items"]]
        return set(items) if kind == "set" else frozenset(items)
    if kind == "complex":
        return complex(value["value"])
    if kind == "deque":
        return deque((_value(item, parts) for item in value["items"]), value["most"])
    if kind == "default":
        factories = {it.__name__: it for it in _FACTORIES}
        factory = None if value["of"] is None else factories[value["of"]]
        return defaultdict(factory, _value(value["values"], parts))
    if kind == "enum":
        return _as_member(value)
    if kind == "object":
        return _as_object(value, parts)
    if kind in ("size", "dtype", "device"):
        return _of_torch(kind, value)
    if kind in ("dict", "ordered"):
        pairs = [(_value(key, parts), _value(item, parts)) for key, item in value["items"]]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    part = parts[value["part"]]
    if kind == "bytes":
        return bytes(part)
    if kind == "bytearray":
        return bytearray(part)
    if kind in ("array", "scalar"):
        array = np.empty(value["shape"], value["dtype"])
        if len(part):
            array[...] = np.frombuffer(part, array.dtype).reshape(array.shape)
        return array if kind == "array" else array[()]
    if kind == "tensor":
        return _as_tensor(value, part)
    raise ValueError(f"the kind of value {kind!r} is unknown")


def _as_member(value: Dict[str, Any]) -> Any:
    found = class_named(value["class"])
    if not issubclass(found, enum.Enum):
        raise ValueError(f"{value['class']} has no members")
    if "flags" not in value:
        return found.__members__[value["name"]]
    if not issubclass(found, enum.Flag) or type(value["flags"]) is not int:
        raise ValueError(f"{value['class']} has no flags")
    return found(value["flags"])


def _as_object(value: Dict[str, Any], parts: List[memoryview]) -> Any:
    found = class_named(value["class"])
    base = base_of(value["class"], found)
    made = make(found, base, _value(value["value"], parts) if base is not object else None)
    described = value.get("attributes", {})
    set_attributes(made, {name: _value(it, parts) for name, it in described.items()})
    return made


def _of_torch(kind: str, value: Dict[str, Any]) -> Any:
    import torch

    if kind == "size":
        return torch.Size(value["items"])
    if kind == "device":
        return torch.device(value["type"])
    return _dtype(value["name"])


def _dtype(name: str) -> Any:
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the type {name!r} is unknown")
    return dtype


def _as_tensor(value: Dict[str, Any], part: memoryview) -> Any:
    import torch

    dtype = _dtype(value["dtype"])
    if len(part):
        tensor = torch.frombuffer(bytearray(part), dtype=dtype).view(value["shape"])
    else:
        tensor = torch.empty(value["shape"], dtype=dtype)
    return tensor.to(value["device"]).requires_grad_(value.get("requires_grad", False))
