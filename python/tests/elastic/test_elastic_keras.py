"""The state of a Keras model."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import steadfast
from steadfast import elastic
from threads import Threads

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")


def built() -> Any:
    model = keras.Sequential(
        [
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.build((None, 4))
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    return model


def train_batch(model: Any) -> None:
    model.train_on_batch(np.ones((8, 4), np.float32), np.zeros((8, 1), np.float32))


def variables(model: Any) -> List[np.ndarray]:
    return [np.asarray(it).copy() for it in [*model.variables, *model.optimizer.variables]]


def equal(one: List[np.ndarray], other: List[np.ndarray]) -> bool:
    return len(one) == len(other) and all((a == b).all() for a, b in zip(one, other))


def test_a_model_that_is_not_built_is_refused():
    """S001-41"""
    with pytest.raises(steadfast.InvalidError, match="Model must be built first"):
        elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_model_optimizer_and_attributes_go_back_together():
    """S001-41"""
    model = built()
    state = elastic.KerasState(model, batch=0)
    initial = variables(model)
    train_batch(model)
    state.batch = 1
    state.save()
    saved = variables(model)
    assert not equal(saved, initial)
    train_batch(model)
    state.batch = 2
    state.restore()
    assert equal(variables(model), saved)
    assert state.batch == 1
    # The same bits as without the detour: random layers and momentum go back too.
    train_batch(model)
    once = variables(model)
    state.restore()
    train_batch(model)
    assert equal(variables(model), once)


def test_before_a_commit_the_initial_weights_come_back():
    model = built()
    state = elastic.KerasState(model)
    initial = variables(model)
    train_batch(model)
    state.restore()
    assert equal(variables(model), initial)


def test_workers_get_the_model_of_the_oldest():
    with Threads("a", "b") as workers:
        models = {member: built() for member in ("a", "b")}
        train_batch(models["a"])
        expected = variables(models["a"])

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                return equal(variables(models[member]), expected), state.epoch

            return train(elastic.KerasState(models[member], epoch={"a": 4}.get(member, 0)))

        assert workers.run(program, "a", "b") == [(True, 4)] * 2


def test_a_model_of_another_shape_is_refused():
    state = elastic.KerasState(built())
    other = keras.Sequential([keras.layers.Dense(2)])
    other.build((None, 4))
    with pytest.raises(steadfast.InvalidError, match="another `model`"):
        elastic.KerasState(other, optimizer=keras.optimizers.SGD())._load(state._saved)


def test_half_precision_weights_come_back():
    layer = keras.layers.Dense(2, dtype="bfloat16")
    model = keras.Sequential([layer])
    model.build((None, 4))
    state = elastic.KerasState(model)
    before = np.asarray(layer.kernel).copy()
    layer.kernel.assign(before * 0)
    state.restore()
    assert (np.asarray(layer.kernel).copy() == before).all()
