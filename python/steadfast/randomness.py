"""The random states that code in a model may draw from."""

import random
import sys

import numpy as np

__all__ = ["seed_all"]


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy and, if it is imported, PyTorch, with a number from 0 to 2**63 - 1."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
