"""Trains with TensorFlow's ParameterServerStrategy and ClusterCoordinator, asynchronously.

train_tensorflow.py DATA SIZE STEPS_PER_CLOSURE
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Callable, Dict, List, NamedTuple, Tuple

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import recovery  # noqa: E402
import task  # noqa: E402
import tensorflow as tf  # noqa: E402

PARTITION_BYTES = 256 << 10
"""Smallest part of a variable that is split between servers, as TensorFlow's guide proposes."""


def serve() -> None:
    """Runs one worker or parameter server, until it is killed."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1,
        # With fewer, calls of the coordinator can wait for each other.
        inter_op_parallelism_threads=task.WORKERS + 1,
    )
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    )
    server.join()


def start(cluster: dict, role: str, index: int) -> subprocess.Popen:
    configuration = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
    return subprocess.Popen([sys.executable, __file__, "serve"], env={**os.environ, "TF_CONFIG": configuration})


def parts(variable) -> list:
    """Returns the variables of a sharded variable, or the variable itself."""
    return list(getattr(variable, "variables", [variable]))


class Training(NamedTuple):
    coordinator: tf.distribute.coordinator.ClusterCoordinator
    layers: list
    """Weights and biases."""
    closure: Callable
    """A number of steps of one worker."""
    records: object
    """The argument of the closure."""

    def schedule(self):
        return self.coordinator.schedule(self.closure, args=(self.records,))


def prepare(directory: pathlib.Path, size: task.Size, steps_per_closure: int, cluster: dict) -> Training:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(PARTITION_BYTES, max_shards=task.PSERVERS)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    widths = [task.FEATURES, *size.hidden, size.classes]
    tf.random.set_seed(0)
    initial = tf.keras.initializers.GlorotUniform(seed=0)
    layers = []
    with strategy.scope():
        for inputs, outputs in zip(widths, widths[1:]):
            weight = tf.Variable(lambda s=(inputs, outputs), **more: initial(shape=s, **more), shape=(inputs, outputs))
            layers.append((weight, tf.Variable(tf.zeros(outputs))))
    flat = [part for layer in layers for variable in layer for part in parts(variable)]

    def dataset():
        features, label = task.read(directory, size)
        batches = size.records // size.batch
        features = tf.constant(features.reshape(batches, size.batch, task.FEATURES))
        label = tf.constant(label.reshape(batches, size.batch))
        numbers = tf.data.Dataset.range(batches).shuffle(batches).repeat()
        return numbers.map(lambda i: (features[i], label[i]))

    records = iter(coordinator.create_per_worker_dataset(dataset))

    def step(iterator) -> None:
        value, label = next(iterator)
        with tf.GradientTape() as tape:
            for number, (weight, bias) in enumerate(layers):
                value = tf.nn.relu(value) if number else value
                value = tf.matmul(value, tf.concat(parts(weight), 0)) + tf.concat(parts(bias), 0)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=value)
            loss = tf.reduce_mean(losses)
        for part, gradient in zip(flat, tape.gradient(loss, flat)):
            part.assign_sub(size.learning_rate * gradient)

    @tf.function
    def closure(iterator):
        for _ in tf.range(steps_per_closure):
            step(iterator)

    return Training(coordinator, layers, closure, records)


def train(directory: pathlib.Path, size: task.Size, steps_per_closure: int, cluster: dict) -> None:
    training = prepare(directory, size, steps_per_closure, cluster)

    def run(worker_steps: int) -> int:
        """Returns the number of steps that were done."""
        closures = max(1, worker_steps // steps_per_closure)
        for _ in range(closures):
            training.schedule()
        training.coordinator.join()
        return closures * steps_per_closure

    warm = run(int(task.WARM_UP * size.worker_steps))
    begin = time.time()
    done = run(size.worker_steps - warm)
    end = time.time()
    arrays = [tuple(tf.concat(parts(it), 0).numpy() for it in layer) for layer in training.layers]
    task.report(begin, end, done, task.loss(directory, size, arrays))


def start_all() -> Tuple[dict, Dict[str, List[subprocess.Popen]]]:
    """Starts workers and parameter servers; returns the cluster, and its processes by role."""
    roles = {"worker": task.WORKERS, "ps": task.PSERVERS}
    cluster = {role: [recovery.free_address() for _ in range(count)] for role, count in roles.items()}
    cluster["chief"] = [recovery.free_address()]
    return cluster, {role: [start(cluster, role, index) for index in range(count)] for role, count in roles.items()}


def end(servers: Dict[str, List[subprocess.Popen]]) -> None:
    """Ends all processes, also this one: the coordinator's threads would repeat their calls."""
    for server in [it for role in servers.values() for it in role]:
        server.kill()
        server.wait()
    os._exit(0)


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
        return
    directory, size, steps_per_closure = pathlib.Path(sys.argv[1]), task.SIZES[sys.argv[2]], int(sys.argv[3])
    cluster, servers = start_all()
    try:
        train(directory, size, steps_per_closure, cluster)
    except Exception:
        traceback.print_exc()
    end(servers)


if __name__ == "__main__":
    main()
