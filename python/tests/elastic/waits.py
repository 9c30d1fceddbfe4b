"""Programs of nodes that wait at points of their training, for tests that kill, add and remove nodes there."""

from __future__ import annotations

import pathlib
import re
from typing import Any, List

from nodes import Nodes


class Waits:
    """Follows programs that print ``waits in <number> as <pid>``, and go on once the file ``go-<number>`` exists.

    Args:
        nodes: The nodes of the job.
        directory: Where the files are.
        each: The nodes that run the program. A test may add and remove some.
    """

    def __init__(self, nodes: Nodes, directory: pathlib.Path, each: List[Any]) -> None:
        self._nodes = nodes
        self._directory = directory
        self._each = each

    def text(self) -> str:
        """What the programs have printed."""
        return "".join(it.log.read_text() for it in self._each)

    def until(self, number: int, workers: int) -> List[int]:
        """Waits until so many workers wait at a point, beyond the last commit; returns their processes."""

        def pids() -> List[int]:
            found = re.findall(rf"waits in {number} as (\d+)", self.text())
            return [int(it) for it in found if pathlib.Path(f"/proc/{it}").exists()]

        self._nodes.until(lambda: workers <= len(set(pids())), f"{workers} workers at {number}")
        return pids()

    def go(self, number: int) -> None:
        """Lets them go on."""
        (self._directory / f"go-{number}").touch()
