"""The state and the data of a program with TensorFlow, in one process."""

from __future__ import annotations

from typing import Any, List

import pytest
import steadfast
from steadfast import elastic

tf = pytest.importorskip("tensorflow")

from steadfast.elastic.tensorflow import ElasticDataset  # noqa: E402


def as_worker(rank: int, world_size: int, call: Any) -> Any:
    """Returns what the call returns on a worker of a round."""

    class Some(elastic.SoloAgent):
        def assignment(self):
            return super().assignment()._replace(rank=rank, world_size=world_size)

    membership = elastic.Membership(Some(), lambda _: elastic.SoloGroup())
    return elastic.run(membership=membership)(lambda state: call())(elastic.ObjectState())


def data() -> ElasticDataset:
    def records(epoch: int) -> Any:
        return tf.data.Dataset.range(22).shuffle(22, seed=epoch, reshuffle_each_iteration=False)

    return ElasticDataset(records, batch_size=8)


def take(dataset: ElasticDataset, count: int) -> List[List[int]]:
    """Returns the parts of so many batches."""
    return [part.numpy().tolist() for _, part in zip(range(count), dataset)]


def test_workers_divide_the_same_batches_whatever_their_number():
    """S003-52: no record is lost or repeated, and all take the same number of steps."""
    whole = as_worker(0, 1, lambda: take(data(), 9))
    assert sorted(sum(whole, [])) == list(range(22)) and [len(it) for it in whole] == [8, 8, 6]
    for world_size in (2, 3, 7):
        parts = [as_worker(rank, world_size, lambda: take(data(), 9)) for rank in range(world_size)]
        for step, batch in enumerate(whole):
            assert sorted(sum((it[step] for it in parts), [])) == sorted(batch)


def test_a_dataset_goes_on_where_the_state_was_saved():
    """S003-52: the position of `tf.data` is part of the state, for another number of workers, too."""
    whole = as_worker(0, 1, lambda: take(data(), 9))
    dataset = data()
    state = elastic.ObjectState(data=dataset)
    first = as_worker(0, 1, lambda: take(dataset, 1))
    state.save()
    as_worker(0, 1, lambda: take(dataset, 9))
    assert (dataset.epoch, dataset.batches) == (1, 0)
    state.restore()
    assert (dataset.epoch, dataset.batches) == (0, 1)
    left = [as_worker(rank, 2, lambda: take(again(state), 9)) for rank in range(2)]
    assert first == whole[:1]
    assert [sorted(one + other) for one, other in zip(*left)] == [sorted(it) for it in whole[1:]]


def again(state: Any) -> ElasticDataset:
    state.restore()
    return state.data


def test_each_epoch_has_its_own_order_and_records_of_several_parts_are_divided_alike():
    dataset = data()
    first, second = (as_worker(0, 1, lambda: take(dataset, 9)) for _ in range(2))
    assert dataset.epoch == 2 and first != second and sorted(sum(second, [])) == list(range(22))

    def records(epoch: int) -> Any:
        return tf.data.Dataset.range(4).map(lambda it: (it, {"twice": 2 * it}))

    (one,) = as_worker(1, 2, lambda: list(ElasticDataset(records, batch_size=4)))
    assert one[0].numpy().tolist() == [1, 3] and one[1]["twice"].numpy().tolist() == [2, 6]
    with pytest.raises(steadfast.InvalidError, match="`batch_size` is 0"):
        ElasticDataset(records, batch_size=0)


def test_variables_of_a_new_round_have_the_values_of_the_last_one():
    """S001-41: variables are made again, since those of another runtime are not valid any more."""
    state = elastic.TensorFlowState(step=0)
    state.attach([tf.Variable([1.0, 2.0]), tf.Variable(3)])
    state.step = 5
    state.save()
    state.reset()
    with pytest.raises(steadfast.InvalidError, match="variables have other shapes"):
        state.attach([tf.Variable([0.0]), tf.Variable(0)])
    weights, count = tf.Variable([0.0, 0.0]), tf.Variable(0)
    state.attach([weights, count])
    assert weights.numpy().tolist() == [1.0, 2.0] and count.numpy() == 3
    weights.assign([7.0, 7.0])
    state.step = 9
    state.restore()
    assert weights.numpy().tolist() == [1.0, 2.0] and state.step == 5


def test_a_failed_operation_of_tensorflow_is_one_of_the_group():
    from steadfast.elastic._failures import collective_failure, may_be_collective

    lost = tf.errors.UnavailableError(None, None, "Collective ops is aborted")
    assert isinstance(collective_failure(lost), elastic.WorkerLost)
    cancelled = tf.errors.CancelledError(None, None, "derived")
    assert collective_failure(cancelled) is None and may_be_collective(cancelled)
    assert not may_be_collective(ValueError("shapes"))


def test_a_keras_model_of_a_strategy_goes_on_in_the_next_round():
    """S003-50: weights, running statistics and the optimizer, with the bits of a model that was never made again."""
    keras = pytest.importorskip("tf_keras")
    tf.random.set_seed(1)

    def built() -> Any:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.layers.Input((4,)), *layers])
            model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def values(model: Any) -> List[Any]:
        return [it.numpy().tolist() for it in [*model.variables, *model.optimizer.variables]]

    def train(model: Any) -> None:
        model.train_on_batch(tf.reshape(tf.range(32.0), (8, 4)) / 32, tf.ones((8, 1)))

    state = elastic.TensorFlowState()
    model = built()
    state.attach([*model.variables, *model.optimizer.variables])
    train(model)
    state.save()
    saved = values(model)
    train(model)
    wanted = values(model)
    del model
    state.restore()
    state.reset()
    model = built()
    state.attach([*model.variables, *model.optimizer.variables])
    assert values(model) == saved
    train(model)
    assert values(model) == wanted
