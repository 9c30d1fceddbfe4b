"""The gradients of an update's lanes, added along a fixed tree, over all workers."""

from __future__ import annotations

import bisect
import itertools
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .accumulation import own_lanes

__all__ = ["LaneSums", "Node", "OrderedSum", "cover"]

_BUCKET_BYTES = 1 << 22
"""Bytes of the gradients that are exchanged together; few enough to stay in the cache between copying and adding."""

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


class OrderedSum:
    """Adds the gradients of an update over the workers of a round, along the tree.

    The bits are the same on each number of workers. The parameters are one sequence of numbers, cut into buckets. Each
    worker owns a slice of each bucket: the others send it their sums of that slice, it adds them along the tree, and sends
    the result to all. If each worker has the lanes of one node, this moves the bytes of a ring all-reduce:
    2 (n - 1) / n times those of the parameters.

    Args:
        parameters: All of them have a gradient on some worker.
        lanes: Their number over all workers.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], lanes: int) -> None:
        self._parameters = parameters
        self._flats: List[_Flat] = []
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._is_alone = world_size == 1
        if self._is_alone:
            return
        covers = [cover(lanes, own_lanes(rank, world_size, lanes)) for rank in range(world_size)]
        kinds: Dict[Tuple[torch.dtype, torch.device], List[int]] = {}
        for number, it in enumerate(parameters):
            kinds.setdefault((it.dtype, it.device), []).append(number)
        self._flats = [_Flat(parameters, numbers, covers, Node(0, lanes)) for numbers in kinds.values()]

    def run(self, sums: Sequence[Gradients], samples: int) -> None:
        """Sets the gradients of the parameters to the sum over all lanes, divided by the number of samples.

        They share their memory with those of the next call.

        Args:
            sums: Of each node of this worker's cover, the gradients of all parameters. They may be changed.
        """
        if self._is_alone:
            (gradients,) = sums
            present = [it for it in gradients if it is not None]
            _divide(present, samples)
            for parameter, gradient in zip(self._parameters, gradients):
                parameter.grad = gradient
            return
        exchanges = [it for flat in self._flats for it in flat.exchanges(sums, samples)]
        # Of three buckets, one is sent, one is added, and one comes back: the newest first, so that all are under way.
        for number in range(len(exchanges) + 2):
            for exchange in reversed(exchanges[max(0, number - 2) : number + 1]):
                next(exchange, None)
        for flat in self._flats:
            flat.set_gradients(self._parameters)


class _Piece(NamedTuple):
    """Some numbers of a gradient, and their place in what is sent."""

    target: torch.Tensor
    node: int
    parameter: int
    first: int


class _Flat:
    """The parameters of one type and device as one sequence, with the memory for their exchange."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], numbers: List[int], covers: List[List[Node]], root: Node
    ) -> None:
        self._numbers, self._covers, self._root = numbers, covers, root
        world_size, own = len(covers), len(covers[dist.get_rank()])
        nodes = sum(len(it) for it in covers)
        like = parameters[numbers[0]]
        sizes = [parameters[number].numel() for number in numbers]
        begins = [0, *itertools.accumulate(sizes)]
        # So that all slices of a bucket have one size.
        end = -(-begins[-1] // world_size) * world_size
        bucket = max(1, _BUCKET_BYTES // like.element_size() // world_size) * world_size
        self._bounds = [(begin, min(begin + bucket, end)) for begin in range(0, end, bucket)]
        self._whole = like.detach().new_empty(end)
        size = min(bucket, end)
        # A bucket is sent, one is added, and one comes back: these are other ones.
        self._sent = [self._whole.new_empty(own * size) for _ in self._bounds[:3]]
        self._got = [self._whole.new_empty(nodes * size // world_size) for _ in self._bounds[:3]]
        self._pieces = [list(self._cut(number, begins, own)) for number in range(len(self._bounds))]
        self._begins = begins

    def set_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Lets the parameters have what the exchanges have brought."""
        for number, begin in zip(self._numbers, self._begins):
            parameter = parameters[number]
            parameter.grad = self._whole[begin : begin + parameter.numel()].view_as(parameter)

    def exchanges(self, sums: Sequence[Gradients], samples: int) -> List[Iterator[None]]:
        """Returns the exchange of each bucket, in three steps: each waits for what the one before has begun."""
        return [self._exchange(number, sums, samples) for number in range(len(self._bounds))]

    def _exchange(self, number: int, sums: Sequence[Gradients], samples: int) -> Iterator[None]:
        begin, end = self._bounds[number]
        world_size, counts = len(self._covers), [len(it) for it in self._covers]
        width = (end - begin) // world_size
        _fill(self._pieces[number], sums)
        own = counts[dist.get_rank()]
        sent = self._sent[number % 3][: own * (end - begin)]
        got = self._got[number % 3][: sum(counts) * width]
        splits = [count * width for count in counts], [own * width] * world_size
        work = dist.all_to_all_single(got, sent, *splits, async_op=True)
        yield
        work.wait()
        nodes = (node for nodes in self._covers for node in nodes)
        total = _folded(self._root, dict(zip(nodes, got.view(sum(counts), width))))
        _divide([total], samples)
        work = dist.all_gather_into_tensor(self._whole[begin:end], total, async_op=True)
        yield
        work.wait()

    def _cut(self, number: int, begins: List[int], own: int) -> Iterator[_Piece]:
        """Cuts a bucket where a parameter or a slice ends."""
        begin, end = self._bounds[number]
        width = (end - begin) // len(self._covers)
        sent = self._sent[number % 3][: own * (end - begin)].view(len(self._covers), own, width)
        end = min(end, begins[-1])
        cuts = sorted({*range(begin, end, width), *(it for it in begins if begin < it < end)})
        for first, last in zip(cuts, [*cuts[1:], end]):
            place = bisect.bisect_right(begins, first) - 1
            row, column = divmod(first - begin, width)
            for node in range(own):
                target = sent[row, node, column : column + last - first]
                yield _Piece(target, node, self._numbers[place], first - begins[place])


def _fill(pieces: Sequence[_Piece], sums: Sequence[Gradients]) -> None:
    """Copies gradients to where they are sent from."""
    targets, sources = [], []
    for piece in pieces:
        gradient = sums[piece.node][piece.parameter]
        if gradient is None:
            piece.target.zero_()
        else:
            targets.append(piece.target)
            sources.append(gradient.reshape(-1)[piece.first : piece.first + len(piece.target)])
    if targets:
        torch._foreach_copy_(targets, sources)


def _divide(sums: List[torch.Tensor], samples: int) -> None:
    # Zeros that no worker has sent are positive: which zeros these are must not depend on the number of workers.
    torch._foreach_add_(sums, 0.0)
    torch._foreach_div_(sums, samples)


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
