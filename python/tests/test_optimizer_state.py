"""Groups of parameters, as PyTorch has them, without processes."""

from __future__ import annotations

import numpy as np
import pytest
import steadfast

torch = pytest.importorskip("torch")
st = pytest.importorskip("steadfast.torch")

LOSS = torch.nn.functional.cross_entropy


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


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
