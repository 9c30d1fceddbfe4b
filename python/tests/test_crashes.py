"""A record on which a model in Python crashes."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Dict

import pytest
import steadfast
from conftest import EXAMPLES

MODEL = """
import ctypes
import os
import time

import numpy as np
import steadfast


class Fragile(steadfast.Model):
    def parameters(self):
        return {"weight": (6,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        fails_in("gradient", batch)
        error = batch["features"] @ parameters["weight"] - batch["label"]
        return float(error @ error), {"weight": 2 * error @ batch["features"]}

    def evaluate(self, parameters, batch):
        fails_in("evaluate", batch)
        return 0.0, 0.0


class WithTable(Fragile):
    def tables(self):
        return {"rows": steadfast.Table(2)}

    def ids(self, batch):
        fails_in("ids", batch)
        return {"rows": np.abs(batch["label"] * 10).astype(np.uint64)}

    def gradient(self, parameters, batch, key):
        loss, gradient = super().gradient(parameters, batch, key)
        return loss, {**gradient, "rows": np.zeros_like(parameters["rows"].values)}


def build(spec):
    return WithTable() if "WHERE" == "ids" else Fragile()


def fails_in(where, batch):
    if where == "WHERE" and np.any(batch["label"] == 666):
        fails()


def fails():
    HOW
"""


def fragile_job(directory, how: str, where: str = "gradient", **settings) -> steadfast.Job:
    """Returns a job whose model fails in a way on a record, the 1234th, in one of its functions."""
    (directory / "fragile.py").write_text(MODEL.replace("HOW", how).replace("WHERE", where))
    data = EXAMPLES.parent / "data" / "linear.csv"
    lines = data.read_text().splitlines()
    lines[1234] = lines[1234].rpartition(",")[0] + ",666"
    (directory / "records.csv").write_text("\n".join(lines) + "\n")
    # What is evaluated is not trained on.
    source = data if where == "evaluate" else "records.csv"
    return steadfast.Job(
        name="fragile",
        passes=2,
        model=dict(kind="python", entry="fragile:build"),
        learning_rate=dict(base=0.001),
        dataset=dict(source=source, format="csv", features=["x*"], label="y"),
        tasks=dict(deadline="2s"),
        **settings,
    )


def finished(job: steadfast.Job, directory, data_dir: str = "data", **options) -> Dict[str, Any]:
    """Returns the summary of a job, of which the audit finds nothing wrong."""
    with steadfast.local(job, data_dir=data_dir, progress=False, **options) as run:
        result = run.wait(timeout=120)
    audit = subprocess.run(
        ["steadfast", "audit", "--data-dir", data_dir, "--output", "json"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(audit.stdout)["clean"], audit.stdout
    return result


def test_a_record_that_crashes_a_python_model_is_left_out(tmp_path, monkeypatch):
    """F9, I7: with the same bits for any number of trainers."""
    monkeypatch.chdir(tmp_path)
    job = fragile_job(tmp_path, "ctypes.string_at(0)")
    results = [finished(job, tmp_path, f"data-{trainers}", trainers=trainers) for trainers in (1, 2)]
    assert results[0]["parameters_sha256"] == results[1]["parameters_sha256"]
    for result in results:
        (discarded,) = result["discarded"]["listed"]
        assert discarded["records"][0]["first"] == 1233 and "SIGSEGV" in discarded["reason"]
        assert result["examples"] == 2 * 1999


def test_a_python_model_that_hangs_shows_where(tmp_path, monkeypatch):
    """F9: the trainer prints the stacks of its threads before it ends, and the record is left out."""
    monkeypatch.chdir(tmp_path)
    job = fragile_job(tmp_path, "time.sleep(1000)")
    result = finished(job, tmp_path)
    (discarded,) = result["discarded"]["listed"]
    assert discarded["records"][0]["first"] == 1233 and "longer than 2s" in discarded["reason"]
    logs = [log.read_text() for log in (tmp_path / "data" / "logs").iterdir()]
    assert any("fragile.py" in log and "in fails" in log for log in logs), logs


@pytest.mark.parametrize(("how", "reason"), [("ctypes.string_at(0)", "SIGSEGV"), ("os._exit(3)", "exit status: 3")])
def test_a_held_out_record_that_ends_an_evaluation_in_python_is_left_out(tmp_path, monkeypatch, how, reason):
    """F9, I7: however the evaluation ends, and the parameters do not depend on it."""
    monkeypatch.chdir(tmp_path)
    job = fragile_job(tmp_path, how, where="evaluate", evaluation=dict(source="records.csv"))
    result = finished(job, tmp_path)
    (discarded,) = result["discarded"]["listed"]
    assert discarded["held_out"] and discarded["records"][0]["first"] == 1233 and reason in discarded["reason"]
    assert result["examples"] == 2 * 2000


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_record_that_ends_the_process_that_names_its_ids_is_left_out(tmp_path, monkeypatch, mode):
    """F9, I7: the ids of rows are asked for before anything is computed."""
    monkeypatch.chdir(tmp_path)
    result = finished(fragile_job(tmp_path, "os.abort()", where="ids", mode=mode), tmp_path)
    (discarded,) = result["discarded"]["listed"]
    assert discarded["records"][0]["first"] == 1233 and "SIGABRT" in discarded["reason"]
    assert result["examples"] == 2 * 1999
