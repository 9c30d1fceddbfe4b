"""The random states that code in a model may draw from."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from typing import Any, Iterator, Tuple

import numpy as np

__all__ = ["random_states", "restored_states", "seed_all"]


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy and, if it is imported, PyTorch, with a number from 0 to 2**63 - 1."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # `manual_seed` would take half a millisecond to note the seed for devices that are not there.
        torch.default_generator.manual_seed(seed)


def random_states(device: Any) -> Tuple[Any, ...]:
    """Returns the global states of Python, NumPy and PyTorch, also of a GPU, to compare them."""
    torch = sys.modules["torch"]
    numpy: Any = np.random.get_state()
    states = [random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return tuple(states)


@contextlib.contextmanager
def restored_states(device: Any) -> Iterator[None]:
    """Restores the global states of Python, NumPy and PyTorch at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with sys.modules["torch"].random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@functools.lru_cache(maxsize=None)
def _has_accelerator() -> bool:
    """Whether PyTorch may compute on another device than the CPU."""
    import torch

    return any(
        module.is_available()
        for module in (torch.cuda, torch.backends.mps, getattr(torch, "xpu", None))
        if module is not None
    )
