"""Programs with a training loop of their own, in three frameworks, under kills."""

from __future__ import annotations

import subprocess

import pytest
from conftest import EXAMPLES, PROGRAMS, kill, until_step

import steadfast

SCRIPTS = {
    "numpy": EXAMPLES / "own_loop.py",
    "jax": PROGRAMS / "jax_loop.py",
    "torch": PROGRAMS / "torch_loop.py",
}


def job(framework: str, mode: str) -> steadfast.Job:
    return steadfast.Job(
        name=f"{framework}-{mode}",
        mode=mode,
        passes=12,
        dataset=dict(
            source="../data/digits.parquet",
            format="parquet",
            features=["pixel_*"],
            label="digit",
            feature_scale=1 / 16,
        ),
        model=dict(kind="python", script=SCRIPTS[framework]),
        optimizer=dict(kind="adam"),
        learning_rate=dict(base=0.002),
        evaluation=dict(fraction=0.2),
        checkpoint=dict(every="2s"),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("framework", list(SCRIPTS))
def test_a_loop_survives_kills_and_audits_clean(tmp_path, framework, mode):
    if framework == "jax":
        pytest.importorskip("jax")
    directory = tmp_path / "data"
    run = steadfast.local(job(framework, mode), data_dir=directory, progress=False)
    with run:
        until_step(run, 10)
        kill(run, "trainer", 0)
        kill(run, "pserver", 1)
        summary = run.wait(timeout=300)
    assert summary["metric"] > 0.85
    audit = subprocess.run(
        ["steadfast", "audit", "--data-dir", str(directory)], capture_output=True, text=True
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
