"""Checks the TF_CONFIG of this worker, records it, and stays until the file `stop` exists.

usage: tf_config.py DIRECTORY
"""

import json
import os
import pathlib
import socket
import sys
import time


def check_with_tensorflow(given):
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == given["cluster"], given
    assert resolver.task_type == given["task"]["type"], given
    assert resolver.task_id == given["task"]["index"], given


directory = pathlib.Path(sys.argv[1])
given = json.loads(os.environ["TF_CONFIG"])
assert list(given["cluster"]) == ["worker"], given
workers = given["cluster"]["worker"]
index = given["task"]["index"]

assert given["task"]["type"] == "worker", given
assert 0 <= index < len(workers), given
assert len(set(workers)) == len(workers), given
assert os.environ["RANK"] == str(index), given
assert os.environ["WORLD_SIZE"] == str(len(workers)), given
# Once in each round: the import takes seconds, and all workers are given the same cluster.
if index == len(workers) - 1:
    check_with_tensorflow(given)

# TensorFlow would listen here; this fails if the address is not of this worker.
host, port = workers[index].rsplit(":", 1)
with socket.create_server((host, int(port))):
    print("TF_CONFIG", given, flush=True)
    with open(directory / "records", "a") as records:
        records.write(json.dumps(dict(given, node=os.environ["NODE"])) + "\n")
    while not (directory / "stop").exists():
        time.sleep(0.05)
