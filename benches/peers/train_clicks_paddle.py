"""Trains the click model with the parameter servers of Paddle Fleet: train_clicks_paddle.py DATA SIZE."""

import os
import pathlib
import sys
import time
from typing import Iterator

import clicks
import numpy as np
import paddle
import task
import train_paddle
from paddle import static
from paddle.distributed import fleet

DEVIATION = 0.01
"""Of initial weights and factors."""
LEARNING_RATE = 0.005
"""Of Adam: parameters outside of tables cannot have Adagrad in this mode."""


def network(size: clicks.Clicks, rows: int):
    """Returns the outputs of a batch and their mean loss, in Paddle's static graph."""
    counts = static.data("counts", [None, clicks.COUNTS], "float32")
    ids = static.data("rows", [None, 1], "int64")
    label = static.data("label", [None, 1], "float32")
    # The first value of a row is the weight.
    width = 1 + size.factors
    initial = paddle.nn.initializer.Normal(0.0, DEVIATION)
    table = paddle.ParamAttr(name="table", initializer=initial)
    values = static.nn.sparse_embedding(ids, [rows, width], param_attr=table).reshape([-1, clicks.COLUMNS, width])
    of_counts = static.create_parameter([clicks.COUNTS, width], "float32", default_initializer=initial)
    factors = values[:, :, 1:]
    sums = values.sum(1) + counts @ of_counts
    squares = factors.square().sum([1, 2]) + (counts.square() @ of_counts[:, 1:].square()).sum(1)
    pairs = 0.5 * (sums[:, 1:].square().sum(1) - squares)
    deep = paddle.concat([factors.reshape([-1, clicks.COLUMNS * size.factors]), counts], 1)
    for hidden in size.hidden:
        deep = static.nn.fc(deep, hidden, activation="relu")
    # The bias is that of the last layer.
    outputs = static.nn.fc(deep, 1) + (sums[:, 0] + pairs).reshape([-1, 1])
    return outputs, paddle.nn.functional.binary_cross_entropy_with_logits(outputs, label)


def feed(records: clicks.Records, batch: slice) -> dict:
    return {
        "counts": records.counts[batch],
        "rows": records.rows[batch].reshape(-1, 1),
        "label": records.label[batch].reshape(-1, 1),
    }


def batches(size: clicks.Clicks, records: clicks.Records, rank: int) -> Iterator[dict]:
    """Returns the part of a worker of each step."""
    batch = size.batch // task.WORKERS
    for start in range(rank * batch, len(records.label), size.batch):
        yield feed(records, slice(start, start + batch))


def wait_for_all(what: str, rank: int) -> None:
    """Waits for the other workers; Paddle's own barrier does nothing without gloo."""
    files = [pathlib.Path(os.environ["TEST_LOGS"], f"{what}-{it}") for it in range(task.WORKERS)]
    files[rank].touch()
    while not all(it.exists() for it in files):
        time.sleep(0.001)


def process(directory: pathlib.Path, size: clicks.Clicks) -> None:
    """One worker or parameter server, as the variables of the environment say."""
    paddle.enable_static()
    paddle.seed(0)
    fleet.init(is_collective=False)
    outputs, loss = network(size, clicks.table_rows(directory, size))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    fleet.distributed_optimizer(paddle.optimizer.Adam(LEARNING_RATE), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = static.Executor(paddle.CPUPlace())
    executor.run(static.default_startup_program())
    fleet.init_worker()
    rank, program = fleet.worker_index(), static.default_main_program()
    is_trained = clicks.is_trained(size)
    records = clicks.read(directory, size, is_trained)
    for number in range(size.passes):
        wait_for_all(f"pass {number}", rank)
        # That of the last pass remains.
        start = time.time()
        for batch in batches(size, records, rank):
            executor.run(program, feed=batch)
    wait_for_all("end", rank)
    end = time.time()
    if rank == 0:
        held_out = clicks.read(directory, size, ~is_trained)
        # The program would also train on these records, but only after it has computed the outputs.
        found = executor.run(program, feed=feed(held_out, slice(None)), fetch_list=[outputs])[0]
        found = clicks.loss(np.asarray(found).reshape(-1), held_out.label)
        task.report(start, end, size.records_of_pass / 1000, found)
    fleet.stop_worker()


if __name__ == "__main__":
    if "TRAINING_ROLE" in os.environ:
        process(pathlib.Path(sys.argv[1]), clicks.CLICKS)
    else:
        train_paddle.launch()
