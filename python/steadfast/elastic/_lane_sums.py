"""The gradients of an update's lanes, added along a fixed tree, over all workers."""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .accumulation import own_lanes

__all__ = ["LaneSums", "Node", "add_in_order", "cover"]

_BUCKET_BYTES = 1 << 25
"""Bytes of the parameters whose gradients are exchanged together; the next bucket is prepared meanwhile."""

Gradients = List[Optional[torch.Tensor]]
"""The gradient of each parameter; ``None`` for zeros."""


class Node(NamedTuple):
    """A node of the tree: the lanes from ``first`` up to but excluding ``end``.

    The tree is that of RFC 6962, section 2.1: the left child of a node with more than one lane has as many lanes as the
    largest power of two below their number.
    """

    first: int
    end: int

    def halves(self) -> Tuple["Node", "Node"]:
        """Returns the two children of a node with more than one lane."""
        middle = self.first + (1 << ((self.end - self.first - 1).bit_length() - 1))
        return Node(self.first, middle), Node(middle, self.end)


def cover(lanes: int, own: range) -> List[Node]:
    """Returns the fewest nodes of the tree over ``lanes`` that have exactly the lanes of ``own``, ascending."""
    found, waiting = [], [Node(0, lanes)]
    while waiting:
        node = waiting.pop()
        if own.start <= node.first and node.end <= own.stop:
            found.append(node)
        elif node.first < own.stop and own.start < node.end:
            left, right = node.halves()
            waiting += [right, left]
    return found


class LaneSums:
    """The sums of the lanes that a worker has computed, in their order; siblings are added as soon as both are there.

    At the end a worker holds one sum for each node of its cover, and meanwhile no more than the tree is deep.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._held: List[Tuple[Node, Gradients]] = []

    def add(self, lane: int, gradients: Gradients) -> None:
        """Adds a lane, which follows the one before; keeps the tensors."""
        self._held.append((Node(lane, lane + 1), gradients))
        while len(self._held) > 1:
            (left, one), (right, other) = self._held[-2:]
            node = Node(left.first, right.end)
            if not _is_node(node, self._lanes) or node.halves() != (left, right):
                return
            self._held[-2:] = [(node, _added(one, other))]

    def sums(self) -> List[Gradients]:
        """Returns the sum of each node of the cover, once all lanes are there."""
        return [gradients for _, gradients in self._held]


def add_in_order(
    parameters: Sequence[torch.Tensor], sums: List[Gradients], used: Sequence[int], lanes: int, samples: int
) -> None:
    """Sets the gradients of parameters to the sum over all lanes, divided by the number of samples.

    The bits are the same on each number of workers. Each worker owns a slice of the parameters: the others send it their
    sums of that slice, it adds them along the tree, and sends the result to all. If each worker has the lanes of one node,
    this moves the bytes of a ring all-reduce: 2 (n - 1) / n times those of the parameters.

    Args:
        sums: Of each node of this worker's cover, the gradients.
        used: Of each parameter, whether any worker has a gradient of it. The others get none.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    covers = [cover(lanes, own_lanes(rank, world_size, lanes)) for rank in range(world_size)]
    exchanges = []
    for numbers in _buckets(parameters, used):
        some = [parameters[number] for number in numbers]
        own = [[gradients[number] for number in numbers] for gradients in sums]
        exchanges.append(_exchange(some, own, covers, Node(0, lanes), samples))
    # Of three buckets, one is prepared, one is added, and one comes back.
    for number in range(len(exchanges) + 2):
        for exchange in exchanges[max(0, number - 2) : number + 1]:
            next(exchange, None)


def _exchange(
    parameters: List[torch.Tensor], own: List[Gradients], covers: List[List[Node]], root: Node, samples: int
) -> Iterator[None]:
    """Exchanges the gradients of a bucket, in three steps: each waits for what the one before has begun."""
    world_size = len(covers)
    sizes = [it.numel() for it in parameters]
    width = -(-sum(sizes) // world_size)
    sent = parameters[0].new_zeros(world_size, len(own), width)
    for place, gradients in enumerate(own):
        _copy(gradients, sizes, sent[:, place])
    counts = [len(nodes) for nodes in covers]
    got, work = sent, None
    if world_size > 1:
        got = sent.new_empty(sum(counts) * width)
        splits = ([count * width for count in counts], [len(own) * width] * world_size)
        work = dist.all_to_all_single(got, sent.flatten(), *splits, async_op=True)
    yield
    if work is not None:
        work.wait()
    nodes = (node for nodes in covers for node in nodes)
    total = _folded(root, dict(zip(nodes, got.view(sum(counts), width))))
    # Zeros that no worker has sent are positive: which zeros these are must not depend on the number of workers.
    total.add_(0.0).div_(samples)
    whole, work = total, None
    if world_size > 1:
        whole = total.new_empty(world_size * width)
        work = dist.all_gather_into_tensor(whole, total, async_op=True)
    yield
    if work is not None:
        work.wait()
    gradients = whole[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.view_as(parameter)


def _is_node(node: Node, lanes: int) -> bool:
    above = Node(0, lanes)
    while above.first <= node.first and node.end <= above.end and above != node:
        left, right = above.halves()
        above = left if node.first < left.end else right
    return above == node


def _added(one: Gradients, other: Gradients) -> Gradients:
    both = [(a, b) for a, b in zip(one, other) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(one, other)]


def _folded(node: Node, held: Dict[Node, torch.Tensor]) -> torch.Tensor:
    """Returns the sum of a node from those of disjoint nodes below it, in the place of one of them."""
    if node in held:
        return held[node]
    left, right = node.halves()
    return _folded(left, held).add_(_folded(right, held))


def _buckets(parameters: Sequence[torch.Tensor], used: Sequence[int]) -> List[List[int]]:
    """Divides the numbers of the parameters that have a gradient; those of a bucket have one type and device."""
    buckets: List[List[int]] = []
    open_ones: Dict[Tuple[torch.dtype, torch.device], Tuple[List[int], int]] = {}
    for number, (parameter, is_used) in enumerate(zip(parameters, used)):
        if not is_used:
            continue
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        bucket, before = open_ones.get(kind, ([], 0))
        if not bucket or before + size > _BUCKET_BYTES:
            bucket, before = [], 0
            buckets.append(bucket)
        bucket.append(number)
        open_ones[kind] = (bucket, before + size)
    return buckets


def _copy(gradients: Gradients, sizes: List[int], rows: torch.Tensor) -> None:
    """Copies gradients, one after the other, into rows that are not next to each other in memory."""
    width, begin = rows.shape[1], 0
    for gradient, size in zip(gradients, sizes):
        if gradient is not None:
            flat, at = gradient.reshape(-1), 0
            while at < size:
                row, column = divmod(begin + at, width)
                count = min(size - at, width - column)
                rows[row, column : column + count] = flat[at : at + count]
                at += count
        begin += size
