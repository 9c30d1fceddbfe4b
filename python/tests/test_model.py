"""What a model of any framework returns."""

from __future__ import annotations

import numpy as np
import pytest
import steadfast
from steadfast.model import evaluated, further_metrics, identity, settings_of


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
    assert found == [(9.0, 4.0), (5.0, 4.0)]
    assert all(type(it) is float for pair in found for it in pair)


class Several(Mean):
    further_metrics = ("largest", "within")


def several(sums):
    return evaluated(Several(sums), {"mean": np.float32(0.5)}, {"label": np.arange(4, dtype=np.float32)}, 4)


def test_further_metrics_follow_in_the_order_of_their_names():
    found = several(lambda error: (1.0, 2.0, {"within": 3, "largest": 4}))
    assert found == [(1.0, 4.0), (2.0, 4.0), (4.0, 4.0), (3.0, 4.0)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("within", "within"), "two metrics or losses are named `within`"),
        (("within", "error"), "two metrics or losses are named `error`"),
        (("loss",), "is named `loss`, as a column of curves is; rename it"),
        (("seconds",), "is named `seconds`, as a column of curves is"),
        ("within", "not a list of names"),
    ],
)
def test_names_of_further_metrics_are_their_own(names, message):
    model = Mean(None)
    model.further_metrics = names
    with pytest.raises(steadfast.InvalidError, match=message):
        further_metrics(model)


def test_a_sum_may_have_a_weight_in_place_of_the_number_of_records():
    found = several(lambda error: ((1.0, 6), 2.0, {"within": (3.0, np.float32(2.5)), "largest": 4}))
    assert found == [(1.0, 6.0), (2.0, 4.0), (4.0, 4.0), (3.0, 2.5)]


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (lambda error: (1.0, 2.0), "return two numbers.*and a dict with those of largest, within"),
        (lambda error: (1.0, 2.0, {"largest": 1}), "the further metrics largest; the model names largest, within"),
        (lambda error: (1.0, 2.0, 3.0), "the further metrics a float"),
        (lambda error: ((1.0, -1), 2.0, {"largest": 1, "within": 1}), "the weight of the loss of 4 records is -1"),
        (lambda error: (1.0, (2.0, float("nan")), {"largest": 1, "within": 1}), "the weight of the error.*is nan"),
        (lambda error: ((1.0, error), 2.0, {"largest": 1, "within": 1}), "the weights of the loss.*one number"),
    ],
)
def test_further_metrics_that_are_not_those_of_the_model_are_refused(sums, message):
    with pytest.raises(steadfast.InvalidError, match=message):
        several(sums)


def ranked(*columns):
    return several(lambda error: (1.0, 2.0, {"largest": 1, "within": steadfast.Ranked(*columns)}))


def test_a_further_metric_may_rank_the_records():
    scores, labels, weights = ranked([1, 2.5, -1, 0], [1, 0, True, 0])[-1]
    assert (scores.dtype, labels.dtype, weights.dtype) == (np.float32, np.bool_, np.float64)
    assert (labels.tolist(), weights.tolist()) == ([True, False, True, False], [1.0] * 4)
    assert ranked([1, 2], [1, 0], [3, 0.5])[-1][2].tolist() == [3.0, 0.5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1]), r"`within` ranks records by scores of the shape \[2\], with labels of the shape \[1\]"),
        (([[1, 2]], [[1, 0]]), "give each one number for each record"),
        (([1, 2], [1, 0], [1]), r"weights of the shape \[1\]"),
        (([1, float("nan")], [1, 0]), "has a score that is no number"),
        (([1, 2], [1, 2]), "a label that is neither 0 nor 1"),
        (([1, 2], [1, 0], [1, -1]), "weights that are not finite, or negative"),
    ],
)
def test_records_that_cannot_be_ranked_are_refused(columns, message):
    with pytest.raises(steadfast.InvalidError, match=message):
        ranked(*columns)


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
