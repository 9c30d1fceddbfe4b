"""Groups of parameters and the state of optimizers, as PyTorch has them, without processes."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import steadfast

torch = pytest.importorskip("torch")
st = pytest.importorskip("steadfast.torch")
_state = pytest.importorskip("steadfast._state")
_tensor_file = pytest.importorskip("steadfast._tensor_file")

LOSS = torch.nn.functional.cross_entropy
STEPS = 5


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        LOSS(module(features), (features[:, 0] > 0).long()).backward()
        optimizer.step()


OURS = {
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "momentum_buffer": "velocity",
    "sum": "square_sum",
    "square_avg": "square_mean",
    "acc_delta": "change_mean",
}
"""The names of a job's vectors, as docs/checkpoints.md has them."""


def export(path: pathlib.Path, kind: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes the file that a job with the same numbers exports."""
    vectors = {
        f"{OURS[key]}/{name}": _state.raw(value)
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if key in OURS and value is not None
    }
    about = {"job": "digits", "optimizer": kind, "parameters_sha256": "5a", "updates": str(STEPS)}
    path.write_bytes(_tensor_file.encode(vectors, about))


RULES = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda of: torch.optim.Adam(of, lr=0.01),
    "adamw": lambda of: torch.optim.AdamW(of, lr=0.01, weight_decay=0.1),
    "adagrad": lambda of: torch.optim.Adagrad(of, lr=0.1),
    "rmsprop": lambda of: torch.optim.RMSprop(of, lr=0.01, momentum=0.5),
    "nadam": lambda of: torch.optim.NAdam(of, lr=0.01),
    "radam": lambda of: torch.optim.RAdam(of, lr=0.01),
    "adadelta": lambda of: torch.optim.Adadelta(of, lr=1.0),
}


@pytest.mark.parametrize("kind", RULES)
def test_pytorch_trains_on_from_the_state_of_a_job(kind, tmp_path):
    """Some steps, and as many after the state has left and come back, are those of one run."""
    whole, first = net(), net()
    train(whole, RULES[kind](whole.parameters()), range(2 * STEPS))
    before = RULES[kind](first.parameters())
    train(first, before, range(STEPS))
    export(tmp_path / "state", kind, first, before)
    second = net()
    second.load_state_dict(first.state_dict())
    after = RULES[kind](second.parameters())
    after.load_state_dict(st.optimizer_state(tmp_path / "state", second, after))
    train(second, after, range(STEPS, 2 * STEPS))
    for name, expected in whole.state_dict().items():
        found = second.state_dict()[name]
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7), (name, found, expected)
    if kind not in ("sgd", "adagrad"):
        # Without the state, other numbers come out.
        third = net()
        third.load_state_dict(first.state_dict())
        train(third, RULES[kind](third.parameters()), range(STEPS, 2 * STEPS))
        assert any(not torch.allclose(it, whole.state_dict()[name]) for name, it in third.state_dict().items())


@pytest.mark.parametrize("kind", RULES)
def test_the_state_of_pytorch_comes_back_as_it_left(kind, tmp_path):
    module = net()
    optimizer = RULES[kind](module.parameters())
    train(module, optimizer, range(STEPS))
    st.save_optimizer_state(tmp_path / "state", module, optimizer)
    found, about = _tensor_file.read(tmp_path / "state")
    assert about == {"optimizer": kind, "updates": "0" if kind in ("sgd", "momentum") else str(STEPS)}
    export(tmp_path / "exported", kind, module, optimizer)
    assert found == _tensor_file.read(tmp_path / "exported")[0]
    again = st.optimizer_state(tmp_path / "state", module, optimizer)
    expected = optimizer.state_dict()
    assert again["param_groups"] == expected["param_groups"]
    for index, state in again["state"].items():
        for key, value in state.items():
            assert torch.allclose(value, expected["state"][index][key]), key


def test_the_files_of_tied_parameters_have_the_same_names(tmp_path):
    """``save_model`` keeps the first name in the alphabet."""
    safetensors = pytest.importorskip("safetensors.torch")
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
    module = torch.nn.ModuleDict({"second": module[0], "first": module[1], "output": module[2]})
    module["first"].weight = module["second"].weight
    optimizer = RULES["momentum"](module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    safetensors.save_file({name: it.clone() for name, it in module.state_dict().items()}, tmp_path / "model")
    st.save_optimizer_state(tmp_path / "state", module, optimizer)
    updated = {name.split("/", 1)[1] for name in _tensor_file.read(tmp_path / "state")[0]}
    assert "second.weight" in updated and updated <= set(_tensor_file.read(tmp_path / "model")[0])


def test_a_state_that_no_job_can_continue_is_refused(tmp_path):
    def refused(message, make):
        module = net()
        optimizer = make(module)
        with pytest.raises(steadfast.InvalidError, match=message):
            st.save_optimizer_state(tmp_path / "state", module, optimizer)
        assert not (tmp_path / "state").exists()

    def partly(of):
        optimizer = RULES["adam"](of.parameters())
        of[0].weight.requires_grad_(False)
        train(of, optimizer, range(2))
        of[0].weight.requires_grad_(True)
        train(of, optimizer, range(2, 3))
        return optimizer

    refused("has no state of `0.weight`: it has had no gradient", lambda of: RULES["adam"](of.parameters()))
    refused("has updated `0.weight` 1 times and `0.bias` 3 times", partly)
    refused("has `lr_decay` = 0.5", lambda of: torch.optim.Adagrad(of.parameters(), lr_decay=0.5))
    refused("a job has the state of SGD", lambda of: torch.optim.Rprop(of.parameters()))
    refused("that is not in the module", lambda of: RULES["adam"](net().parameters()))
    groups = lambda of: [{"params": of[0].parameters(), "momentum": 0.5}, {"params": of[2].parameters()}]  # noqa: E731
    refused("has no state of|of several kinds", lambda of: torch.optim.SGD(groups(of), lr=0.1))


def test_a_state_that_does_not_fit_is_named(tmp_path):
    module = net()
    optimizer = RULES["adam"](module.parameters())
    train(module, optimizer, range(STEPS))
    file = tmp_path / "state"
    export(file, "adam", module, optimizer)

    def refused(message, make, of=None):
        of = of or net()
        with pytest.raises(steadfast.InvalidError, match=message):
            st.optimizer_state(file, of, make(of))

    refused("has the state of `adam`, and the optimizer is SGD", lambda of: RULES["sgd"](of.parameters()))
    refused("a job has the state of SGD, Adam, ", lambda of: torch.optim.Rprop(of.parameters()))
    refused("has `amsgrad` = True", lambda of: torch.optim.Adam(of.parameters(), amsgrad=True))
    refused("shape .2, 6. that is not in the module", lambda of: RULES["adam"](torch.nn.Linear(6, 2).parameters()))
    wider = torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    refused(r"`m/0.weight` has the shape \[4, 6\]", lambda of: RULES["adam"](of.parameters()), wider)
    refused("the state of `2.(bias|weight)`, which the optimizer", lambda of: RULES["adam"](of[0].parameters()))
    longer = torch.nn.Sequential(*net(), torch.nn.Linear(2, 2))
    refused("has no `m/3.weight`", lambda of: RULES["adam"](of.parameters()), longer)
    longer[3].requires_grad_(False)
    found = st.optimizer_state(file, longer, RULES["adam"](longer.parameters()))
    assert sorted(found["state"]) == [0, 1, 2, 3] and found["state"][0]["step"] == STEPS
    file.write_bytes(_tensor_file.encode({}, {"job": "digits"}))
    refused("has no state of an optimizer", lambda of: RULES["adam"](of.parameters()))


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("momentum", lambda of: torch.optim.SGD(of, lr=0.1)),
        ("momentum", lambda of: torch.optim.SGD([{"params": of[:1]}, {"params": of[1:], "momentum": 0.9}], lr=0.1)),
        ("rmsprop", lambda of: torch.optim.RMSprop(of, lr=0.01)),
    ],
)
def test_a_state_that_the_optimizer_would_not_use_is_refused(kind, without, tmp_path):
    module = net()
    optimizer = RULES[kind](module.parameters())
    train(module, optimizer, range(STEPS))
    file = tmp_path / "state"
    export(file, kind, module, optimizer)
    with pytest.raises(steadfast.InvalidError, match="the file has `velocity/.*`, which.*its `momentum`"):
        st.optimizer_state(file, module, without(list(module.parameters())))
    # The average of the parameters is the model's, and no state of the optimizer.
    found, about = _tensor_file.read(file)
    averages = {f"average/{name}": _state.raw(it) for name, it in module.named_parameters()}
    file.write_bytes(_tensor_file.encode({**found, **averages}, about))
    assert st.optimizer_state(file, module, RULES[kind](module.parameters()))["state"]


def test_groups_of_pytorch_are_those_of_the_job():
    module = net()
    groups = [
        {"params": module[0].parameters(), "lr": 0.001, "weight_decay": 0.0},
        {"params": [module[2].weight]},
        {"params": module[2].bias, "weight_decay": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)
    settings = st.Model(module, LOSS, groups=optimizer).settings()
    slow = {"weight_decay": 0.0, "learning_rate": pytest.approx(0.1)}
    assert settings == {
        "0.weight": slow,
        "0.bias": slow,
        "2.weight": {"weight_decay": 0.5},
        "2.bias": {"weight_decay": 0.25},
    }
    # A scheduler has changed the rates.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert st.Model(module, LOSS, groups=optimizer).settings() == settings
    same = st.Model(module, LOSS, groups=torch.optim.SGD(module.parameters(), lr=0.1))
    assert set(map(str, same.settings().values())) == {"{'weight_decay': 0.0}"}


def test_groups_are_made_of_names_and_patterns():
    module = net()
    groups = [{"params": "*.bias", "weight_decay": 0}, {"params": ["0.weight"], "frozen": True}]
    model = st.Model(module, LOSS, groups=groups)
    decay = {"weight_decay": 0.0}
    assert model.settings() == {"0.bias": decay, "2.bias": decay, "0.weight": {"frozen": True}}
    named = [{"params": list(module.named_parameters()), "learning_rate": 0.5}]
    assert set(st.Model(module, LOSS, groups=named).settings()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert model.numerics() == st.Model(net(), LOSS).numerics()
    identity = steadfast.model.identity
    assert identity(st.Model(net(), LOSS, groups=groups)) == identity(model) != identity(st.Model(net(), LOSS))
    module[0].requires_grad_(False)
    assert set(st.Model(module, LOSS, groups=named).settings()) == {"2.weight", "2.bias"}


@pytest.mark.parametrize(
    "groups, message",
    [
        (lambda of: [{"params": of[0].parameters()}], "`2.weight`, `2.bias` are in no group of `groups`"),
        (
            lambda of: [{"params": "*"}, {"params": of.parameters()}],
            "`0.weight` is in group 0 of `groups`, and in group 1",
        ),
        (lambda of: [{"params": net().parameters()}], r"a tensor of the shape \[4, 6\] that the module does not have"),
        (
            lambda of: [{"params": "1.*"}],
            "`1.*` in group 0 of `groups` matches no parameter; the module has `0.weight`",
        ),
        (lambda of: [{"params": [3]}], "has a int among its `params`"),
        (lambda of: [{"parameters": ["*"]}], "group 0 of `groups` has no `params`"),
        (lambda of: [{"params": "*", "weight_decy": 0}], "sets `weight_decy`; use weight_decay, learning_rate, frozen"),
        (
            lambda of: [{"params": "*", "weight_decay": -1}],
            "has `weight_decay` = -1.0; it must be finite and at least 0",
        ),
        (lambda of: [{"params": "*", "weight_decay": "no"}], "has `weight_decay` = 'no'; use a number"),
        (lambda of: [{"params": "*", "frozen": 1}], "has `frozen` = 1; use True or False"),
        (lambda of: [{"params": "*", "frozen": True, "weight_decay": 0}], "`weight_decay` does not apply to group 0"),
        (lambda of: [{"params": "0.*"}, {"params": "*.bias", "lr": 1.0}], "group 1 of `groups` sets `lr`; .* factor"),
        (lambda of: torch.optim.SGD(of.parameters(), lr=0.1).param_groups, "sets `lr`; .*or pass the optimizer itself"),
        (lambda of: [{"params": "*", "betas": (0.9, 0.99)}], r"sets `betas`, .*: set it in `\[optimizer\]` of the job"),
        (lambda of: [{"params": "*", "maximize": True}], "has `maximize`, and a job minimizes its loss"),
        (lambda of: torch.optim.SGD(of.parameters(), lr=0.1, maximize=True), "has `maximize`, and a job minimizes"),
        (
            lambda of: torch.optim.SGD(
                [{"params": of[0].parameters(), "momentum": 0.5}, {"params": of[2].parameters()}]
            ),
            "differ in `momentum`",
        ),
        (lambda of: torch.optim.SGD(of.parameters(), lr=0.0), "has the learning rate 0.0"),
    ],
)
def test_groups_that_do_not_fit_the_module_are_named(groups, message):
    module = net()
    with pytest.raises(steadfast.InvalidError, match=message):
        st.Model(module, LOSS, groups=groups(module))


def test_a_group_takes_any_number():
    settings = st.Model(net(), LOSS, groups=[{"params": "*", "learning_rate": np.float32(0.5)}]).settings()
    assert settings["0.bias"] == {"learning_rate": 0.5}
