"""Reads and writes safetensors files, without that library: its Python package is no dependency of this one."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .errors import InvalidError

__all__ = ["Raw", "arrays", "encode", "read"]

_WORD = 8
_METADATA = "__metadata__"

Raw = Tuple[str, Sequence[int], bytes]
"""A tensor of a file: the name of its type there, its shape, and its values."""

_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
"""The types that NumPy has."""


def encode(tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> bytes:
    """Returns a file with these tensors. The same content gives the same bytes."""
    header: Dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    parts: List[bytes] = []
    start = 0
    for name, (kind, shape, values) in sorted(tensors.items()):
        end = start + len(values)
        header[name] = {"dtype": kind, "shape": [int(side) for side in shape], "data_offsets": [start, end]}
        parts.append(values)
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _WORD)
    return b"".join([len(text).to_bytes(_WORD, "little"), text, *parts])


def read(path: Union[str, "os.PathLike[str]"]) -> Tuple[Dict[str, Raw], Dict[str, str]]:
    """Returns the tensors of a file, and its metadata.

    Raises:
        InvalidError: It is not a safetensors file.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        return _decode(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidError(f"{os.fspath(path)} is not a safetensors file: {error or type(error).__name__}") from None


def _decode(content: bytes) -> Tuple[Dict[str, Raw], Dict[str, str]]:
    if len(content) < _WORD:
        raise ValueError(f"it has {len(content)} bytes")
    first = _WORD + int.from_bytes(content[:_WORD], "little")
    if len(content) < first:
        raise ValueError(f"its header claims a length of {first - _WORD} bytes")
    header = json.loads(content[_WORD:first].decode("utf-8"))
    metadata = header.pop(_METADATA, {})
    tensors: Dict[str, Raw] = {}
    for name, about in header.items():
        start, end = (first + int(it) for it in about["data_offsets"])
        if not first <= start <= end <= len(content):
            raise ValueError(f"it lacks values of `{name}`")
        tensors[name] = (about["dtype"], about["shape"], content[start:end])
    return tensors, metadata


def arrays(tensors: Mapping[str, Raw]) -> Dict[str, np.ndarray]:
    """Returns tensors as arrays that can be written to; those in bfloat16, which NumPy lacks, as float32.

    Raises:
        InvalidError: NumPy has no such type.
    """
    return {name: _array(name, *it) for name, it in tensors.items()}


def _array(name: str, kind: str, shape: Sequence[int], values: bytes) -> np.ndarray:
    if kind == "BF16":
        halves = np.frombuffer(values, "<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(shape)
    known: Optional[str] = _TYPES.get(kind)
    if known is None:
        raise InvalidError(f"the tensor `{name}` is {kind}, which NumPy lacks; read it with PyTorch")
    return np.frombuffer(values, known).reshape(shape).copy()
