"""What is put together from the statuses of a job."""

from __future__ import annotations

import pytest
import steadfast
from steadfast._history import History


def status(epoch, *points):
    """A status with points of a time, a version and a loss."""
    shown = [
        {"unix_ms": at, "version": version, "examples": 10 * version, "loss": loss, "metric": None}
        for at, version, loss in points
    ]
    return {"master": {"epoch": epoch}, "points": shown}


def steps(history):
    return [(it["version"], it["loss"]) for it in history.points()]


def test_the_points_of_steps_that_were_forgotten_are_dropped():
    history = History()
    history.add(status(1, (0, 0, None), (500, 10, 0.9), (1000, 20, 0.8), (1500, 30, 0.7)))
    assert steps(history) == [(0, None), (10, 0.9), (20, 0.8), (30, 0.7)]
    history.add(status(1, (1000, 20, 0.8), (1500, 30, 0.7), (2000, 15, 0.85), (2500, 25, 0.75)))
    assert steps(history) == [(0, None), (10, 0.9), (15, 0.85), (25, 0.75)]


def test_a_new_master_that_does_not_know_the_step_drops_nothing():
    history = History()
    history.add(status(1, (0, 0, None), (500, 10, 0.9), (1000, 20, 0.8)))
    # Its clock is behind.
    history.add(status(2, (400, 0, None), (900, 22, 0.7)))
    assert steps(history) == [(0, None), (10, 0.9), (20, 0.8), (22, 0.7)]
    history.add({"master": None, "points": None, "result": None})
    assert len(history.points()) == 4


def test_a_job_that_begins_anew_drops_all_later_steps():
    history = History()
    history.add(status(1, (0, 0, None), (500, 10, 0.9), (1000, 0, None), (1500, 5, 1.0)))
    assert steps(history) == [(0, None), (5, 1.0)]


def test_a_job_that_waits_is_one_point_with_its_newest_figures():
    history = History()
    history.add(status(1, (0, 10, 0.9), (500, 20, 0.8), (1000, 20, None)))
    waiting = status(1, (1500, 20, 0.8))
    waiting["points"][0]["metric"] = 0.95
    history.add(waiting)
    *_, last = history.points()
    assert (last["unix_ms"], last["loss"], last["metric"]) == (500, 0.8, 0.95)


def test_the_end_of_a_job_is_its_last_point():
    history = History()
    history.add(status(3, (0, 10, 0.9)))
    history.add_last({"unix_ms": 10, "version": 20, "examples": 200, "loss": 0.5, "metric": 0.9})
    history.add_last({"unix_ms": 20, "version": 20, "examples": 200, "loss": 0.4, "metric": 0.9})
    assert steps(history) == [(10, 0.9), (20, 0.5)]


def rolled_back(monkeypatch):
    run = steadfast.Run("digits", [])
    run._history.add(status(1, (0, 10, 0.9), (500, 30, 0.8), (1000, 20, 0.7)))

    def unavailable(*_):
        raise steadfast.UnavailableError

    monkeypatch.setattr(run, "_call", unavailable)
    return run


def test_curves_have_increasing_steps(monkeypatch):
    curves = rolled_back(monkeypatch).curves()
    assert curves["step"] == [10, 20] and curves["seconds"] == [0, 1] and curves["loss"] == [0.9, 0.7]


def test_a_plot_has_increasing_steps(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = rolled_back(monkeypatch).plot().axes[0].lines[0]
    assert list(drawn.get_xdata()) == [10, 20]
