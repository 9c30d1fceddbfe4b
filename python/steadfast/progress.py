"""The progress of a job, on a terminal or in a notebook."""

from __future__ import annotations

import html
import sys
from typing import Any, Mapping, Optional

__all__ = ["Progress"]


class Progress:
    """One line that is replaced as the job proceeds."""

    def __init__(self, name: str) -> None:
        self._name = name

    @staticmethod
    def of(name: str) -> Optional["Progress"]:
        """Returns the progress for where this program runs; ``None`` if its output is a file."""
        if _in_notebook():
            return _Notebook(name)
        return _Terminal(name) if sys.stderr.isatty() else None

    def show(self, status: Mapping[str, Any]) -> None:
        """Shows the state of the job."""
        done, total = status["examples"], status["examples_total"]
        self._draw(done / total if total else None, self._line(status))

    def end(self, is_finished: bool) -> None:
        """Shows the end of the job."""
        self._draw(1.0 if is_finished else None, "finished" if is_finished else "ended")

    def _line(self, status: Mapping[str, Any]) -> str:
        parts = [str(status["state"])]
        if status["passes"]:
            parts.append(f"pass {min(status['pass'] + 1, status['passes'])}/{status['passes']}")
        if status["examples_per_second"]:
            parts.append(f"{status['examples_per_second']:,.0f} examples/s")
        if status["loss"] is not None:
            parts.append(f"loss {status['loss']:.4f}")
        evaluation = status["evaluation"]
        if evaluation is not None and evaluation["metric"] is not None:
            parts.append(f"{evaluation['metric_name']} {evaluation['metric']:.4f}")
            further = evaluation.get("further_metrics", {}).items()
            parts += [f"{name} {it:.4f}" for name, it in further if it is not None]
        if status["seconds_left"] is not None:
            parts.append(f"{status['seconds_left']:.0f} s left")
        return " · ".join(parts + list(status["waiting"])[:1])

    def _draw(self, share: Optional[float], text: str) -> None:
        raise NotImplementedError


class _Terminal(Progress):
    def _draw(self, share: Optional[float], text: str) -> None:
        bar = "" if share is None else "━" * round(24 * share) + "─" * (24 - round(24 * share)) + " "
        sys.stderr.write(f"\r\x1b[2K{bar}{self._name}: {text}")
        sys.stderr.flush()

    def end(self, is_finished: bool) -> None:
        super().end(is_finished)
        sys.stderr.write("\n")


class _Notebook(Progress):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        from IPython.display import HTML, display

        self._html = HTML
        self._shown = display(HTML(""), display_id=True)

    def _draw(self, share: Optional[float], text: str) -> None:
        value = "" if share is None else f' value="{share:.3f}"'
        label = html.escape(f"{self._name}: {text}")
        self._shown.update(self._html(f"<progress{value}></progress> {label}"))


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
