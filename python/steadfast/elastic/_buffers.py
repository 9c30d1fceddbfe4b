"""The buffers of a module during an update of all workers, such as the running statistics of BatchNorm."""

from __future__ import annotations

from typing import Dict, Iterator, List, Tuple

import torch
import torch.distributed as dist

from ..errors import InvalidError
from .accumulation import own_lanes

__all__ = ["Buffers", "trains_statistics"]

_GATHER_BYTES = 1 << 26
"""Bytes of one exchange, from all workers together; larger changes take several."""


class Buffers:
    """Gives all workers the same buffers at the end of an update.

    Each batch begins with the buffers of the start of the update. ``"average"`` adds their changes, times the samples,
    as gradients are added; ``"broadcast"`` keeps those of the first batch, which rank 0 computes. Either way the
    result depends on the batches, and not on how many workers have computed them.

    Only buffers that ``state_dict`` has are followed. Others are a module's own notes, such as tables that it makes
    when they are needed.
    """

    def __init__(self, module: torch.nn.Module, mode: str) -> None:
        self._module = module
        self._is_average = mode == "average"
        self.begin()

    def begin(self) -> None:
        """Begins an update."""
        self._start = {name: it.detach().clone() for name, it in self._named()}
        # By buffer and lane: the change, or the value after the first batch.
        self._kept: Dict[str, Dict[int, torch.Tensor]] = {}

    def end_batch(self, samples: int, lane: int, world_size: int) -> None:
        """Notes the changes by a batch, and undoes them for the next one.

        Args:
            lane: Number of the batch in the update, of those of all workers.

        Raises:
            InvalidError: A buffer is another one than before, so that there is no change to note.
        """
        for name, buffer in self._named():
            start = self._start.get(name)
            if start is None or (start.shape, start.dtype) != (buffer.shape, buffer.dtype):
                raise InvalidError(
                    f"training has replaced the buffer `{name}` by one of {buffer.dtype} {tuple(buffer.shape)}, so "
                    'workers cannot agree on it; register it with `persistent=False`, or pass `buffers="own"`'
                )
            if torch.equal(buffer, start):
                continue
            if self._is_average:
                _add(self._kept.setdefault(name, {}), lane, _change(start, buffer.detach()) * samples)
                if world_size == 1:
                    # No other worker has lanes in between, so earlier ones need not be kept apart.
                    _fold(self._kept[name])
            elif lane == 0:
                self._kept.setdefault(name, {0: buffer.detach().clone()})
            with torch.no_grad():
                buffer.copy_(start)

    def changed(self) -> List[int]:
        """Returns of each buffer whether it has changed, as 0 or 1."""
        return [int(name in self._kept) for name in self._start]

    def end(self, changed: List[int], samples: int, lanes: int, world_size: int) -> None:
        """Ends an update.

        Args:
            changed: Of each buffer, whether it has changed on any worker.
            samples: Number of samples of the update, on all workers.
        """
        names = [name for name, is_changed in zip(self._start, changed) if is_changed]
        values = (
            self._means(names, samples, lanes, world_size) if self._is_average else self._of_first(names, world_size)
        )
        buffers = dict(self._named())
        with torch.no_grad():
            for name, value in zip(names, values):
                buffers[name].copy_(value)

    def _means(self, names: List[str], samples: int, lanes: int, world_size: int) -> Iterator[torch.Tensor]:
        for name in names:
            start, changes = self._start[name], self._kept.get(name, {})
            if world_size == 1:
                change = _sum(changes)
            else:
                change = _added(changes, torch.zeros_like(start, dtype=_sum_type(start)), lanes, world_size)
            mean = change / samples
            yield start + mean if _is_real(start) else start.to(torch.int64) + mean.round().to(torch.int64)

    def _of_first(self, names: List[str], world_size: int) -> Iterator[torch.Tensor]:
        for name in names:
            value = self._kept.get(name, {}).get(0, self._start[name]).contiguous()
            if world_size > 1:
                dist.broadcast(torch.view_as_real(value) if value.is_complex() else value, 0)
            yield value

    def _named(self) -> Iterator[Tuple[str, torch.Tensor]]:
        for prefix, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer


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


def _is_real(buffer: torch.Tensor) -> bool:
    """Whether a buffer has numbers that need no rounding."""
    return buffer.is_floating_point() or buffer.is_complex()


def _sum_type(buffer: torch.Tensor) -> torch.dtype:
    return torch.complex128 if buffer.is_complex() else torch.float64


def _change(start: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    if _is_real(start):
        return buffer.to(_sum_type(start)) - start.to(_sum_type(start))
    # Large whole numbers are not exact as floating point; their difference is.
    return (buffer.to(torch.int64) - start.to(torch.int64)).to(torch.float64)


def _add(changes: Dict[int, torch.Tensor], lane: int, change: torch.Tensor) -> None:
    changes[lane] = changes[lane] + change if lane in changes else change


_FOLDED = -1
"""The lane of a sum of lanes that come before all others."""


def _fold(changes: Dict[int, torch.Tensor]) -> None:
    """Adds the lanes that have ended to one."""
    last = max(changes)
    change = changes.pop(last)
    if changes:
        changes[_FOLDED] = _sum(changes)
        for lane in [it for it in changes if it != _FOLDED]:
            del changes[lane]
    changes[last] = change


def _sum(changes: Dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the changes, in the order of the lanes."""
    first, *rest = sorted(changes)
    total = changes[first]
    for lane in rest:
        total = total + changes[lane]
    return total


def _added(changes: Dict[int, torch.Tensor], zero: torch.Tensor, lanes: int, world_size: int) -> torch.Tensor:
    """Returns the sum of the changes of all lanes, in their order, whichever workers have computed them."""
    rank = dist.get_rank()
    dealt = [own_lanes(it, world_size, lanes) for it in range(world_size)]
    # All workers send as many rows as the one with most lanes.
    per_worker = len(dealt[0])
    own = [_flat(changes.get(dealt[rank].start + batch, zero)) for batch in range(per_worker)]
    total = _flat(zero).clone()
    size = max(1, _GATHER_BYTES // (world_size * per_worker * total.element_size()))
    for begin in range(0, total.numel(), size):
        part = torch.stack([it[begin : begin + size] for it in own])
        rows = [torch.empty_like(part) for _ in range(world_size)]
        dist.all_gather(rows, part)
        into = total[begin : begin + size]
        for row, of_worker in zip(rows, dealt):
            for batch in range(len(of_worker)):
                into += row[batch]
    return torch.view_as_complex(total.view(*zero.shape, 2)) if zero.is_complex() else total.view(zero.shape)


def _flat(value: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).contiguous().flatten()
