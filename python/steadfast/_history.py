"""What was seen of a job: the points of its curves, its evaluations, and what has happened."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

__all__ = ["Checkpoint", "Evaluation", "Event", "History", "PassEnd"]

Point = Mapping[str, Any]

_LATEST = 2**63
"""Stands for a term after that of every master."""

_STEP_DIGITS = 12
"""Digits of the step with which the id of a checkpoint begins."""


class PassEnd(NamedTuple):
    """The end of a pass over the data."""

    passes: int
    """Finished passes: 1 after the first one."""
    step: int
    """The step of the job when this was seen; it may have gone on."""
    examples: int
    """Records that were trained on by then."""
    loss: Optional[float]
    """Mean loss of a record in the last step that was seen."""


class Evaluation(NamedTuple):
    """An evaluation of the held-out records."""

    passes: int
    """Finished passes."""
    step: int
    """The step whose parameters were evaluated."""
    records: Optional[int]
    """Number of records; ``None`` of the last evaluation of a job that only its result has."""
    loss: Optional[float]
    """Mean loss; ``None`` if it is not finite."""
    metric: Optional[float]
    """Mean of the metric; ``None`` if it is not finite."""
    metric_name: str
    """Name of the metric; of several, of the first one."""
    further_metrics: Tuple[Tuple[str, Optional[float]], ...] = ()
    """Names and means of the further metrics."""
    reductions: int = 0
    """How often evaluations have reduced the learning rate (``evaluation.reduce_on_plateau``), this one included."""

    @property
    def metrics(self) -> Dict[str, Optional[float]]:
        """All metrics by name."""
        return {self.metric_name: self.metric, **dict(self.further_metrics)}


class Checkpoint(NamedTuple):
    """A checkpoint."""

    id: str
    """The id, as ``steadfast checkpoint list`` shows it."""
    step: int
    """The step whose parameters it has."""


Event = Union[PassEnd, Evaluation, Checkpoint]


class History:
    """The statuses of a job, put together. A master knows only the points of its term, and etcd only one evaluation.

    All methods may be called by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By term and time: the clocks of masters may differ.
        self._points: Dict[Tuple[int, int], Point] = {}
        self._evaluations: List[Evaluation] = []
        self._best: Optional[Evaluation] = None
        self._loss: Optional[float] = None
        # Whether a callback takes the events.
        self._is_followed = False
        self._events: Deque[Event] = deque()
        # Finished passes, and evaluations and checkpoints that were events already or lie before the first look.
        self._passes: Optional[int] = None
        self._known: Set[Event] = set()

    def follow(self, passes: Optional[int] = None) -> None:
        """Keeps what happens from here on as events, until :meth:`next_event` takes it.

        Args:
            passes: Finished passes; by default those of the first status that knows.
        """
        with self._lock:
            if passes is not None:
                self._passes = passes
            self._is_followed = True

    def next_event(self) -> Optional[Event]:
        """Takes the oldest event; ``None`` if there is none."""
        try:
            return self._events.popleft()
        except IndexError:
            return None

    def has_events(self) -> bool:
        """Returns whether there is an event to take."""
        return bool(self._events)

    def add(self, status: Mapping[str, Any]) -> None:
        """Adds what a status says."""
        master, result = status.get("master"), status.get("result")
        with self._lock:
            if master is not None:
                self._points.update({(master["epoch"], it["unix_ms"]): it for it in status.get("points", ())})
                self._loss = status["loss"] if status["loss"] is not None else self._loss
            evaluation = self._evaluated(status)
            new: List[Event] = [*self._ended(status)]
            if evaluation is not None and self._is_new(evaluation):
                # After the pass that it is of.
                before = sum(it.passes <= evaluation.passes for it in new if isinstance(it, PassEnd))
                new.insert(before, evaluation)
            last = self._of_result(result)
            if last is not None and self._is_new(last):
                new.append(last)
            checkpoint = _checkpoint(status)
            if checkpoint is not None and self._is_new(checkpoint):
                new.append(checkpoint)
            if self._is_followed:
                self._events.extend(new)

    def add_passes(self, passes: int, step: int, examples: int) -> None:
        """Adds the passes that a job had finished when its processes ended."""
        with self._lock:
            ends = self._ends(passes, step, examples)
            if self._is_followed:
                self._events.extend(ends)

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

    def evaluations(self) -> List[Evaluation]:
        """Returns the evaluations that were seen, by increasing steps; without those that were forgotten."""
        with self._lock:
            return list(self._evaluations)

    def best(self) -> Optional[Evaluation]:
        """Returns the best evaluation: that of the master, if it compares them, else that with the lowest loss."""
        with self._lock:
            if self._best is not None:
                return self._best
            seen = [it for it in self._evaluations if it.loss is not None]
        return min(seen, key=lambda it: it.loss or 0.0, default=None)

    def _evaluated(self, status: Mapping[str, Any]) -> Optional[Evaluation]:
        """Keeps the evaluation of a status, and what it says of the best one."""
        record = status.get("evaluation")
        if record is None:
            if status.get("master") is not None and 0 < status["version"]:
                # The job has gone back to a checkpoint before it.
                self._forget(status["version"] + 1)
                self._best = None
            return None
        found = _evaluation(record, record["records"], record["metric_name"])
        self._keep(found)
        self._best = self._chosen((record.get("course") or {}).get("best"), found.metric_name)
        return found

    def _of_result(self, result: Optional[Mapping[str, Any]]) -> Optional[Evaluation]:
        """Keeps the evaluation of the final parameters, and returns it if only the result has it."""
        if result is None or result.get("metric") is None:
            return None
        metric_name = result.get("metric_name") or "metric"
        if result.get("best") is not None:
            # Its loss and metric are those of the best one, and each pass has an evaluation of its own.
            self._best = self._chosen(result["best"], metric_name)
            return None
        passes, step = result["passes"], result["steps"]
        if any(it.step == step and it.records is not None for it in self._evaluations[-1:]):
            return None
        further = _further(result)
        found = Evaluation(passes, step, None, result["loss"], result["metric"], metric_name, further)
        self._keep(found)
        return found

    def _chosen(self, best: Optional[Mapping[str, Any]], metric_name: str) -> Optional[Evaluation]:
        if best is None:
            return None
        known = (it for it in self._evaluations if (it.passes, it.step) == (best["pass"], best["version"]))
        return next(known, None) or _evaluation(best, None, metric_name)

    def _keep(self, evaluation: Evaluation) -> None:
        self._forget(evaluation.step + 1)
        if evaluation not in self._evaluations[-1:]:
            self._forget(evaluation.step)
            self._evaluations.append(evaluation)

    def _forget(self, step: int) -> None:
        """Drops the evaluations from a step on."""
        while self._evaluations and step <= self._evaluations[-1].step:
            self._evaluations.pop()

    def _ended(self, status: Mapping[str, Any]) -> List[PassEnd]:
        """Returns the ends of passes that a status is the first one to show."""
        result = status.get("result")
        if result is not None:
            passes, step, examples = result["passes"], result["steps"], result["examples"]
        elif status.get("master") is not None:
            passes, step, examples = status["pass"], status["version"], status["examples"]
            if self._passes is None and step == 0 and 0 < status["generation"]:
                # A master that has just begun does not know the step yet.
                return []
        else:
            return []
        return self._ends(passes, step, examples)

    def _ends(self, passes: int, step: int, examples: int) -> List[PassEnd]:
        """Returns the ends of passes that were not seen before. Each is seen once, also if it is done again."""
        before = passes if self._passes is None else self._passes
        self._passes = max(before, passes)
        return [PassEnd(it, step, examples, self._loss) for it in range(before + 1, passes + 1)]

    def _is_new(self, event: Union[Evaluation, Checkpoint]) -> bool:
        """Returns whether this is the first status with it."""
        is_new = event not in self._known
        self._known.add(event)
        return is_new


def _checkpoint(status: Mapping[str, Any]) -> Optional[Checkpoint]:
    found = status.get("checkpoint")
    return None if found is None else Checkpoint(found, int(found[:_STEP_DIGITS]))


def _evaluation(record: Mapping[str, Any], records: Optional[int], metric_name: str) -> Evaluation:
    plateau = (record.get("course") or {}).get("plateau") or {}
    return Evaluation(
        record["pass"],
        record["version"],
        records,
        record["loss"],
        record["metric"],
        metric_name,
        _further(record),
        len(plateau.get("reductions", ())),
    )


def _further(record: Mapping[str, Any]) -> Tuple[Tuple[str, Optional[float]], ...]:
    return tuple(record.get("further_metrics", {}).items())


def _figures(point: Point) -> List[Tuple[str, Any]]:
    figures = [(name, point[name]) for name in ("examples", "loss", "metric")]
    return [*figures, ("further_metrics", point.get("further_metrics") or None)]
