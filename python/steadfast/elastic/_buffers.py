"""The buffers of a module during an update of all workers, such as the running statistics of BatchNorm."""

from __future__ import annotations

from typing import Dict, List

import torch
import torch.distributed as dist

__all__ = ["Buffers", "trains_statistics"]


class Buffers:
    """Makes the changes of a module's buffers the mean over the samples of an update.

    Each batch begins with the buffers of the start of the update. Their changes, times the samples, are added as
    gradients are, so that the result is the same on all workers, and for any number of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.begin()

    def begin(self) -> None:
        """Begins an update."""
        self._start = {name: it.detach().clone() for name, it in self._module.named_buffers()}
        self._changes: Dict[str, torch.Tensor] = {}

    def end_batch(self, samples: int) -> None:
        """Notes the changes by a batch, and undoes them for the next one."""
        for name, buffer in self._module.named_buffers():
            start = self._start[name]
            if torch.equal(buffer, start):
                continue
            change = (buffer.detach().to(torch.float64) - start.to(torch.float64)) * samples
            self._changes[name] = self._changes[name] + change if name in self._changes else change
            with torch.no_grad():
                buffer.copy_(start)

    def changed(self) -> List[int]:
        """Returns of each buffer whether it has changed, as 0 or 1."""
        return [int(name in self._changes) for name in self._start]

    def end(self, changed: List[int], samples: int, world_size: int) -> None:
        """Ends an update.

        Args:
            changed: Of each buffer, whether it has changed on any worker.
            samples: Number of samples of the update, on all workers.
        """
        buffers = dict(self._module.named_buffers())
        for (name, start), is_changed in zip(self._start.items(), changed):
            if not is_changed:
                continue
            change = self._changes.get(name)
            if change is None:
                change = torch.zeros_like(start, dtype=torch.float64)
            if world_size > 1:
                dist.all_reduce(change)
            mean = start.to(torch.float64) + change / samples
            with torch.no_grad():
                buffers[name].copy_(mean if start.is_floating_point() else mean.round())


def trains_statistics(loss: torch.Tensor) -> bool:
    """Whether BatchNorm has updated its running statistics on the way to a loss."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_saved_training", True) and getattr(node, "_saved_running_mean", None) is not None:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
