"""A record on which a model in Python crashes."""

from __future__ import annotations

import json
import subprocess

import steadfast
from conftest import EXAMPLES

MODEL = """
import ctypes
import time

import numpy as np
import steadfast


class Fragile(steadfast.Model):
    def parameters(self):
        return {"weight": (6,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        if np.any(batch["label"] == 666):
            fails()
        error = batch["features"] @ parameters["weight"] - batch["label"]
        return float(error @ error), {"weight": 2 * error @ batch["features"]}

    def evaluate(self, parameters, batch):
        return 0.0, 0.0


def build(spec):
    return Fragile()


def fails():
    HOW
"""


def fragile_job(directory, how: str) -> steadfast.Job:
    """Returns a job whose model fails in a way on a record, the 1234th."""
    (directory / "fragile.py").write_text(MODEL.replace("HOW", how))
    lines = (EXAMPLES.parent / "data" / "linear.csv").read_text().splitlines()
    lines[1234] = lines[1234].rpartition(",")[0] + ",666"
    (directory / "records.csv").write_text("\n".join(lines) + "\n")
    return steadfast.Job(
        name="fragile",
        passes=2,
        model=dict(kind="python", entry="fragile:build"),
        learning_rate=dict(base=0.001),
        dataset=dict(source="records.csv", format="csv", features=["x*"], label="y"),
        tasks=dict(deadline="2s"),
    )


def test_a_record_that_crashes_a_python_model_is_left_out(tmp_path, monkeypatch):
    """F9, I7: with the same bits for any number of trainers."""
    monkeypatch.chdir(tmp_path)
    job = fragile_job(tmp_path, "ctypes.string_at(0)")
    results = []
    for trainers in (1, 2):
        data_dir = f"data-{trainers}"
        with steadfast.local(job, data_dir=data_dir, trainers=trainers, progress=False) as run:
            results.append(run.wait(timeout=120))
        audit = subprocess.run(
            ["steadfast", "audit", "--data-dir", data_dir, "--output", "json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert json.loads(audit.stdout)["clean"], audit.stdout
    assert results[0]["parameters_sha256"] == results[1]["parameters_sha256"]
    for result in results:
        (discarded,) = result["discarded"]["listed"]
        assert discarded["records"][0]["first"] == 1233 and "SIGSEGV" in discarded["reason"]
        assert result["examples"] == 2 * 1999


def test_a_python_model_that_hangs_shows_where(tmp_path, monkeypatch):
    """F9: the trainer prints the stacks of its threads before it ends, and the record is left out."""
    monkeypatch.chdir(tmp_path)
    job = fragile_job(tmp_path, "time.sleep(1000)")
    with steadfast.local(job, data_dir="data", progress=False) as run:
        result = run.wait(timeout=120)
    (discarded,) = result["discarded"]["listed"]
    assert discarded["records"][0]["first"] == 1233 and "longer than 2s" in discarded["reason"]
    logs = [log.read_text() for log in (tmp_path / "data" / "logs").iterdir()]
    assert any("fragile.py" in log and "in fails" in log for log in logs), logs
