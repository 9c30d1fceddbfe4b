"""Groups of plain connections, for programs without PyTorch."""

from __future__ import annotations

import pathlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List

import pytest
from nodes import Nodes
from steadfast import elastic
from steadfast.elastic._sockets import SocketGroup

from coordinator import free_port


def places(world_size: int) -> List[elastic.Assignment]:
    port = free_port()
    return [
        elastic.Assignment(3, rank, 0, world_size, 1, rank, world_size, "127.0.0.1", port) for rank in range(world_size)
    ]


def on_all(world_size: int, call: Callable[[SocketGroup, int], Any]) -> List[Any]:
    """Calls a function on each worker of a group, in threads; returns its results or its errors."""

    def run(place: elastic.Assignment) -> Any:
        group = SocketGroup(place, timeout=20, form_timeout=20)
        try:
            return call(group, place.rank)
        except elastic.CollectiveError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, places(world_size)))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_ranks_get_the_maxima_and_the_data_of_the_root(world_size):
    """S001-41: also more data than a connection takes at once, and none."""

    def call(group: SocketGroup, rank: int) -> Any:
        found = [group.max([rank, -rank, 1 << 62])]
        for root in range(world_size):
            for size in (0, 1, 3_000_000):
                data = bytes([root + 1]) * size
                found.append(bytes(group.broadcast_bytes(data if rank == root else None, root)) == data)
        return [*found, group.max([])]

    wanted = [[world_size - 1, 0, 1 << 62], *[True] * (3 * world_size), []]
    assert on_all(world_size, call) == [wanted] * world_size


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_worker_that_leaves_is_noticed_by_all_at_once(leaves):
    started = time.monotonic()

    def call(group: SocketGroup, rank: int) -> Any:
        group.max([0])
        return None if rank == leaves else group.max([1])

    found = on_all(4, call)
    assert found.pop(leaves) is None
    assert all(isinstance(it, elastic.WorkerLost) for it in found)
    assert time.monotonic() - started < 10


def test_workers_that_call_different_operations_are_told():
    def call(group: SocketGroup, rank: int) -> Any:
        return group.max([1]) if rank == 0 else group.broadcast_bytes(b"12345678", 1)

    first, _ = on_all(2, call)
    assert isinstance(first, elastic.CollectiveError) and "different operations" in str(first)


def test_a_group_that_is_not_complete_is_left_in_time_or_when_its_round_is_over():
    place = places(3)[0]
    with pytest.raises(elastic.CollectiveError, match="not formed in time: 2 of 3 workers have not come"):
        SocketGroup(place, form_timeout=0.2)
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    with pytest.raises(elastic.CollectiveError, match="the round is over: rank 0 does not serve"):
        SocketGroup(place._replace(rank=1), is_over=over.is_set)


def test_strangers_are_no_members_of_a_group():
    """Workers of another round, and programs that are none, do not take a place."""
    some = places(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(SocketGroup, some[0], form_timeout=20)
        for hello in (b"GET / HTTP/1.1\r\n\r\n" * 3, b""):
            while True:
                try:
                    stranger = socket.create_connection(("127.0.0.1", some[0].master_port), 1)
                    break
                except OSError:
                    time.sleep(0.01)
            stranger.sendall(hello)
            stranger.close()
        with pytest.raises(elastic.CollectiveError):
            SocketGroup(some[1]._replace(round=2), form_timeout=5)
        second = SocketGroup(some[1], form_timeout=20)
        own = pool.submit(first.result().max, [7])
        assert second.max([5]) == own.result() == [7]
        first.result().close()
        second.close()


PROGRAM = """
import sys
import time
import numpy as np
import steadfast.elastic as elastic

PREPARE
state = elastic.STATE

@elastic.run
def train(state):
    place = elastic.assignment()
    print("round of", place.world_size, "at", state.step, "sum", total(), flush=True)
    assert "torch" not in sys.modules
    while True:
        state.step += 1
        add()
        assert total() == state.step * SIZE, (total(), state.step)
        if state.step % 5 == 0:
            print("committed", state.step, flush=True)
            state.commit()
        else:
            state.check_host_updates()
        time.sleep(0.02)

train(state)
"""

ARRAYS = """
SIZE = 500_000
def total():
    return int(state.values.sum())
def add():
    state.values += 1
"""

VARIABLES = """
import tensorflow as tf
SIZE = 6
weights, bias = tf.Variable(tf.zeros((2, 2))), tf.Variable(tf.zeros(2))
def total():
    return int(tf.reduce_sum(weights) + tf.reduce_sum(bias))
def add():
    weights.assign_add(tf.ones((2, 2)))
    bias.assign_add(tf.ones(2))
"""


KERAS = """
import keras
SIZE = 6
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_initializer="zeros")])
def total():
    return int(sum(float(it.numpy().sum()) for it in model.weights))
def add():
    for it in model.weights:
        it.assign_add(it * 0 + 1)
"""


def lines(log: pathlib.Path, word: str) -> List[str]:
    return [it for it in log.read_text().splitlines() if word in it]


@pytest.mark.parametrize(
    ("prepare", "state"),
    [
        (ARRAYS, "ObjectState(values=np.zeros(SIZE), step=0)"),
        (VARIABLES, "ObjectState(variables=[weights, bias], step=0)"),
        (KERAS, "KerasState(model, step=0)"),
    ],
    ids=["arrays", "variables", "keras"],
)
def test_programs_without_torch_keep_their_state_when_workers_come_and_go(tmp_path, monkeypatch, prepare, state):
    """S001-41: real agents; one node joins, and one is killed."""
    if prepare != ARRAYS:
        pytest.importorskip("tensorflow")
        pytest.importorskip("keras")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("PREPARE", prepare).replace("STATE", state))
    command = [sys.executable, str(file)]
    with Nodes(1, 2, tmp_path) as nodes:
        nodes.add(command)
        log = tmp_path / "node-1.log"
        nodes.until(lambda: lines(log, "committed 10"), "commits of one worker")
        second = nodes.add(command)
        other = tmp_path / "node-2.log"
        nodes.until(lambda: len(lines(other, "committed")) > 1, "commits of two workers")
        # A new worker begins where the old one was.
        (begin,) = lines(other, "round of 2")
        assert int(begin.split(" at ")[1].split()[0]) >= 10
        nodes.kill(second)
        nodes.until(lambda: len(lines(log, "round of 1")) == 2, "the round without the other")
        last = lines(log, "round of 1")[-1]
        committed = max(int(it.split()[-1]) for it in lines(log, "committed") + lines(other, "committed"))
        nodes.until(lambda: f"committed {committed + 5}" in log.read_text(), "further commits")
        # Back to a commit, not to the start.
        assert int(last.split(" at ")[1].split()[0]) >= committed - 5
