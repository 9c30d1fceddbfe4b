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
    return {**BEGUN, "master": {"epoch": epoch}, "points": shown}


BEGUN = {
    "master": {"epoch": 1},
    "generation": 1,
    "pass": 0,
    "version": 0,
    "examples": 0,
    "loss": None,
    "evaluation": None,
    "checkpoint": None,
    "result": None,
    "points": [],
}


def at(passes, step, evaluation=None, **more):
    """A status of a job that has finished so many passes, and a step after them."""
    return {**BEGUN, "pass": passes, "version": step, "examples": 8 * step, "evaluation": evaluation, **more}


def evaluated(passes, step, loss, **more):
    """An evaluation as a status has it."""
    figures = {"loss": loss, "metric": 1 - loss, "metric_name": "accuracy", "records": 50}
    return {"pass": passes, "version": step, **figures, **more}


RESULT = {"state": "finished", "passes": 3, "steps": 30, "examples": 240, "loss": 0.1, "metric": 0.9}


def at_the_end(evaluation=None, **result):
    """What etcd has of a job that has finished."""
    return {
        "master": None,
        "generation": 1,
        "evaluation": evaluation,
        "checkpoint": None,
        "result": {**RESULT, "metric_name": "accuracy", **result},
    }


def followed(*statuses, passes=0):
    """The events of these statuses, each pass as its number."""
    history = History()
    history.follow(passes)
    return [list(map(short, events_of(history, it))) for it in statuses]


def events_of(history, status):
    history.add(status)
    found = []
    while history.has_events():
        found.append(history.next_event())
    assert history.next_event() is None
    return found


def short(event):
    if isinstance(event, steadfast.PassEnd):
        return event.passes
    if isinstance(event, steadfast.Evaluation):
        return event.passes, event.loss
    return event.id


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


def test_each_pass_is_an_event_once_and_in_order():
    """Also if several end between two looks, after an outage, and if the job goes back to a checkpoint."""
    unknown = {"master": None, "generation": 1, "evaluation": None, "checkpoint": None, "result": None}
    seen = [at(0, 0), at(1, 12), at(1, 18), unknown, at(0, 0), at(4, 43), at(2, 20), at(4, 44), at(5, 50)]
    assert followed(*seen) == [[], [1], [], [], [], [2, 3, 4], [], [], [5]]
    assert followed(at(2, 25), at_the_end()) == [[1, 2], [3, (3, 0.1)]]


def test_an_event_has_the_figures_of_its_look():
    history = History()
    history.follow(0)
    (event,) = events_of(history, at(1, 12, loss=0.5))
    assert event == (1, 12, 96, 0.5) and event.step == 12
    (event,) = events_of(history, at(2, 25))
    assert event.loss == 0.5
    (event,) = events_of(history, at(2, 26, evaluated(2, 20, 0.25)))
    assert event == steadfast.Evaluation(2, 20, 50, 0.25, 0.75, "accuracy")


def test_passes_before_the_first_look_are_no_events():
    assert followed(at(4, 43), at(5, 50), passes=None) == [[], [5]]
    # A master that has just begun does not know the step.
    assert followed(at(0, 0), at(4, 43), at(5, 50), passes=None) == [[], [], [5]]
    # A job that has not begun is known to have none.
    assert followed({**at(0, 0), "generation": 0}, at(2, 25), passes=None) == [[], [1, 2]]
    assert followed(at_the_end(), passes=None) == [[(3, 0.1)]]


def test_each_evaluation_is_an_event_once_after_its_pass():
    first, second = evaluated(1, 10, 0.5), evaluated(2, 20, 0.25)
    seen = [at(1, 12), at(1, 13, first), at(3, 35, second), at(3, 36, second)]
    assert followed(*seen) == [[1], [(1, 0.5)], [2, (2, 0.25), 3], []]
    # Of a job that was rolled back: the same numbers are no news, others are.
    again = [at(1, 12, first), at(2, 25, second), at(0, 5), at(1, 12, first), at(2, 22, evaluated(2, 20, 0.3))]
    assert followed(*again) == [[1, (1, 0.5)], [2, (2, 0.25)], [], [], [(2, 0.3)]]
    # JSON has no number that is not finite.
    broken = {**evaluated(1, 10, 0.5), "loss": None, "metric": None}
    assert followed(at(1, 12, broken), at(1, 13, broken)) == [[1, (1, None)], []]


def test_each_checkpoint_is_an_event_once():
    first, second = "000000000010-aa", "000000000020-bb"
    seen = [at(0, 1), at(0, 11, checkpoint=first), at(0, 12, checkpoint=first), at(0, 21, checkpoint=second)]
    assert followed(*seen, at(0, 11, checkpoint=first)) == [[], [first], [], [second], []]
    history = History()
    history.follow(0)
    assert events_of(history, at(0, 11, checkpoint=first)) == [steadfast.Checkpoint(first, 10)]


def test_what_lies_before_a_run_is_no_event_of_it():
    history = History()
    before, checkpoint = evaluated(2, 20, 0.25), "000000000020-bb"
    history.add({**at_the_end(before), "checkpoint": checkpoint, "result": None})
    history.follow(2)
    assert events_of(history, at(2, 20, before, checkpoint=checkpoint)) == []
    assert [short(it) for it in events_of(history, at(3, 30, evaluated(3, 30, 0.2), checkpoint=checkpoint))] == [
        3,
        (3, 0.2),
    ]


def test_nobody_keeps_events_that_nobody_takes():
    history = History()
    assert events_of(history, at(3, 35, evaluated(2, 20, 0.25))) == []


def test_evaluations_are_those_that_the_job_has_not_forgotten():
    history = History()
    for passes, loss in ((1, 0.5), (2, 0.25), (3, 0.125)):
        history.add(at(passes, 10 * passes, evaluated(passes, 10 * passes, loss)))
    assert [it.step for it in history.evaluations()] == [10, 20, 30]
    # Back to a checkpoint: etcd has forgotten the last one, and knows no other.
    history.add(at(2, 25))
    assert [it.step for it in history.evaluations()] == [10, 20]
    history.add(at(3, 31, evaluated(3, 30, 0.25)))
    history.add(at(1, 11, evaluated(1, 10, 0.5)))
    assert [it.loss for it in history.evaluations()] == [0.5]
    history.add(at_the_end(evaluated(1, 10, 0.5)))
    assert history.evaluations()[-1] == steadfast.Evaluation(3, 30, None, 0.1, 0.9, "accuracy")
    history.add(at_the_end(evaluated(1, 10, 0.5)))
    assert len(history.evaluations()) == 2


def test_the_final_evaluation_is_counted_once():
    last = evaluated(3, 30, 0.1)
    assert followed(at(3, 30, last), at_the_end(last)) == [[1, 2, 3, (3, 0.1)], []]
    without = at_the_end(loss=0.3, metric=None)
    assert followed(without) == [[1, 2, 3]]


def test_further_metrics_are_part_of_an_evaluation_and_of_the_curves():
    history = History()
    history.add(at(1, 10, evaluated(1, 10, 0.5, further_metrics={"top5": 0.75, "recall": None})))
    (found,) = history.evaluations()
    assert found.metrics == {"accuracy": 0.5, "top5": 0.75, "recall": None}
    history.add(at_the_end(loss=0.1, further_metrics={"top5": 0.875}))
    assert history.evaluations()[-1].metrics == {"accuracy": 0.9, "top5": 0.875}
    history = History()
    waiting = status(1, (5, 10, 0.5))
    history.add(waiting)
    history.add({**waiting, "points": [{**waiting["points"][0], "unix_ms": 9, "further_metrics": {"top5": 0.25}}]})
    (last,) = history.points()
    assert last["further_metrics"] == {"top5": 0.25}


def test_the_best_evaluation_is_that_of_the_job():
    history = History()
    assert history.best() is None
    history.add(at(1, 10, evaluated(1, 10, 0.5)))
    history.add(at(2, 20, evaluated(2, 20, 0.75)))
    assert history.best().loss == 0.5
    best = {"pass": 2, "version": 20, "loss": 0.75, "metric": 0.25}
    history.add(at(3, 30, evaluated(3, 30, 0.25, course={"best": best})))
    assert history.best() == steadfast.Evaluation(2, 20, 50, 0.75, 0.25, "accuracy")
    # One that was not seen, in the result alone.
    best = {"pass": 2, "version": 22, "loss": 0.7, "metric": 0.3}
    history.add(at_the_end(None, best=best, loss=0.7, metric=0.3))
    assert history.best() == steadfast.Evaluation(2, 22, None, 0.7, 0.3, "accuracy")
    # It is no evaluation of the last step.
    assert [it.step for it in history.evaluations()] == [10, 20, 30]


class Scripted(steadfast.Run):
    """A job whose statuses are given; ``None`` is an outage."""

    def __init__(self, *statuses, **callbacks):
        super().__init__("scripted", [], callbacks=steadfast.run._Callbacks(**callbacks))
        self._statuses = list(statuses)
        self._history.follow(0)

    def status(self):
        found = self._statuses.pop(0)
        if found is None:
            raise steadfast.UnavailableError
        self._history.add(found)
        return found


def test_a_wait_reports_each_event_once_over_outages(monkeypatch):
    monkeypatch.setattr(steadfast.run, "_POLL_EVERY", 0)
    heard = []
    end = at_the_end(evaluated(3, 30, 0.1))
    seen = [at(1, 12), None, at(2, 20, evaluated(2, 20, 0.2)), None, at(0, 0), at(2, 20, evaluated(2, 20, 0.2)), end]
    run = Scripted(*seen, on_pass=heard.append, on_evaluation=heard.append)
    assert run.wait()["steps"] == 30
    assert [short(it) for it in heard] == [1, 2, (2, 0.2), 3, (3, 0.1)]


def test_an_exception_of_a_callback_ends_one_wait_and_the_next_goes_on(monkeypatch):
    monkeypatch.setattr(steadfast.run, "_POLL_EVERY", 0)
    heard = []

    def once(event):
        heard.append(event.passes)
        if event.passes == 2:
            raise KeyError("mine")

    run = Scripted(at(3, 35), at_the_end(), on_pass=once)
    with pytest.raises(KeyError):
        run.wait()
    assert heard == [1, 2]
    run.wait()
    assert heard == [1, 2, 3]
