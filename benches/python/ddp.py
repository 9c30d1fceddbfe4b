"""A training loop with PyTorch's DistributedDataParallel, whose rate is measured."""

from __future__ import annotations

import time
from typing import Iterable, Tuple

import torch


def train(
    net: torch.nn.Module,
    batches: Iterable[Tuple[torch.Tensor, torch.Tensor]],
    learning_rate: float,
    warm_up: int,
    rank: int,
    world: int,
    port: int,
) -> Tuple[float, float]:
    """Trains `net` with all other ranks on this machine, one thread each.

    Returns the times (seconds since 1970) of the end of the warm-up and of the last step.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    replica = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    start = time.time()
    for step, (features, label) in enumerate(batches):
        if step == warm_up:
            start = time.time()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(replica(features), label).backward()
        optimizer.step()
    end = time.time()
    torch.distributed.destroy_process_group()
    return start, end
