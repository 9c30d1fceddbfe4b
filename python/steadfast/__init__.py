"""Steadfast: distributed training that no failure stops or changes.

- A model in Python, trained by Steadfast's loop: :class:`Model`, and ``steadfast.torch`` for PyTorch.
- A loop of your own over parameter servers: :class:`Trainer`.
- A job from a program or a notebook: :class:`Job`, :func:`local`, :func:`connect`.
- Functions on workers that come and go: :class:`Coordinator`, with ``python -m steadfast.worker``.
- A loop of your own with all-reduce: ``steadfast.elastic``, and ``steadfast.data`` for its records.
- Elastic jobs of ``torchrun``: ``--rdzv-backend=steadfast``, see ``steadfast.torchrun``.
"""

from ._closure_worker import CurrentClosure, current_closure
from ._native import Key, Work, __version__
from .client import Trainer
from .coordinator import (
    Coordinator,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
    RemoteValueStatus,
)
from .errors import (
    BadJobFile,
    ClosureCancelled,
    ClosureError,
    ClosureErrors,
    ConflictError,
    DeniedError,
    ForkedError,
    InvalidError,
    JobFailed,
    NodeRangeMismatch,
    NotFoundError,
    RendezvousClosed,
    RendezvousTimeout,
    RoundEnded,
    SteadfastError,
    UnavailableError,
    WorkerLost,
)
from .job import Job, Rule
from .model import Model, Ranked
from .run import Checkpoint, Evaluation, LocalRun, PassEnd, Run, connect, local
from .tables import Rows, Table, category_ids

__all__ = [
    "BadJobFile",
    "Checkpoint",
    "ClosureCancelled",
    "ClosureError",
    "ClosureErrors",
    "ConflictError",
    "Coordinator",
    "CurrentClosure",
    "DeniedError",
    "Evaluation",
    "ForkedError",
    "InvalidError",
    "Job",
    "JobFailed",
    "Key",
    "LocalRun",
    "Model",
    "NodeRangeMismatch",
    "NotFoundError",
    "PassEnd",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValues",
    "Ranked",
    "RemoteValue",
    "RemoteValueStatus",
    "RendezvousClosed",
    "RendezvousTimeout",
    "RoundEnded",
    "Rows",
    "Rule",
    "Run",
    "SteadfastError",
    "Table",
    "Trainer",
    "UnavailableError",
    "Work",
    "WorkerLost",
    "__version__",
    "category_ids",
    "connect",
    "current_closure",
    "local",
]
