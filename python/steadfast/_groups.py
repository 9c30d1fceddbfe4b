"""Groups of parameters with settings of their own, from PyTorch's or by names."""

from __future__ import annotations

import math
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from ._state import trained
from .errors import InvalidError
from .model import SETTINGS, setting

__all__ = ["Groups", "settings_of"]

Groups = Union[torch.optim.Optimizer, Sequence[Mapping[str, Any]]]

_NAMED = ("params", "param_names", "name", "lr", "initial_lr", *SETTINGS)

_OF_ALL = frozenset(
    "alpha amsgrad betas capturable centered dampening decoupled_weight_decay differentiable eps foreach fused "
    "initial_accumulator_value lr_decay maximize momentum momentum_decay nesterov rho".split()
)
"""Settings of PyTorch's optimizers that a job has once for all parameters."""

_SHOWN = 8


def settings_of(module: torch.nn.Module, groups: Groups) -> Dict[str, Dict[str, Any]]:
    """Returns what groups set, by the names of parameters.

    Raises:
        InvalidError: A parameter is in two groups, in none, or not one of the module; or a group sets what a job
            cannot.
    """
    optimizer = groups if isinstance(groups, torch.optim.Optimizer) else None
    listed: Sequence[Any] = optimizer.param_groups if optimizer is not None else groups  # type: ignore[assignment]
    _check(listed, is_list=optimizer is None)
    factors = _factors(listed, optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    wanted = trained(module)
    found: Dict[str, int] = {}
    settings: Dict[str, Dict[str, Any]] = {}
    has_tensors = False
    for index, group in enumerate(listed):
        own = _own(index, group, factors[index])
        for name, is_tensor in _members(index, group["params"], names, list(wanted)):
            has_tensors |= is_tensor
            if name not in wanted:
                # PyTorch does not train it either.
                continue
            if name in found:
                raise InvalidError(
                    f"the parameter `{name}` is in group {found[name]} of `groups`, and in group {index}; remove it "
                    "from one of them"
                )
            found[name] = index
            if own:
                settings[name] = own
    left = [name for name in wanted if name not in found]
    if has_tensors and left:
        raise InvalidError(
            f"{_listed(left)} in no group of `groups`, so PyTorch would not train it; add it to one, or call "
            "`requires_grad_(False)`"
        )
    return settings


def _check(groups: Sequence[Any], is_list: bool) -> None:
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise InvalidError(f"group {index} of `groups` has no `params`; it is a dict with `params` and settings")
        if group.get("maximize"):
            raise InvalidError(
                f"group {index} of `groups` has `maximize`, and a job minimizes its loss; negate the loss instead"
            )
        if is_list and _rate(group) is not None:
            raise InvalidError(
                f"group {index} of `groups` sets `lr`; give it a `learning_rate`, the factor of that of the job file, "
                "or pass the optimizer itself, whose `lr` is then that of the job file"
            )
        unknown = [key for key in group if key not in _NAMED and key not in _OF_ALL]
        if unknown:
            raise InvalidError(f"group {index} of `groups` sets `{unknown[0]}`; use {', '.join(SETTINGS)}")
        for key in sorted(_OF_ALL.intersection(group)):
            if is_list:
                raise InvalidError(
                    f"group {index} of `groups` sets `{key}`, which a job has once for all parameters: set it in "
                    "`[optimizer]` of the job file; a group sets " + ", ".join(SETTINGS)
                )
            if any(key not in other or other[key] != group[key] for other in groups if isinstance(other, Mapping)):
                raise InvalidError(
                    f"the groups of `groups` differ in `{key}`, which a job has once for all parameters, in "
                    "`[optimizer]`; a group sets " + ", ".join(SETTINGS)
                )


def _factors(groups: Sequence[Any], optimizer: Optional[torch.optim.Optimizer]) -> List[Optional[float]]:
    """Returns the factor of the learning rate of each group that PyTorch's rates make; ``None`` without one."""
    if optimizer is None:
        return [None] * len(groups)
    rates = [float(rate) if rate is not None else None for rate in (_rate(group) for group in groups)]
    base = float(optimizer.defaults["lr"])
    if base <= 0 or not math.isfinite(base):
        raise InvalidError(f"the optimizer has the learning rate {base}, of which there are no multiples")
    return [None if rate is None or rate == base else rate / base for rate in rates]


def _rate(group: Mapping[str, Any]) -> Any:
    # A scheduler has changed `lr`.
    return group.get("initial_lr", group.get("lr"))


def _own(index: int, group: Mapping[str, Any], factor: Optional[float]) -> Dict[str, Any]:
    own = {key: group[key] for key in SETTINGS if group.get(key) is not None}
    if factor is not None:
        own.setdefault("learning_rate", factor)
    if not isinstance(own.get("frozen", False), bool):
        raise InvalidError(f"group {index} of `groups` has `frozen` = {own['frozen']!r}; use True or False")
    if not own.pop("frozen", False):
        return {key: setting(f"group {index} of `groups`", key, value) for key, value in own.items()}
    # PyTorch's own groups have all settings.
    if own and "lr" not in group:
        raise InvalidError(
            f"`{next(iter(own))}` does not apply to group {index} of `groups`, which is frozen; remove it"
        )
    return {"frozen": True}


def _members(index: int, params: Any, names: Mapping[int, str], trained_names: List[str]) -> List[Tuple[str, bool]]:
    """Returns the names of the parameters of a group, each with whether it was given as a tensor."""
    found: Dict[str, bool] = {}
    for it in [params] if isinstance(params, (str, torch.Tensor)) else list(params):
        if isinstance(it, tuple) and len(it) == 2:
            # As `named_parameters()` gives them.
            it = it[1]
        if isinstance(it, torch.Tensor):
            if id(it) not in names:
                raise InvalidError(
                    f"group {index} of `groups` has a tensor of the shape {list(it.shape)} that the module does not "
                    "have as a parameter; make the groups from the module that you pass"
                )
            found[names[id(it)]] = True
        elif isinstance(it, str):
            matched = [name for name in names.values() if _matches(it, name)]
            if not matched:
                raise InvalidError(
                    f"`{it}` in group {index} of `groups` matches no parameter; the module has {_quoted(trained_names)}"
                )
            found.update((name, False) for name in matched)
        else:
            raise InvalidError(
                f"group {index} of `groups` has a {type(it).__name__} among its `params`; use parameters, or names, in "
                "which `*` stands for any text"
            )
    return list(found.items())


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _listed(names: Sequence[str]) -> str:
    return f"{_quoted(names)} {'is' if len(names) == 1 else 'are'}"


def _quoted(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if _SHOWN < len(names) else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more
