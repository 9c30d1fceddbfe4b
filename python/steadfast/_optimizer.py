"""The state of a job's optimizer as that of PyTorch's."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Mapping, NamedTuple, Set, Tuple, Union

import torch

from ._state import raw, tensors
from ._tensor_file import Raw, encode, read
from .errors import InvalidError

__all__ = ["encoded", "state_dict"]

_Group = Mapping[str, Any]


class _Rule(NamedTuple):
    """How the state of one of PyTorch's optimizers is called."""

    kinds: Tuple[str, ...]
    """The kinds in a job file that have the same state."""
    names: Callable[[_Group], Dict[str, str]]
    """The names of the vectors in a job, by PyTorch's, with the settings of a group."""
    refused: Dict[str, Any]
    """Settings with which PyTorch keeps what a job has not, each with the value that is accepted."""
    counts: bool = True
    """Whether the state has the number of steps."""


def _fixed(**names: str) -> Callable[[_Group], Dict[str, str]]:
    return lambda group: names


_MOMENTS = _fixed(exp_avg="m", exp_avg_sq="v")

_RULES: Dict[str, _Rule] = {
    "SGD": _Rule(
        ("sgd", "momentum"),
        lambda group: {"momentum_buffer": "velocity"} if group["momentum"] else {},
        {"dampening": 0},
        counts=False,
    ),
    "Adam": _Rule(("adam", "adamw"), _MOMENTS, {"amsgrad": False}),
    "AdamW": _Rule(("adamw", "adam"), _MOMENTS, {"amsgrad": False}),
    "Adagrad": _Rule(("adagrad",), _fixed(sum="square_sum"), {"lr_decay": 0}),
    "RMSprop": _Rule(
        ("rmsprop",),
        lambda group: {"square_avg": "square_mean", **({"momentum_buffer": "velocity"} if group["momentum"] else {})},
        {"centered": False},
    ),
    "NAdam": _Rule(("nadam",), _MOMENTS, {}),
    "RAdam": _Rule(("radam",), _MOMENTS, {}),
    "Adadelta": _Rule(("adadelta",), _fixed(square_avg="square_mean", acc_delta="change_mean"), {}),
}


def state_dict(
    path: Union[str, "os.PathLike[str]"], module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Dict[str, Any]:
    """Returns what ``optimizer.load_state_dict`` takes, from a file with the state of a job's optimizer.

    Raises:
        InvalidError: The file, the module and the optimizer do not fit together; says what differs.
        OSError: The file cannot be read.
    """
    found, metadata = read(path)
    name, rule = _rule_of(optimizer)
    kind, updates = metadata.get("optimizer"), metadata.get("updates", "")
    if kind is None or not updates.isdigit():
        raise InvalidError(
            f"{os.fspath(path)} has no state of an optimizer; `steadfast checkpoint export --optimizer` writes it"
        )
    if kind not in rule.kinds:
        raise InvalidError(
            f"{os.fspath(path)} has the state of `{kind}`, and the optimizer is {name}, which continues that of "
            f"`{'` or `'.join(rule.kinds)}`"
        )
    states = tensors(found)
    names = {id(parameter): of for of, parameter in module.named_parameters()}
    given: Dict[int, Dict[str, Any]] = {}
    used: Set[str] = set()
    index = 0
    for group in optimizer.param_groups:
        _check_settings(rule, group)
        for parameter in group["params"]:
            of = _name_in(names, parameter)
            if parameter.requires_grad:
                vectors = {
                    theirs: _vector(states, f"{ours}/{of}", of, parameter) for theirs, ours in rule.names(group).items()
                }
                used.update(f"{ours}/{of}" for ours in rule.names(group).values())
                if vectors:
                    given[index] = {**_counted(rule, name, group, int(updates)), **vectors}
            index += 1
    _check_used(states, used, optimizer, names)
    return {"state": given, "param_groups": optimizer.state_dict()["param_groups"]}


def encoded(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Returns the state of one of PyTorch's optimizers as a file from which a job starts.

    Raises:
        InvalidError: A job cannot continue this state; says why.
    """
    name, rule = _rule_of(optimizer)
    names = {id(parameter): of for of, parameter in module.named_parameters()}
    vectors: Dict[str, Raw] = {}
    counts: Dict[str, int] = {}
    kinds = set()
    for group in optimizer.param_groups:
        _check_settings(rule, group)
        kinds.add(_kind(name, group))
        for parameter in group["params"]:
            of = _name_in(names, parameter)
            state = optimizer.state.get(parameter, {})
            if not parameter.requires_grad or not rule.names(group):
                continue
            for theirs, ours in rule.names(group).items():
                if state.get(theirs) is None:
                    raise InvalidError(
                        f"the optimizer has no state of `{of}`: it has had no gradient yet; call "
                        "`requires_grad_(False)` if it is not trained"
                    )
                vectors[f"{ours}/{of}"] = raw(state[theirs].to(torch.float32))
            counts[of] = int(state["step"]) if rule.counts else 0
    if len(kinds) != 1:
        raise InvalidError(f"the groups of the optimizer are of several kinds, {', '.join(sorted(kinds))}")
    if len(set(counts.values())) > 1:
        first, other = (next(of for of in counts if counts[of] == it) for it in sorted(set(counts.values()))[:2])
        raise InvalidError(
            f"the optimizer has updated `{first}` {counts[first]} times and `{other}` {counts[other]} times; a job "
            "counts the updates of all parameters together"
        )
    updates = next(iter(counts.values()), 0)
    return encode(vectors, {"optimizer": kinds.pop(), "updates": str(updates)})


def _kind(name: str, group: _Group) -> str:
    """Returns the kind in a job file."""
    if name == "SGD":
        return "momentum" if group["momentum"] else "sgd"
    return name.lower()


def _check_settings(rule: _Rule, group: _Group) -> None:
    for key, accepted in rule.refused.items():
        if group.get(key, accepted) != accepted:
            raise InvalidError(f"the optimizer has `{key}` = {group[key]}, for which a job has no state")


def _name_in(names: Mapping[int, str], parameter: torch.nn.Parameter) -> str:
    if id(parameter) not in names:
        raise InvalidError(
            f"the optimizer has a parameter of the shape {list(parameter.shape)} that is not in the module; make it "
            "from the module that you pass"
        )
    return names[id(parameter)]


def _rule_of(optimizer: torch.optim.Optimizer) -> Tuple[str, _Rule]:
    for of in type(optimizer).__mro__:
        if of.__module__.startswith("torch.optim") and of.__name__ in _RULES:
            return of.__name__, _RULES[of.__name__]
    raise InvalidError(f"the optimizer is {type(optimizer).__name__}; a job has the state of {', '.join(_RULES)}")


def _vector(states: Mapping[str, torch.Tensor], name: str, of: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if name not in states:
        raise InvalidError(
            f"the file has no `{name}`: the job has not trained `{of}`, or with other settings; call "
            "`requires_grad_(False)`, or set the optimizer as in the job"
        )
    found = states[name]
    if found.shape != parameter.shape:
        raise InvalidError(
            f"`{name}` has the shape {list(found.shape)}, and the parameter {list(parameter.shape)}; pass the module "
            "that the job has trained"
        )
    return found


def _counted(rule: _Rule, name: str, group: _Group, updates: int) -> Dict[str, Any]:
    if not rule.counts:
        return {}
    counted = {"step": torch.tensor(float(updates), dtype=torch.float32)}
    if name == "NAdam":
        product, (beta1, _), decay = 1.0, group["betas"], group["momentum_decay"]
        for step in range(1, updates + 1):
            product *= beta1 * (1.0 - 0.5 * 0.96 ** (step * decay))
            if product == 0.0:
                break
        counted["mu_product"] = torch.tensor(product, dtype=torch.float32)
    return counted


def _check_used(
    states: Mapping[str, torch.Tensor], used: Set[str], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> None:
    """Checks that no parameter that the job has trained is left out, and no vector of one."""
    known = {names[id(it)] for group in optimizer.param_groups for it in group["params"] if it.requires_grad}
    for name in states:
        kind, of = name.split("/", 1)
        if kind == "average" or name in used:
            continue
        if of not in known:
            raise InvalidError(
                f"the file has the state of `{of}`, which the optimizer does not train; make it from "
                "`net.parameters()` of the module that the job has trained"
            )
        raise InvalidError(
            f"the file has `{name}`, which the optimizer would not use; set it as in the job, such as with its "
            "`momentum`"
        )
