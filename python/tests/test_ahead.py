"""Transforms in processes of their own: the same bits, whatever happens to the processes."""

from __future__ import annotations

import io
import logging
import os
import pathlib
import pickle
import re
import signal
import sys
import tarfile
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import steadfast
from conftest import EXAMPLES
from PIL import Image
from steadfast import _ahead

PROGRAM = """
import multiprocessing
import os
import random

import numpy as np
import steadfast.torch as st
import torch


def augmented(batch, key):
    features = np.array(batch["features"])
    if key is not None:
        # From each of the random states, and from a generator of its own.
        features += 0.01 * np.random.randn(*features.shape) + 0.001 * random.random()
        features += 0.01 * torch.rand(features.shape).numpy()
        features += 0.01 * np.random.default_rng(key.seed).random(features.shape)
    with open("processes", "a") as file:
        # The trainer itself has no parent in Python.
        file.write(f"{os.getpid() if multiprocessing.parent_process() else 0}\\n")
    return {**batch, "features": features.astype(np.float32)}


def build(spec):
    net = torch.nn.Sequential(
        torch.nn.Linear(spec.features, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 10)
    )
    workers = spec.options.get("workers", 0)
    return st.Model(net, torch.nn.functional.cross_entropy, transform=augmented, workers=workers)
"""


class Scaled(steadfast.Model):
    """A model whose transform is a method."""

    workers = 1

    def __init__(self, by: float, fails: str = "") -> None:
        self.by = by
        self.fails = fails

    def parameters(self):
        return {}

    def transform(self, batch, key):
        if self.fails == "dies":
            os._exit(3)
        if self.fails:
            raise ValueError(self.fails)
        noise = np.random.rand(len(batch["label"])).astype(np.float32)
        return {"label": batch["label"] * self.by + noise, "of": np.array([os.getpid()] * len(noise))}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        raise NotImplementedError

    def evaluate(self, parameters, batch):
        raise NotImplementedError


BATCH = {"label": np.arange(3, dtype=np.float32)}


def transformed(model, key, digest=1):
    return _ahead.transformed(model, BATCH, key, digest, 3)


def test_a_key_is_the_same_in_another_process():
    key = steadfast.Key(7, 1, 2, 3)
    found = pickle.loads(pickle.dumps(key))
    assert (found.seed, found.lane, repr(found)) == (key.seed, 3, repr(key))


def test_a_batch_that_was_begun_has_the_bits_of_one_that_was_not():
    model, key = Scaled(2.0), steadfast.Key(7, 0, 1, 2)
    here = transformed(model, key)
    drawn = np.random.rand()
    _ahead.prepare(model, BATCH, key, 1)
    _ahead.prepare(model, BATCH, key, 1)
    there = transformed(model, key)
    assert here["of"][0] == os.getpid() != there["of"][0]
    assert here["label"].tobytes() == there["label"].tobytes()
    # Nor do the random numbers after it depend on where it ran.
    assert np.random.rand() == drawn
    # It is gone, and other records of the same key are others.
    assert transformed(model, key)["of"][0] == os.getpid()
    _ahead.prepare(model, BATCH, key, 1)
    assert transformed(model, key, digest=2)["of"][0] == os.getpid()


def test_a_process_that_is_killed_costs_no_batch(caplog):
    model, key = Scaled(2.0), steadfast.Key(7, 0, 1, 2)
    _ahead.prepare(model, BATCH, key, 1)
    first = transformed(model, key)
    os.kill(int(first["of"][0]), signal.SIGKILL)
    found, lane, deadline = first, 0, time.monotonic() + 60
    with caplog.at_level(logging.WARNING, "steadfast._ahead"):
        # Here, until another process takes its place.
        while found["of"][0] in (os.getpid(), first["of"][0]):
            assert time.monotonic() < deadline, "no other process has taken its place"
            lane += 1
            key = steadfast.Key(7, 0, 1, lane)
            _ahead.prepare(model, BATCH, key, 1)
            found = transformed(model, key)
            assert found["label"].shape == (3,)
    assert "a process that transforms batches has died" in caplog.text


def test_an_error_of_a_transform_is_that_of_its_batch():
    model, key = Scaled(2.0, fails="no such picture"), steadfast.Key(7, 0, 1, 2)
    _ahead.prepare(model, BATCH, key, 1)
    with pytest.raises(ValueError, match="no such picture"):
        transformed(model, key)


def test_processes_that_die_again_and_again_are_an_error():
    model = Scaled(2.0, fails="dies")
    model.workers = 1
    pool = _ahead._pool(model)
    with pytest.raises(steadfast.InvalidError, match="has died 4 times in a row"):
        for lane in range(5):
            key = steadfast.Key(7, 0, 1, lane)
            pool.submit(BATCH, key, 1)
            assert pool.take(key, 1) is None


@pytest.mark.parametrize("workers", [-1, 1.5, True, "2"])
def test_a_number_of_workers_is_a_number(workers):
    model = Scaled(2.0)
    model.workers = workers
    with pytest.raises(steadfast.InvalidError, match="a number of processes, from 0"):
        _ahead.prepares(model)


def test_a_transform_that_cannot_be_sent_is_refused():
    torch = pytest.importorskip("torch")
    st = pytest.importorskip("steadfast.torch")
    model = st.Model(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, transform=lambda it, key: it, workers=1)
    with pytest.raises(steadfast.InvalidError, match="cannot be sent to a process of its own.*top of a module"):
        _ahead.prepare(model, BATCH, steadfast.Key(1, 0, 0, 0), 1)
    with pytest.raises(steadfast.InvalidError, match="`workers` are processes in which `transform` runs"):
        st.Model(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, workers=1)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains with so many workers; returns the summary and the processes that transformed."""
    pytest.importorskip("torch")
    (tmp_path / "augmented.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    data = dict(
        source=EXAMPLES.parent / "data" / "digits.parquet", format="parquet", label="digit", feature_scale=1 / 16
    )

    def trained(name, workers, trainers, kills=0, **more):
        pathlib.Path("processes").write_text("")
        model = dict(kind="python", entry="augmented:build", options=dict(workers=workers))
        job = steadfast.Job(name=name, passes=2, model=model, dataset=dict(data, features=["pixel_*"]), **more)
        with steadfast.local(job, trainers=trainers, data_dir=tmp_path / name, progress=False) as run:
            killed = {0}
            deadline = time.monotonic() + 100
            while len(killed) <= kills:
                # The batches that it has begun are transformed before the job can end.
                for process in set(processes()) - killed:
                    os.kill(process, signal.SIGKILL)
                    killed.add(process)
                assert time.monotonic() < deadline, "no process has transformed"
                time.sleep(0.01)
            return run.wait(timeout=200), set(processes())

    def processes():
        return [int(line) for line in pathlib.Path("processes").read_text().split("\n")[:-1]]

    return trained


def test_workers_give_the_bits_of_none_whatever_dies(train):
    """I7, I10"""
    sync = dict(sync=dict(lanes=4, micro_batch=16))
    (none, alone), (two, several) = train("none", 0, 1, **sync), train("two", 2, 2, **sync)
    assert alone == {0} and len(several - {0}) >= 2
    assert two["parameters_sha256"] == none["parameters_sha256"]
    killed, _ = train("killed", 2, 1, kills=2, **sync)
    assert killed["parameters_sha256"] == none["parameters_sha256"]


def test_the_pictures_of_the_page_are_decoded_by_workers(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
    (program,) = re.findall(r"```python\n(# pictures\.py\n.*?)```", page, re.S)
    (tmp_path / "pictures.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    columns = pq.read_table(EXAMPLES.parent / "data" / "digits.parquet").to_pydict()
    pixels = np.stack([columns[f"pixel_{index}"] for index in range(64)], axis=1).reshape(-1, 8, 8)
    with tarfile.open("digits.tar", "w") as tar:
        for index, (picture, digit) in enumerate(zip(pixels, columns["digit"])):
            file = io.BytesIO()
            Image.fromarray((picture * 15.9).astype(np.uint8)).save(file, "PNG")
            for name, content in [("png", file.getvalue()), ("cls", str(int(digit)).encode())]:
                member = tarfile.TarInfo(f"{index:05}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    job = steadfast.Job(
        name="pictures",
        passes=6,
        dataset=dict(source="digits.tar", format="webdataset", columns=["png", "cls"], records_per_task=100),
        model=dict(kind="python", entry="pictures:build"),
        optimizer=dict(kind="adam"),
        learning_rate=dict(base=0.003),
        evaluation=dict(fraction=0.2),
    )
    with steadfast.local(job, trainers=1, data_dir=tmp_path / "data", progress=False) as run:
        assert run.wait(timeout=200)["metric"] > 0.85


def test_workers_transform_for_asynchronous_jobs(train):
    found, several = train("asynchronous", 2, 1, mode="async", async_=dict(batch=16))
    assert found["examples"] == 2 * 1797
    assert 0 not in several
    assert sys.platform != "linux" or not [it for it in several if pathlib.Path(f"/proc/{it}").exists()]
