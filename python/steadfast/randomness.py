"""The random states that code in a model may draw from."""

import functools
import random
import sys

import numpy as np

__all__ = ["seed_all"]


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


@functools.lru_cache(maxsize=None)
def _has_accelerator() -> bool:
    """Whether PyTorch may compute on another device than the CPU."""
    import torch

    return any(
        module.is_available()
        for module in (torch.cuda, torch.backends.mps, getattr(torch, "xpu", None))
        if module is not None
    )
