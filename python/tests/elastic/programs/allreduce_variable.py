"""Adds one to a variable on each replica, step after step, until the file `stop` exists.

usage: allreduce_variable.py DIRECTORY
"""

import json
import pathlib
import sys

import tensorflow as tf

directory = pathlib.Path(sys.argv[1])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)


@tf.function
def step(stop):
    """Returns the number of replicas that were asked to stop, the same on all of them."""

    def on_a_replica():
        variable.assign_add(1.0)
        return stop

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(on_a_replica), axis=None)


def record(steps):
    line = dict(
        workers=strategy.num_replicas_in_sync,
        index=strategy.cluster_resolver.task_id,
        steps=steps,
        value=float(variable.numpy()),
    )
    print(line, flush=True)
    with open(directory / "records", "a") as records:
        records.write(json.dumps(line) + "\n")


steps = 0
stops = 0
while stops == 0:
    stops = step(tf.constant(int((directory / "stop").exists()))).numpy()
    steps += 1
    assert variable.numpy() == steps * strategy.num_replicas_in_sync, (variable, steps)
    if steps == 1:
        record(steps)
record(steps)
