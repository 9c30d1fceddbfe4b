"""Elastic training: workers come and go while a program trains, and it goes on in the same process.

- What the program keeps: :class:`ObjectState`, :class:`TorchState`, :class:`KerasState`,
  :class:`TensorFlowState`, or a :class:`State` of one's own.
- The training function: :func:`run`.
- The data: :class:`ElasticSampler`, :class:`steadfast.elastic.torch.ElasticDataset`; a fixed global batch:
  :func:`accumulation_steps`, :class:`steadfast.elastic.torch.GradientAccumulator`.
- Hyperparameters by the number of workers: :func:`by_workers`, :func:`scaled`, :func:`world_size`.

A program that was started alone, without an agent, trains as the only worker, and is told of no changes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._agent import Agent, Assignment, SoloAgent, agent
from ._group import Group, SoloGroup
from ._loop import run
from ._membership import Membership, assignment, group, register_listener, remove_listener
from .accumulation import accumulation_steps
from .errors import CollectiveError, HostsUpdatedInterrupt, ResetLimitError, WorkerLost
from .hyperparameters import by_workers, scaled, world_size
from .sampler import ElasticSampler
from .state import ObjectState, State

if TYPE_CHECKING:
    from .keras import KerasState
    from .tensorflow import TensorFlowState
    from .torch import TorchState

__all__ = [
    "Agent",
    "Assignment",
    "CollectiveError",
    "ElasticSampler",
    "Group",
    "HostsUpdatedInterrupt",
    "KerasState",
    "Membership",
    "ObjectState",
    "ResetLimitError",
    "SoloAgent",
    "SoloGroup",
    "State",
    "TensorFlowState",
    "TorchState",
    "WorkerLost",
    "accumulation_steps",
    "agent",
    "assignment",
    "by_workers",
    "group",
    "register_listener",
    "remove_listener",
    "run",
    "scaled",
    "world_size",
]


_FRAMEWORKS = {"TorchState": "torch", "KerasState": "keras", "TensorFlowState": "tensorflow"}
"""The module of each name that needs a framework. Frameworks are imported only by programs that use them."""


def __getattr__(name: str) -> Any:
    module = _FRAMEWORKS.get(name, name)
    if module not in _FRAMEWORKS.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(f"{__name__}.{module}")
    return found if name == module else getattr(found, name)
