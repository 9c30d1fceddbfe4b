"""Programs with a training loop of their own, in three frameworks, under kills."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest
import steadfast
from conftest import EXAMPLES, PROGRAMS, kill, until, until_step

SCRIPTS = {
    "numpy": EXAMPLES / "own_loop.py",
    "jax": PROGRAMS / "jax_loop.py",
    "torch": PROGRAMS / "torch_loop.py",
}

DIGITS = dict(
    source="../data/digits.parquet",
    format="parquet",
    features=["pixel_*"],
    label="digit",
    feature_scale=1 / 16,
)


def job(framework: str, mode: str) -> steadfast.Job:
    return steadfast.Job(
        name=f"{framework}-{mode}",
        mode=mode,
        passes=12,
        dataset=DIGITS,
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
    audit = subprocess.run(["steadfast", "audit", "--data-dir", str(directory)], capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_columns_reach_a_loop_with_their_types(tmp_path, monkeypatch):
    large = 2**64 - 12
    records = [
        {"n": i, "id": large + i, "x": i / 2, "pair": [i, -i], "list": list(range(i % 3)), "text": f"ä {i}", "b": i > 3}
        for i in range(12)
    ]
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(it) + "\n" for it in records))
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    job = steadfast.Job(
        name="columns",
        passes=1,
        dataset=dict(source=source, format="jsonl", columns=["*"], types={"pair": "float32[2]"}),
        model=dict(kind="python", script=PROGRAMS / "columns_loop.py"),
        sync=dict(lanes=1, micro_batch=12),
    )
    data = tmp_path / "data"
    with steadfast.local(job, trainers=1, pservers=1, data_dir=data, progress=False) as run:
        run.wait(timeout=60)
    columns = json.loads(seen.read_text())
    order = columns["n"]
    assert sorted(order) == list(range(12))
    assert columns["pair"] == [[i, -i] for i in order]
    assert columns["text"] == [f"ä {i} transformed" for i in order]
    assert columns["b"] == [i > 3 for i in order]
    assert columns["id"] == [large + i for i in order]
    values, offsets = columns["list"]
    lists = [values[start:end] for start, end in zip(offsets, offsets[1:])]
    assert lists == [list(range(i % 3)) for i in order]
    assert columns["types"] == {
        "b": "bool", "id": "uint64", "list": "int64", "n": "int64", "pair": "float32", "text": "object", "x": "float32"
    }  # fmt: skip


def of_nothing(script: str, lanes: int = 8, **checkpoint) -> steadfast.Job:
    """A job whose gradients are zeros."""
    return steadfast.Job(
        name="nothing",
        dataset=dict(source="../data/linear.csv", format="csv", features=["x*"], label="y"),
        model=dict(kind="python", script=PROGRAMS / script),
        passes=2,
        sync=dict(lanes=lanes),
        checkpoint=checkpoint,
    )


def test_a_push_says_whether_its_gradient_still_counts(tmp_path, monkeypatch):
    held, free, said = (tmp_path / name for name in ("held", "free", "said"))
    for name, file in (("HELD", held), ("FREE", free), ("SAID", said)):
        monkeypatch.setenv(name, str(file))
    os.mkfifo(free)
    data, job = tmp_path / "data", of_nothing("held_work.py", every_steps=1)
    with steadfast.local(job, trainers=1, pservers=1, data_dir=data, progress=False) as run:
        until(run, held.exists)
        generation = run.status()["generation"]
        kill(run, "pserver", 0)
        until(run, lambda: generation < run.status()["generation"])
        free.write_text("")
        run.wait(timeout=60)
    answers = said.read_text().split()
    assert answers[:3] == ["True", "True", "False"]
    assert answers[-1] == "True"


def with_parameters(tmp_path, monkeypatch, mode: str) -> steadfast.Job:
    """A job whose loop looks at the parameters at each work."""
    for name, value in (
        ("SEEN", tmp_path / "seen"),
        ("MODEL_TO", tmp_path / "own.safetensors"),
        ("EXAMPLES", EXAMPLES),
    ):
        monkeypatch.setenv(name, str(value))
    return steadfast.Job(
        name=f"parameters-{mode}",
        mode=mode,
        passes=4,
        dataset=DIGITS,
        model=dict(kind="python", script=PROGRAMS / "parameters_loop.py"),
        optimizer=dict(kind="adam"),
        learning_rate=dict(base=0.002),
        checkpoint=dict(every="1s"),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loop_sets_reads_and_saves_the_parameters(tmp_path, monkeypatch, mode):
    """S004-36"""
    job = with_parameters(tmp_path, monkeypatch, mode)
    with steadfast.local(job, trainers=1, pservers=2, data_dir=tmp_path / "data", progress=False) as run:
        summary = run.wait(timeout=120)
        final = run.model("numpy")
    seen = json.loads((tmp_path / "seen").read_text())
    # What the loop does not set begins as the model says.
    assert seen["first"]["bias"] == [0.25] and len(seen["first"]["weight"]) == 640
    early, late, unwritable = seen["errors"]
    assert early.startswith("SteadfastError: the trainer has no parameters")
    assert late == "RuntimeError: initial values are set before the first work"
    assert "cannot write the model: " in unwritable and "/proc/none/model" in unwritable
    assert seen["pulls"] > 10
    # A trainer alone has pulled what it has pushed; in asynchronous mode it may compute with older values.
    assert mode == "async" or seen["differing"] == 0
    assert {name: it.tolist() for name, it in final.items()} == seen["final"]
    assert seen["sha256"] == summary["parameters_sha256"]
    assert (tmp_path / "own.safetensors").read_bytes() == pathlib.Path(summary["model"]).read_bytes()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loop_that_reads_the_parameters_survives_the_loss_of_a_pserver(tmp_path, monkeypatch, mode):
    """S004-36: a read never waits for a generation that needs the loop to begin."""
    job = with_parameters(tmp_path, monkeypatch, mode)
    with steadfast.local(job, trainers=2, pservers=2, data_dir=tmp_path / "data", progress=False) as run:
        for step in (8, 20):
            until_step(run, step)
            kill(run, "pserver", 0)
        summary = run.wait(timeout=120)
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["sha256"] == summary["parameters_sha256"]


def test_a_loop_reads_the_parameters_of_an_earlier_version_after_a_rollback(tmp_path, monkeypatch):
    """S004-36: the version that the loop had reached is never waited for, as only the loop can reach it again."""
    held, free = str(tmp_path / "held"), str(tmp_path / "free")
    monkeypatch.setenv("HELD", held)
    monkeypatch.setenv("FREE", free)
    for number in (2, 5):
        os.mkfifo(f"{free}-{number}")
    data, job = tmp_path / "data", of_nothing("read_over_rollback.py", lanes=1)
    with steadfast.local(job, trainers=1, pservers=1, data_dir=data, progress=False) as run:
        until(run, pathlib.Path(f"{held}-2").exists)
        # Without a checkpoint the loop would have to set the initial values again.
        subprocess.run(["steadfast", "checkpoint", "now", "--data-dir", str(data)], check=True)
        pathlib.Path(f"{free}-2").write_text("")
        until(run, pathlib.Path(f"{held}-5").exists)
        generation = run.status()["generation"]
        kill(run, "pserver", 0)
        until(run, lambda: generation < run.status()["generation"])
        pathlib.Path(f"{free}-5").write_text("")
        run.wait(timeout=60)


def test_a_model_with_tables_is_saved_by_a_checkpoint(tmp_path, monkeypatch):
    """S004-36: rows change while others are read, so a file of them would be no state of the model."""
    said = tmp_path / "said"
    monkeypatch.setenv("SAID", str(said))
    source = tmp_path / "clicks.jsonl"
    source.write_text("".join(json.dumps({"user": i % 7, "click": i % 2}) + "\n" for i in range(64)))
    job = steadfast.Job(
        name="tables",
        passes=1,
        dataset=dict(source=source, format="jsonl", columns=["user", "click"]),
        model=dict(kind="python", script=PROGRAMS / "table_loop.py"),
        sync=dict(lanes=1, micro_batch=16),
    )
    with steadfast.local(job, trainers=1, pservers=1, data_dir=tmp_path / "data", progress=False) as run:
        run.wait(timeout=60)
    assert "steadfast checkpoint export" in said.read_text()
