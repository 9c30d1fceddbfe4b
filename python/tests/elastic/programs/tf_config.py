"""Checks the TF_CONFIG of this worker, records it, and stays until the file `stop` exists.

usage: tf_config.py DIRECTORY
"""

import json
import os
import pathlib
import socket
import sys
import time

import tensorflow as tf

directory = pathlib.Path(sys.argv[1])
given = json.loads(os.environ["TF_CONFIG"])
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
cluster = resolver.cluster_spec()
workers = cluster.job_tasks("worker")

assert cluster.as_dict() == given["cluster"], given
assert cluster.jobs == ["worker"], given
assert resolver.task_type == "worker", given
assert 0 <= resolver.task_id < len(workers), given
assert len(set(workers)) == len(workers), given
assert os.environ["RANK"] == str(resolver.task_id), given
assert os.environ["WORLD_SIZE"] == str(len(workers)), given

# TensorFlow would listen here; this fails if the address is not of this worker.
host, port = workers[resolver.task_id].rsplit(":", 1)
with socket.create_server((host, int(port))):
    print("TF_CONFIG", given, flush=True)
    with open(directory / "records", "a") as records:
        records.write(json.dumps(dict(given, node=os.environ["NODE"])) + "\n")
    while not (directory / "stop").exists():
        time.sleep(0.05)
