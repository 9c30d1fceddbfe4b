"""What a model of any framework returns."""

from __future__ import annotations

import numpy as np
import pytest
import steadfast
from steadfast.model import evaluated, identity, settings_of


class Mean(steadfast.Model):
    """The mean of the labels."""

    metric_name = "error"

    def __init__(self, sums):
        self._sums = sums

    def parameters(self):
        return {"mean": ()}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        raise NotImplementedError

    def evaluate(self, parameters, batch):
        return self._sums(batch["label"] - parameters["mean"])


def sums_of(sums):
    return evaluated(Mean(sums), {"mean": np.float32(0.5)}, {"label": np.arange(4, dtype=np.float32)}, 4)


def test_an_evaluation_returns_the_sums_of_loss_and_metric():
    found = sums_of(lambda error: (np.square(error).sum(), np.abs(error).sum()))
    assert found == (9.0, 5.0)
    assert all(type(it) is float for it in found)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (lambda error: (np.square(error), 0.0), r"the sum of the loss of 4 records has the shape \[4\]"),
        (lambda error: (0.0, np.abs(error)), r"the sum of the error of 4 records has the shape \[4\]"),
        (lambda error: (0.0, error[:, None] == error), r"the error of 4 records has the shape \[4, 4\]"),
        (lambda error: (0.0, error[:1]), r"the shape \[1\]; return one number"),
        (lambda error: np.square(error).sum(), "`evaluate` returned a float32; return two numbers"),
        (lambda error: (1.0, 2.0, 3.0), "`evaluate` returned a tuple; return two numbers"),
        (lambda error: None, "`evaluate` returned a NoneType"),
    ],
)
def test_an_evaluation_that_was_not_added_is_refused(sums, message):
    with pytest.raises(steadfast.InvalidError, match=message):
        sums_of(sums)


class Set(Mean):
    """Gives its parameters settings, as they are."""

    def __init__(self, settings):
        self._settings = settings

    def parameters(self):
        return {"weight": (2,), "bias": (), "mean": ()}

    def averaged(self):
        return ["mean"]

    def tables(self):
        return {"words": steadfast.Table(3)}

    def settings(self):
        return self._settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": {"weight_decy": 0}}, "sets `weight_decy`; use weight_decay, learning_rate, frozen"),
        ({"biass": {"weight_decay": 0}}, "has `biass`, which it does not train; it has weight, bias$"),
        ({"mean": {"weight_decay": 0}}, "has `mean`, which is averaged and not trained"),
        ({"words": {"weight_decay": 0}}, r"has the table `words`; use `\[tables\]`"),
        ({"bias": {"weight_decay": -1}}, "`weight_decay` = -1.0; it must be finite and at least 0"),
        ({"bias": {"learning_rate": float("nan")}}, "`learning_rate` = nan; it must be finite"),
        ({"bias": {"learning_rate": "half"}}, "`learning_rate` = 'half'; use a number"),
        ({"bias": {"frozen": 1}}, "`frozen` = 1; use True or False"),
        ({"bias": {"frozen": True, "weight_decay": 0}}, "`weight_decay` does not apply to `bias`"),
        ({"bias": 0.5}, "must return a dict with a dict for each parameter"),
    ],
)
def test_settings_that_a_job_cannot_use_are_refused_by_name(settings, message):
    for check in (settings_of, identity):
        with pytest.raises(steadfast.InvalidError, match=message):
            check(Set(settings))


def test_settings_take_any_number():
    given = {"weight": {"learning_rate": np.float32(0.5), "frozen": False}, "bias": {"frozen": True}}
    assert settings_of(Set(given)) == {"weight": {"learning_rate": 0.5}, "bias": {"frozen": True}}
    assert identity(Set(given)) != identity(Set({}))
