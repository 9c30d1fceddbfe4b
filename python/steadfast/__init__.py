"""Steadfast: distributed training that no failure stops or changes.

A model in Python, trained by Steadfast's loop: see :class:`steadfast.Model` and ``steadfast.torch``.
A loop of your own over parameter servers: see :class:`steadfast.Trainer`.
"""

from ._native import Key, Work
from .errors import (
    ConflictError,
    DeniedError,
    InvalidError,
    NotFoundError,
    SteadfastError,
    UnavailableError,
)
from .model import Model
from .trainer import Trainer

__all__ = [
    "ConflictError",
    "DeniedError",
    "InvalidError",
    "Key",
    "Model",
    "NotFoundError",
    "SteadfastError",
    "Trainer",
    "UnavailableError",
    "Work",
]
