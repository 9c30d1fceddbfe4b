"""Steadfast: distributed training that no failure stops or changes.

- A model in Python, trained by Steadfast's loop: :class:`Model`, and ``steadfast.torch`` for PyTorch.
- A loop of your own over parameter servers: :class:`Trainer`.
- A job from a program or a notebook: :class:`Job`, :func:`local`, :func:`connect`.
- A loop of your own with all-reduce: ``steadfast.elastic``, and ``steadfast.data`` for its records.
- Elastic jobs of ``torchrun``: ``--rdzv-backend=steadfast``, see ``steadfast.torchrun``.
"""

from ._native import Key, Work, __version__
from .client import Trainer
from .errors import (
    BadJobFile,
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
)
from .job import Job, Rule
from .model import Model, Ranked
from .run import Checkpoint, Evaluation, LocalRun, PassEnd, Run, connect, local
from .tables import Rows, Table, category_ids

__all__ = [
    "BadJobFile",
    "Checkpoint",
    "ConflictError",
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
    "Ranked",
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
    "__version__",
    "category_ids",
    "connect",
    "local",
]
