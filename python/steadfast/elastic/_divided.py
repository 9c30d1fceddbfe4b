"""What is divided among the workers of a round."""

from __future__ import annotations

__all__ = ["Divided"]


class Divided:
    """Data of which each worker has a part. A state divides what is left anew in each round."""

    def reset(self) -> None:
        """Divides what is left among the workers of the current round."""
        raise NotImplementedError
