"""Rendezvous for ``torchrun``, of which the training script knows nothing.

.. code-block:: shell

    torchrun --rdzv-backend=steadfast --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 train.py

- ``steadfast``: the master forms the rounds. A lost node ends its round at once, like a node that arrives.
- ``steadfast-c10d``: PyTorch's own algorithm; the master only keeps its state.

``--rdzv-endpoint`` takes several endpoints, separated by commas. :mod:`steadfast.torchrun.settings` lists the
keys of ``--rdzv-conf``. ``--local-addr`` is the address at which other nodes reach this one, by default the one
from which it reaches the endpoint.

torchrun counts a worker that failed because of another node as a restart of its own (``--max-restarts``).
"""

from __future__ import annotations

from typing import Any, Callable

__all__ = ["c10d_handlers", "handlers"]


def handlers() -> Callable[[Any], Any]:
    """Returns what torchrun calls to create the handler of ``--rdzv-backend=steadfast``."""
    from .handler import create

    return create


def c10d_handlers() -> Callable[[Any], Any]:
    """Returns what torchrun calls to create the handler of ``--rdzv-backend=steadfast-c10d``."""
    from .c10d import create

    return create
