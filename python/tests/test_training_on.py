"""Models and optimizers that leave a job for PyTorch, and enter one from it."""

from __future__ import annotations

import importlib
import pathlib
import sys

import numpy as np
import pytest
import steadfast

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
st = pytest.importorskip("steadfast.torch")

LIMIT_SECONDS = 120
RECORDS = 64
STEPS = 4

MODULE = """
import steadfast.torch as st
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False).bfloat16()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.tensor([1, 2**40]))
        self.register_buffer("mask", torch.full((4,), float("-inf")))
        self.output = torch.nn.Linear(4, 2)
        self.output.register_buffer("steps", self.steps)

    def forward(self, features):
        hidden = self.frozen(features.bfloat16()).float()
        return self.output(torch.tanh(self.second(torch.tanh(self.first(hidden)))))


def net():
    torch.manual_seed(3)
    return Net()


def build(spec):
    options = spec.options or {}
    groups = [{"params": "*.bias", "weight_decay": 0, "learning_rate": 0.5}] if options.get("grouped") else None
    return st.Model(net(), loss=torch.nn.functional.cross_entropy, buffers="constant", groups=groups)
"""

JOB = """
name = "{name}"
passes = {passes}

[dataset]
source = ["records.csv"]
format = "csv"
features = ["x*"]
label = "y"

[model]
kind = "python"
entry = "leaving:build"
{model}

[sync]
lanes = 1
micro_batch = {records}

[learning_rate]
base = {rate}
{sections}
"""


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A directory with a module and records, of which each step takes all: their order changes rounding alone."""
    (tmp_path / "leaving.py").write_text(MODULE)
    values = np.random.default_rng(5).standard_normal((RECORDS, 4)).astype(np.float32)
    lines = [",".join([*map(repr, map(float, row)), str(int(row[0] > row[1]))]) for row in values]
    (tmp_path / "records.csv").write_text("\n".join(["x0,x1,x2,x3,y", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("leaving", None)


def job(name, passes, rate=0.01, sections="", model=""):
    text = JOB.format(name=name, passes=passes, rate=rate, records=RECORDS, sections=sections, model=model)
    path = pathlib.Path(f"{name}.toml")
    path.write_text(text)
    return steadfast.Job.from_file(path)


def train(module, optimizer, steps):
    table = np.loadtxt("records.csv", np.float32, delimiter=",", skiprows=1)
    features, label = torch.tensor(table[:, :4]), torch.tensor(table[:, 4]).long()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(features), label).backward()
        optimizer.step()


def leaving():
    return importlib.import_module("leaving")


def test_files_of_a_job_have_every_name_of_the_module(scene):
    """The model, exports on any machine, and `run.model()`: for any number of processes with the same bits."""
    files = []
    for count in (1, 2):
        directory = scene / f"data-{count}"
        with steadfast.local(
            job("names", 3), data_dir=directory, trainers=count, pservers=count, progress=False
        ) as run:
            summary = run.wait(LIMIT_SECONDS)
            sha256 = run.export(scene / f"exported-{count}")
            model = run.model("torch")
        files.append(pathlib.Path(summary["model"]).read_bytes())
        assert (scene / f"exported-{count}").read_bytes() == files[-1]
        assert sha256 == summary["parameters_sha256"]
    assert files[0] == files[1]
    module, built = leaving().net(), leaving().net().state_dict()
    for whole in (safetensors_torch.load_file(scene / "exported-1"), model):
        module.load_state_dict(whole, strict=True)
        for name in ("frozen.weight", "frozen.bias", "steps", "mask", "output.steps"):
            assert whole[name].dtype == built[name].dtype and torch.equal(whole[name], built[name]), name
        assert torch.equal(whole["second.weight"], whole["first.weight"])
        assert not torch.equal(whole["first.weight"], built["first.weight"])
    with pytest.raises(steadfast.SteadfastError, match="already exists"):
        run.export(scene / "exported-1")
    plain = leaving().net()
    st.load(plain, scene / "exported-1", buffers="constant")
    assert all(torch.equal(it, module.state_dict()[name]) for name, it in plain.state_dict().items())
    # A model of this job starts another one; what does not travel is not looked for.
    start = f"[start]\nfile = {str(scene / 'exported-1')!r}"
    with steadfast.local(job("again", 1, sections=start), data_dir=scene / "again", progress=False) as run:
        assert run.wait(LIMIT_SECONDS)["state"] == "finished"


RULES = {
    "sgd": (0.1, "", lambda of: torch.optim.SGD(of, lr=0.1)),
    "momentum": (0.1, "momentum = 0.9", lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9)),
    "adam": (0.01, "", lambda of: torch.optim.Adam(of, lr=0.01)),
    "adamw": (0.01, "weight_decay = 0.1", lambda of: torch.optim.AdamW(of, lr=0.01, weight_decay=0.1)),
    "adagrad": (0.1, "", lambda of: torch.optim.Adagrad(of, lr=0.1)),
    "rmsprop": (0.01, "momentum = 0.5", lambda of: torch.optim.RMSprop(of, lr=0.01, momentum=0.5)),
    "nadam": (0.01, "", lambda of: torch.optim.NAdam(of, lr=0.01)),
    "radam": (0.01, "", lambda of: torch.optim.RAdam(of, lr=0.01)),
    "adadelta": (1.0, "", lambda of: torch.optim.Adadelta(of, lr=1.0)),
}


def check_same(found, expected):
    for name, it in expected.items():
        assert torch.allclose(found[name].float(), it.float(), rtol=2e-3, atol=2e-5), (name, found[name], it)


@pytest.mark.parametrize("kind", RULES)
def test_pytorch_and_a_job_go_on_with_each_others_optimizer(scene, kind):
    """Some steps in one and as many in the other are those of PyTorch alone."""
    rate, settings, make = RULES[kind]
    rule = f'[optimizer]\nkind = "{kind}"\n{settings}'
    whole = leaving().net()
    train(whole, make(whole.parameters()), 2 * STEPS)

    with steadfast.local(job("first", STEPS, rate, rule), data_dir=scene / "first", progress=False) as run:
        run.wait(LIMIT_SECONDS)
        run.export("model.safetensors", optimizer="optimizer.safetensors")
    net = leaving().net()
    net.load_state_dict(safetensors_torch.load_file("model.safetensors"))
    optimizer = make(net.parameters())
    optimizer.load_state_dict(st.optimizer_state("optimizer.safetensors", net, optimizer))
    train(net, optimizer, STEPS)
    check_same(net.state_dict(), whole.state_dict())

    half = leaving().net()
    optimizer = make(half.parameters())
    train(half, optimizer, STEPS)
    safetensors_torch.save_model(half, "half.safetensors")
    st.save_optimizer_state("half-state.safetensors", half, optimizer)
    start = '[start]\nfile = "half.safetensors"\noptimizer = "half-state.safetensors"\n'
    with steadfast.local(
        job("second", STEPS, rate, start + rule), data_dir=scene / "second", trainers=2, pservers=2, progress=False
    ) as run:
        run.wait(LIMIT_SECONDS)
        check_same(run.model("torch"), whole.state_dict())
        run.export("second.safetensors", optimizer="second-state.safetensors")
    state = st.optimizer_state("second-state.safetensors", half, make(half.parameters()))["state"]
    if kind not in ("sgd", "momentum"):
        assert state[2]["step"] == 2 * STEPS, state


def test_groups_of_the_code_are_those_of_the_job_file(scene):
    rule = '[optimizer]\nkind = "adamw"\nweight_decay = 0.3\n'
    group = '[[optimizer.groups]]\nparameters = ["*.bias"]\nweight_decay = 0\nlearning_rate = 0.5\n'
    bits = []
    for name, sections, model in (
        ("file", rule + group, ""),
        ("code", rule, "options = { grouped = true }"),
        ("none", rule, ""),
    ):
        with steadfast.local(job(name, 3, sections=sections, model=model), data_dir=name, progress=False) as run:
            bits.append(run.wait(LIMIT_SECONDS)["parameters_sha256"])
    assert bits[0] == bits[1] != bits[2]
    both = job("both", 3, sections=rule + group, model="options = { grouped = true }")
    with pytest.raises(steadfast.SteadfastError, match="is in a group of the model and in that of"):
        with steadfast.local(both, data_dir="both", progress=False) as run:
            run.wait(LIMIT_SECONDS)
