"""The blocks of docs/coming-from-pytorch.md: job files are parsed, code runs."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import steadfast
import torch
from steadfast import _native

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from-pytorch.md").read_text()
LIMIT_SECONDS = 120


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def job_file(*sections: str) -> str:
    """The first block, with other sections."""
    return "\n".join([blocks("toml")[0], *sections])


def code(directory: pathlib.Path) -> None:
    """Writes each block of code to the file that its first line names."""
    for text in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, text
        (directory / name[1]).write_text(text)


def test_a_split_by_a_column_has_each_group_on_one_side(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = ROOT / "examples" / "data" / "digits.parquet"
    importlib.import_module("split").split(data, "digit", [3, 5])
    sides = [pq.read_table(name)["digit"].to_pylist() for name in ("training.parquet", "validation.parquet")]
    assert set(sides[1]) == {3, 5} and not {3, 5} & set(sides[0])
    assert sorted(sides[0] + sides[1]) == sorted(pq.read_table(data)["digit"].to_pylist())


@pytest.mark.parametrize("section", blocks("toml")[1:])
def test_each_section_of_the_page_is_part_of_a_job_file(section: str) -> None:
    _native.toml_to_json(job_file(section))
    _native.job_file(_native.toml_to_json(job_file(section)))


def test_a_model_is_pretrained_converted_and_fine_tuned_as_the_page_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S004-48: what the blocks of the page say together."""
    code(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = (ROOT / "examples" / "data" / "digits.parquet").as_posix()
    left_out = ("schedule", "[start]", "[average]")
    sections = [it for it in blocks("toml")[1:] if not any(word in it for word in left_out)]
    first = job_file(*sections).replace("examples/data/digits.parquet", data).replace("passes = 20", "passes = 10")
    (tmp_path / "digits.toml").write_text(first)
    job = steadfast.Job.from_file(tmp_path / "digits.toml")
    with steadfast.local(job, data_dir=tmp_path / "first", progress=False) as run:
        summary = run.wait(LIMIT_SECONDS)
        trained = run.model("torch")
        monkeypatch.chdir(tmp_path)
        train_on(tmp_path, run, data)
    assert summary["metric"] > 0.5, summary

    import convert

    torch.save(trained, tmp_path / "pretrained.pt")
    convert.convert(tmp_path / "pretrained.pt", tmp_path / "pretrained.safetensors")
    (tuning,) = [it for it in blocks("toml") if "[start]" in it and "optimizer =" not in it]
    second = job_file(tuning).replace("examples/data/digits.parquet", data).replace("passes = 20", "passes = 1")
    (tmp_path / "tuned.toml").write_text(second.replace('name = "digits"', 'name = "tuned"'))
    job = steadfast.Job.from_file(tmp_path / "tuned.toml")
    with steadfast.local(job, data_dir=tmp_path / "second", progress=False) as run:
        run.wait(LIMIT_SECONDS)
        tuned = run.model("numpy")
    for name, values in tuned.items():
        is_same = np.array_equal(values, trained[name].numpy())
        assert is_same == name.startswith("body."), name
    assert set(safetensors.torch.load_file(tmp_path / "pretrained.safetensors")) == set(tuned)
    sys.modules.pop("convert")


def train_on(directory: pathlib.Path, run: steadfast.Run, data: str) -> None:
    """Trains in PyTorch where a job has ended, and in another job where PyTorch has."""
    import digits
    import onward

    net = digits.build(SimpleNamespace(features=64)).module
    optimizer = onward.from_job(run, net)
    onward.to_job(net, optimizer)
    before = {name: it.clone() for name, it in net.state_dict().items()}
    net(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(it, before[name]) for name, it in net.state_dict().items() if name == "head.bias")
    (start,) = [it for it in blocks("toml") if "[start]" in it and "optimizer =" in it]
    (rule,) = [it for it in blocks("toml") if 'kind = "adamw"' in it]
    text = job_file(start, rule).replace("examples/data/digits.parquet", data).replace("passes = 20", "passes = 1")
    (directory / "third.toml").write_text(text.replace('name = "digits"', 'name = "third"'))
    job = steadfast.Job.from_file(directory / "third.toml")
    with steadfast.local(job, data_dir=directory / "third", progress=False) as third:
        assert third.wait(LIMIT_SECONDS)["state"] == "finished"
    sys.modules.pop("digits")
    sys.modules.pop("onward")


def test_groups_of_the_page_are_those_of_its_optimizer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import grouped

    settings = grouped.build(SimpleNamespace(features=64)).settings()
    assert settings == {"weight": {"weight_decay": 0.01}, "bias": {"weight_decay": 0.0, "learning_rate": 0.1}}
    sys.modules.pop("grouped")


EVALUATED = "[evaluation]\nfraction = 0.2\n"


def test_a_confusion_matrix_has_the_share_of_each_pair_of_classes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S004-48: a metric is whatever is a mean over records."""
    code(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = (ROOT / "examples" / "data" / "digits.parquet").as_posix()
    text = job_file(EVALUATED).replace("examples/data/digits.parquet", data).replace("passes = 20", "passes = 5")
    (tmp_path / "job.toml").write_text(text.replace("digits:build", "confusion:build"))
    job = steadfast.Job.from_file(tmp_path / "job.toml")
    with steadfast.local(job, data_dir=tmp_path / "run", progress=False) as run:
        run.wait(LIMIT_SECONDS)
        last = run.evaluations()[-1]
    import confusion

    matrix = np.array(confusion.matrix(last))
    assert matrix.shape == (10, 10)
    assert matrix.sum() == pytest.approx(1.0)
    assert matrix.trace() == pytest.approx(last.metric)
    sys.modules.pop("confusion")


MULTI_HOT = """
[dataset]
source = ["records.parquet"]
format = "parquet"
columns = ["picture", "labels"]
types = { picture = "float32[64]", labels = "float32[2]" }

[optimizer]
kind = "adam"

[learning_rate]
base = 0.05
"""


def test_a_record_may_have_several_labels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are then a column of numbers."""
    code(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pictures = np.random.default_rng(5).normal(size=(600, 64)).astype(np.float32)
    # Records with none, one and both.
    labels = np.stack([pictures[:, 0] > 0, pictures[:, 1] > 0], axis=1).astype(np.float32)
    columns = {"picture": list(pictures), "labels": list(labels)}
    pq.write_table(pa.table(columns), tmp_path / "records.parquet")
    before, after = re.split(r"\[dataset\].*\n(?:.+\n)*", job_file(EVALUATED))
    (tmp_path / "job.toml").write_text((before + MULTI_HOT + after).replace("digits:build", "multi_hot:build"))
    job = steadfast.Job.from_file(tmp_path / "job.toml")
    with steadfast.local(job, data_dir=tmp_path / "run", progress=False) as run:
        summary = run.wait(LIMIT_SECONDS)
    assert summary["metric"] > 0.85, summary
