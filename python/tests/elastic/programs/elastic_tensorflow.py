"""Adds the records of a dataset to a variable of MultiWorkerMirroredStrategy, in its process, until the file `stop` exists.

usage: elastic_tensorflow.py DIRECTORY
"""

import json
import os
import pathlib
import sys
import time

import steadfast.elastic as elastic
import tensorflow as tf
from steadfast.elastic.tensorflow import ElasticDataset

RECORDS, BATCH = 90, 12

directory = pathlib.Path(sys.argv[1])


def note(**line):
    line.update(node=os.environ["NODE"], pid=os.getpid())
    print(line, flush=True)
    with open(directory / "records", "a") as records:
        records.write(json.dumps(line) + "\n")


data = ElasticDataset(lambda epoch: tf.data.Dataset.range(RECORDS).shuffle(RECORDS, seed=epoch), batch_size=BATCH)
state = elastic.TensorFlowState(data=data, step=0, sums=[])


@elastic.run
def train(state):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM)
    state.attach([total])

    @tf.function
    def step(part):
        strategy.run(lambda: total.assign_add(tf.reduce_sum(part)))

    place = elastic.assignment()
    workers = strategy.num_replicas_in_sync
    note(begins=place.round, workers=workers, step=state.step, total=int(total.numpy()))
    assert workers == place.world_size
    while True:
        for part in data:
            step(part)
            state.step += 1
            if state.step % 4 == 0:
                state.commit()
            else:
                state.check_host_updates()
            time.sleep(0.02)
        state.sums.append(int(total.numpy()))
        # All leave after the same epoch.
        if elastic.group().max([int((directory / "stop").exists())])[0]:
            break
    note(sums=state.sums, epoch=data.epoch)


train(state)
