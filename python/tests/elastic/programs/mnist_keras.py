"""Recognizes handwritten digits with Keras on several workers, until the file `stop` exists.

The usual first program for MNIST, on a smaller data set: 1 797 images of 8 × 8 pixels.

usage: mnist_keras.py DIGITS_CSV DIRECTORY
"""

import json
import pathlib
import sys

import numpy as np
import tensorflow as tf

# Keras 3 does not train with MultiWorkerMirroredStrategy.
import tf_keras as keras

TRAINING = 1536
# Divisible by two and by three workers.
GLOBAL_BATCH = 96

directory = pathlib.Path(sys.argv[2])
# Creates the strategy first: it connects to the other workers.
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def digits(path):
    values = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32)
    images = values[:, :-1].reshape(-1, 8, 8, 1) / 16
    labels = values[:, -1].astype(np.int64)
    return (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])


def batches(data):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    shuffled = tf.data.Dataset.from_tensor_slices(data).shuffle(TRAINING, seed=1)
    return shuffled.repeat().batch(GLOBAL_BATCH).with_options(options)


def network():
    net = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    net.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return net


def record(**line):
    print(line, flush=True)
    # Metrics are the same on all workers.
    if strategy.cluster_resolver.task_id == 0:
        with open(directory / "records", "a") as records:
            records.write(json.dumps(line) + "\n")


class Record(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        record(epoch=epoch, workers=strategy.num_replicas_in_sync, loss=logs["loss"])


class StopOnRequest(keras.callbacks.Callback):
    """Ends training on all workers after the same epoch."""

    def on_epoch_end(self, epoch, logs=None):
        asked = tf.constant(int((directory / "stop").exists()))
        everywhere = strategy.run(lambda: tf.identity(asked))
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, everywhere, axis=None)
        self.model.stop_training = bool(total > 0)


training, test = digits(sys.argv[1])
keras.utils.set_random_seed(1)
with strategy.scope():
    model = network()
model.fit(
    batches(training),
    epochs=10_000,
    steps_per_epoch=TRAINING // GLOBAL_BATCH,
    callbacks=[
        keras.callbacks.BackupAndRestore(str(directory / "backup")),
        Record(),
        StopOnRequest(),
    ],
    verbose=0,
)
# Each worker evaluates its own copy.
predicted = model(test[0], training=False).numpy().argmax(axis=1)
record(accuracy=float((predicted == test[1]).mean()))
