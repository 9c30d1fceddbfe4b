"""Values as bytes: JSON for the structure, raw memory for arrays and tensors. Never code.

A snapshot is the magic, the length of the JSON (8 bytes, little-endian), the JSON, and the memory of each
array, at multiples of 64 bytes. The JSON is ``{"values": {name: value}, "parts": [bytes of each array]}``; a
value that JSON does not have is an object with the key ``$``.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from ..errors import InvalidError
from ._agent import Buffer

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
        if kind in (bytes, bytearray):
            array = np.frombuffer(value, np.uint8) if value else np.empty(0, np.uint8)
            return {_KIND: kind.__name__, "part": self._part(array)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(path, value)
        if _is_tensor(value):
            return self._tensor(path, value)
        raise InvalidError(
            f"`{path}` is a {_name(kind)}, which cannot be saved; use numbers, strings, bytes, lists, tuples, "
            "dicts, arrays, tensors, or an object with `state_dict` and `load_state_dict`"
        )

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


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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


def _as_tensor(value: Dict[str, Any], part: memoryview) -> Any:
    import torch

    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the type {value['dtype']!r} is unknown")
    if len(part):
        tensor = torch.frombuffer(bytearray(part), dtype=dtype).view(value["shape"])
    else:
        tensor = torch.empty(value["shape"], dtype=dtype)
    return tensor.to(value["device"]).requires_grad_(value.get("requires_grad", False))
