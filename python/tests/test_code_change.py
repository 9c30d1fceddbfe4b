"""A job whose model is edited in the middle ends with neither the old nor the new result, so that needs a word."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import steadfast
from conftest import EXAMPLES, until, until_step

MODEL = """
import numpy as np
import steadfast
from losses import SCALE


class Linear(steadfast.Model):
    def parameters(self):
        return {"weight": (64,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        error = batch["features"] @ parameters["weight"] - batch["label"]
        return SCALE * float(error @ error), {"weight": 2 * SCALE * error @ batch["features"]}

    def evaluate(self, parameters, batch):
        return 0.0, 0.0


def build(spec):
    return Linear()
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "linear.py").write_text(MODEL)
    (tmp_path / "losses.py").write_text("SCALE = 1.0\n")
    monkeypatch.chdir(tmp_path)
    return steadfast.Job(
        name="edited",
        passes=20_000,
        model=dict(kind="python", entry="linear:build"),
        learning_rate=dict(base=0.001),
        dataset=dict(
            source=EXAMPLES.parent / "data" / "digits.parquet",
            format="parquet",
            features=["pixel_*"],
            label="digit",
            feature_scale=1 / 16,
        ),
    )


def command(*args: str) -> str:
    done = subprocess.run(["steadfast", *args, "--data-dir", "data"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_model_that_was_edited_continues_only_if_that_is_accepted(job, tmp_path):
    """I7"""
    with steadfast.local(job, data_dir="data", progress=False) as run:
        until_step(run, 5)
    (tmp_path / "losses.py").write_text("SCALE = 2.0\n")
    with pytest.raises(steadfast.DeniedError, match="`losses`.*--accept-code-change"):
        with steadfast.local(job, data_dir="data", progress=False) as run:
            run.wait(timeout=60)
    with steadfast.local(job, data_dir="data", progress=False, accept_code_change=True) as run:
        until(run, lambda: any("`losses`" in it for it in run.status()["warnings"]))
    assert "`losses`" in command("status")
    audit = json.loads(command("audit", "--output", "json"))
    assert audit["clean"]
    assert any(it["rule"] == "code_changed" for it in audit["findings"]), audit["findings"]
    assert any("one version of the model's code" in it for it in audit["unproved"])


def test_a_model_that_failed_before_it_had_parameters_may_be_edited(job, tmp_path):
    (tmp_path / "linear.py").write_text(MODEL.replace("return {}", 'raise ValueError("no")'))
    with pytest.raises(steadfast.SteadfastError, match="ValueError: no"):
        with steadfast.local(job, data_dir="data", progress=False) as run:
            run.wait(timeout=60)
    (tmp_path / "linear.py").write_text(MODEL)
    with steadfast.local(job, data_dir="data", progress=False) as run:
        until_step(run, 5)
        assert run.status()["warnings"] == []


def test_digests_are_those_of_the_sources_that_were_loaded(tmp_path, monkeypatch):
    """Installed packages and Python's own modules do not count."""
    from steadfast._sources import modules

    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "own_module.py"
    source.write_text("a = 1\n")
    import own_module  # type: ignore[import-not-found]

    try:
        first = modules({"entry": "own_module:build"}, object())
        assert "own_module" in first
        assert not {"numpy", "json", "pytest", "steadfast", "steadfast._sources"} & first.keys()
        source.write_text("a = 2\n")
        assert modules({}, object())["own_module"] == first["own_module"]
        # A cached file of the same size and second would be loaded.
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        import importlib

        importlib.reload(own_module)
        sys.dont_write_bytecode = before
        assert modules({}, object())["own_module"] != first["own_module"]
        source.write_bytes(b"a = 1\r\n")
        importlib.reload(own_module)
        assert modules({}, object())["own_module"] == first["own_module"]
        assert "numpy" in modules({"entry": "numpy:build"}, object())
    finally:
        del sys.modules["own_module"]
