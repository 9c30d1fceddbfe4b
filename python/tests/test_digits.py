"""Jobs with models in Python: the same bits with any processes, and under kills."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


def start(job: str, directory: pathlib.Path, trainers: int, pservers: int) -> subprocess.Popen:
    words = ["steadfast", "local", str(EXAMPLES / job), "--data-dir", str(directory)]
    counts = ["--trainers", str(trainers), "--pservers", str(pservers)]
    return subprocess.Popen(
        [*words, *counts, "--output", "json"], cwd=EXAMPLES, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out)


def trained(job: str, directory: pathlib.Path, trainers: int, pservers: int) -> dict:
    return finish(start(job, directory, trainers, pservers))


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> dict:
    """The perceptron, trained by one trainer with one parameter server."""
    return trained("digits.toml", tmp_path_factory.mktemp("reference"), 1, 1)


def test_a_perceptron_with_dropout_learns(reference):
    assert reference["metric"] > 0.9


@pytest.mark.parametrize(("trainers", "pservers"), [(2, 2), (3, 1), (5, 3)])
def test_the_result_does_not_depend_on_the_processes(reference, tmp_path, trainers, pservers):
    found = trained("digits.toml", tmp_path, trainers, pservers)
    assert found["parameters_sha256"] == reference["parameters_sha256"]


def test_the_result_does_not_depend_on_kills(reference, tmp_path):
    process = start("digits.toml", tmp_path, 2, 2)
    for _ in range(4):
        time.sleep(1.5)
        victims = trainers_of(process.pid)
        if victims:
            os.kill(victims[0], signal.SIGKILL)
    assert finish(process)["parameters_sha256"] == reference["parameters_sha256"]


def trainers_of(parent: int) -> list[int]:
    """The ids of the trainers that `steadfast local` (process `parent`) has started."""
    found = []
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children")
    for child in children.read_text().split() if children.exists() else []:
        words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"steadfast.trainer" in words:
            found.append(int(child))
    return found


def test_a_loop_of_ones_own_gives_the_same_bits_with_any_processes(tmp_path):
    one = trained("own_loop.toml", tmp_path / "one", 1, 1)
    two = trained("own_loop.toml", tmp_path / "two", 3, 2)
    assert one["parameters_sha256"] == two["parameters_sha256"]
    assert one["metric"] > 0.9
