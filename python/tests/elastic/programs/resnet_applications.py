"""Trains a ResNet of Keras's applications for a few steps on images of CIFAR-10's shape.

It has 2 blocks; ResNet-50 has 16, which take much longer to trace. The images are generated: the mean of
an image is a function of its label.

usage: resnet_applications.py DIRECTORY
"""

import json
import pathlib
import sys

import numpy as np
import tensorflow as tf

# Keras 3 does not train with MultiWorkerMirroredStrategy.
import tf_keras as keras
from tf_keras.src.applications import resnet

EPOCHS = 2
STEPS = 2
BATCH_PER_WORKER = 4

directory = pathlib.Path(sys.argv[1])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
workers = strategy.num_replicas_in_sync


def images_like_cifar(count):
    random = np.random.default_rng(1)
    labels = random.integers(0, 10, count)
    images = random.normal(size=(count, 32, 32, 3)) + labels.reshape(-1, 1, 1, 1) / 10
    return images.astype(np.float32), labels


def batches(data):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return dataset.repeat().batch(BATCH_PER_WORKER * workers).with_options(options)


def blocks(x):
    x = resnet.stack1(x, 64, 1, stride1=1, name="conv2")
    return resnet.stack1(x, 128, 1, name="conv3")


class Record(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        record(epoch=epoch, loss=logs["loss"])


def record(**line):
    line.update(workers=workers, index=strategy.cluster_resolver.task_id)
    print(line, flush=True)
    with open(directory / "records", "a") as records:
        records.write(json.dumps(line) + "\n")


keras.utils.set_random_seed(1)
with strategy.scope():
    model = resnet.ResNet(
        blocks,
        preact=False,
        use_bias=True,
        model_name="resnet8",
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
    )
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
history = model.fit(
    batches(images_like_cifar(240)),
    epochs=EPOCHS,
    steps_per_epoch=STEPS,
    callbacks=[keras.callbacks.BackupAndRestore(str(directory / "backup")), Record()],
    verbose=0,
)
weights = float(sum(tf.reduce_sum(tf.abs(it)) for it in model.trainable_variables))
record(finished=True, weights=weights)
