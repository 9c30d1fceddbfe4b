"""Functions that a program registers, to be called when something happens."""

from __future__ import annotations

from typing import Generic, List, TypeVar

__all__ = ["Registered"]

Function = TypeVar("Function")


class Registered(Generic[Function]):
    """Functions in the order in which they were added, each once.

    The training function is called in each round, and with it the lines that add functions: those that are added while
    it runs are dropped when it begins again, so they do not pile up.
    """

    def __init__(self) -> None:
        self._before: List[Function] = []
        self._within: List[Function] = []
        self._is_running = False

    def add(self, function: Function) -> None:
        """Adds a function, unless it is there already."""
        if function not in self._before and function not in self._within:
            (self._within if self._is_running else self._before).append(function)

    def remove(self, function: Function) -> None:
        """Removes a function.

        Raises:
            ValueError: It is not there.
        """
        (self._within if function in self._within else self._before).remove(function)

    def all(self) -> List[Function]:
        """Returns the functions; a function may remove itself meanwhile."""
        return [*self._before, *self._within]

    def begin(self) -> None:
        """The training function begins: drops what it has added before."""
        self._within.clear()
        self._is_running = True

    def end(self) -> None:
        """The training function has ended for good."""
        self._within.clear()
        self._is_running = False
