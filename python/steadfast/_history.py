"""What was seen of a job: the points of its curves."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Mapping, Tuple

__all__ = ["History"]

Point = Mapping[str, Any]

_LATEST = 2**63
"""Stands for a term after that of every master."""


class History:
    """The statuses of a job, put together. A master knows only those of its term.

    All methods may be called by several threads.
    """

    def __init__(self) -> None:
        # By term and time: the clocks of masters may differ.
        self._points: Dict[Tuple[int, int], Point] = {}
        self._lock = threading.Lock()

    def add(self, status: Mapping[str, Any]) -> None:
        """Adds what a status says."""
        master = status.get("master")
        if master is not None:
            with self._lock:
                self._points.update({(master["epoch"], it["unix_ms"]): it for it in status.get("points", ())})

    def add_last(self, point: Point) -> None:
        """Adds the end of a job, which its master may not have shown."""
        with self._lock:
            if all(it["version"] != point["version"] for it in self._points.values()):
                self._points[_LATEST, point["unix_ms"]] = point

    def points(self) -> List[Point]:
        """Returns the points of the curves, by increasing steps.

        A job that goes back to a checkpoint forgets the steps after it.
        """
        with self._lock:
            seen = [self._points[key] for key in sorted(self._points)]
        kept: List[Point] = []
        for point in seen:
            if kept and point["version"] == 0:
                # A master that has just begun does not know the step yet.
                continue
            while kept and point["version"] < kept[-1]["version"]:
                kept.pop()
            if kept and point["version"] == kept[-1]["version"]:
                # It has waited there, or was evaluated meanwhile.
                point = {**kept.pop(), **{name: it for name, it in _figures(point) if it is not None}}
            kept.append(point)
        return kept


def _figures(point: Point) -> List[Tuple[str, Any]]:
    return [(name, point[name]) for name in ("examples", "loss", "metric")]
