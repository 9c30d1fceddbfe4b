"""TensorFlow's own elastic programs: nodes join and leave, and no program knows of it.

Needs tensorflow (or tensorflow-cpu) and tf_keras.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
from typing import Callable

import pytest
from nodes import Nodes, Process

PROGRAMS = pathlib.Path(__file__).parent / "programs"
DIGITS = pathlib.Path(__file__).parents[3] / "examples" / "data" / "digits.csv"

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("tensorflow") and importlib.util.find_spec("tf_keras")),
    reason="needs tensorflow and tf_keras in this Python",
)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    # Three workers share the cores of a small machine.
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    with Nodes(2, 3, logs=tmp_path) as them:
        yield them


def program(name: str, *arguments: pathlib.Path) -> list[str]:
    return [sys.executable, str(PROGRAMS / name), *map(str, arguments)]


def records(directory: pathlib.Path) -> list[dict]:
    """What the programs have recorded; without a line that is still being written."""
    path = directory / "records"
    text = path.read_text() if path.exists() else ""
    return [json.loads(it) for it in text.split("\n")[:-1]]


def stop(nodes: Nodes, directory: pathlib.Path) -> None:
    """Asks the programs to end, and waits until they have, with success."""
    (directory / "stop").touch()
    nodes.wait()


def test_tf_config(nodes, tmp_path):
    """S003-30: each worker gets the same cluster and an index of its own."""
    members = [nodes.add(program("tf_config.py", tmp_path)) for _ in range(2)]
    until_configured(nodes, tmp_path, members)
    stop(nodes, tmp_path)
    assert len(records(tmp_path)) == 2


def test_tf_config_growth(nodes, tmp_path):
    """S003-31: after a node has joined, each worker gets a cluster of three."""
    members = [nodes.add(program("tf_config.py", tmp_path)) for _ in range(2)]
    until_configured(nodes, tmp_path, members)
    members.append(nodes.add(program("tf_config.py", tmp_path)))
    until_configured(nodes, tmp_path, members)
    stop(nodes, tmp_path)


def test_tf_config_shrink(nodes, tmp_path):
    """S003-32: after a node has left, the others get a cluster of two."""
    members = [nodes.add(program("tf_config.py", tmp_path)) for _ in range(3)]
    until_configured(nodes, tmp_path, members)
    # The worker that the others connect to.
    first = next(it["node"] for it in reversed(records(tmp_path)) if it["task"]["index"] == 0)
    leaves = next(it for it in members if it.name == first)
    members.remove(leaves)
    nodes.remove(leaves)
    until_configured(nodes, tmp_path, members)
    stop(nodes, tmp_path)


def until_configured(nodes: Nodes, directory: pathlib.Path, members: list[Process]) -> None:
    """Waits until the last records are one consistent configuration of exactly these nodes."""
    nodes.wait_round(len(members))
    names = sorted(it.name for it in members)

    def are_configured() -> bool:
        last = records(directory)[-len(members) :]
        return (
            sorted(it["task"]["index"] for it in last) == list(range(len(members)))
            and all(it["cluster"] == last[0]["cluster"] for it in last)
            and len(last[0]["cluster"]["worker"]) == len(members)
            and sorted(it["node"] for it in last) == names
        )

    nodes.until(are_configured, f"TF_CONFIG of {len(members)} workers")


def test_Collectiveallreduce_variable(nodes, tmp_path):
    """S003-33: a variable summed over replicas reflects 2, then 3, then 2 workers."""
    two_three_two(nodes, program("allreduce_variable.py", tmp_path), tmp_path, nodes.remove)
    stop(nodes, tmp_path)
    recorded = records(tmp_path)
    assert all(it["value"] == it["steps"] * it["workers"] for it in recorded)
    first, second = recorded[-2:]
    assert {first["index"], second["index"]} == {0, 1}
    assert first["value"] == second["value"]


def test_mnistElastic(nodes, tmp_path):
    """S003-34: a Keras model trains with 2, then 3, then 2 workers, and goes on from its backup.

    MNIST cannot be fetched in a test; the digits of `examples/data` take its place.
    """
    two_three_two(nodes, program("mnist_keras.py", DIGITS, tmp_path), tmp_path, nodes.kill)
    nodes.until(lambda: records(tmp_path)[-1]["loss"] < 0.1, "a loss below 0.1")
    stop(nodes, tmp_path)

    *epochs, end = records(tmp_path)
    assert [it["workers"] for it in epochs] == sorted_as_rounds(epochs)
    for before, after in zip(epochs, epochs[1:]):
        # An epoch is backed up before it is recorded; a worker can end between the two.
        steps = {1} if before["workers"] == after["workers"] else {1, 2}
        assert after["epoch"] - before["epoch"] in steps, epochs
        assert after["loss"] < epochs[0]["loss"], epochs
    assert end["accuracy"] > 0.85


def two_three_two(
    nodes: Nodes,
    command: list[str],
    directory: pathlib.Path,
    leave: Callable[[Process], None],
) -> None:
    """Runs a program on two nodes, on three, and on two again."""

    def until_recorded(workers: int) -> None:
        before = len(records(directory))
        nodes.wait_round(workers)
        nodes.until(
            lambda: any(it["workers"] == workers for it in records(directory)[before:]),
            f"a record of {workers} workers",
        )

    first, _ = nodes.add(command), nodes.add(command)
    until_recorded(2)
    nodes.add(command)
    until_recorded(3)
    leave(first)
    until_recorded(2)


def sorted_as_rounds(epochs: list[dict]) -> list[int]:
    """The numbers of workers, if there was one round of 2, one of 3, and one of 2."""
    three = sum(it["workers"] == 3 for it in epochs)
    before = next(number for number, it in enumerate(epochs) if it["workers"] == 3)
    return [2] * before + [3] * three + [2] * (len(epochs) - before - three)


def test_resnetApplications(nodes, tmp_path):
    """S003-35: a ResNet of Keras's applications trains for two epochs on two workers.

    CIFAR cannot be fetched in a test; generated images of its shape take its place.
    """
    for _ in range(2):
        nodes.add(program("resnet_applications.py", tmp_path))
    nodes.wait_round(2)
    nodes.wait()
    recorded = records(tmp_path)
    ends = [it for it in recorded if "finished" in it]
    assert {it["index"] for it in ends} == {0, 1}
    assert {it["workers"] for it in ends} == {2}
    assert ends[0]["weights"] == ends[1]["weights"]
    assert [it["epoch"] for it in recorded if it["index"] == 0 and "epoch" in it] == [0, 1]


def test_a_program_with_a_strategy_stays_in_its_process_and_uses_each_record_once(nodes, tmp_path):
    """S003-50, S003-52: nodes join, leave and are killed; the strategy is made again, and `tf.data` goes on."""
    command = program("elastic_tensorflow.py", tmp_path)
    first, second = nodes.add(command), nodes.add(command)

    def begun(workers: int) -> list[dict]:
        return [it for it in records(tmp_path) if it.get("workers") == workers]

    nodes.until(lambda: len(begun(2)) == 2, "two workers")
    third = nodes.add(command)
    nodes.until(lambda: len(begun(3)) == 3, "three workers")
    nodes.remove(second)
    nodes.until(lambda: len(begun(2)) == 4, "two workers again")
    nodes.add(command)
    nodes.until(lambda: len(begun(3)) == 6, "three workers again")
    # The first worker runs TensorFlow's coordination service.
    nodes.kill(first)
    nodes.until(lambda: len(begun(2)) == 6, "two workers after a loss")
    stop(nodes, tmp_path)
    found = records(tmp_path)
    # One process of each node, whatever came and went.
    assert len({it["pid"] for it in found}) == len({it["node"] for it in found}) == 4
    ends = [it for it in found if "sums" in it]
    assert len(ends) == 2 and ends[0]["sums"] == ends[1]["sums"]
    # Each epoch adds each record once: 0 to 89.
    assert ends[0]["sums"] == [4005 * (epoch + 1) for epoch in range(ends[0]["epoch"])]
    assert any(it["step"] > 0 for it in found if "begins" in it and it["node"] == third.name)
