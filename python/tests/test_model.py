"""What a model of any framework returns."""

from __future__ import annotations

import numpy as np
import pytest
import steadfast
from steadfast.model import evaluated


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
