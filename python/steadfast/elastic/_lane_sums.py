"""The gradients of an update's lanes, added along a fixed tree, over all workers."""

from __future__ import annotations

import bisect
import itertools
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .accumulation import own_lanes

__all__ = ["Gradients", "LaneSums", "Node", "OrderedSum", "cover"]

_BUCKET_BYTES = 1 << 24
"""Most bytes of the gradients that are exchanged together. Each exchange waits for other processes, which takes as long
as it takes to send a few of them."""

_UNDER_WAY = 3
"""Most buckets that are under way at once; each has memory of its own."""

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
        counts: How many whole numbers of the workers are added, too. They go with the first bucket.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], lanes: int, counts: int) -> None:
        self._parameters = parameters
        self._flats: List[_Flat] = []
        self._buckets: List[Tuple[_Flat, int]] = []
        # From `begin` to the end.
        self._sums: Sequence[Gradients] = ()
        self._exchanges: List[Iterator[None]] = []
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._is_alone = world_size == 1
        if self._is_alone:
            return
        covers = [cover(lanes, own_lanes(rank, world_size, lanes)) for rank in range(world_size)]
        kinds: Dict[Tuple[torch.dtype, torch.device], List[int]] = {}
        for number, it in enumerate(parameters):
            kinds.setdefault((it.dtype, it.device), []).append(number)
        self._flats = [_Flat(parameters, it, covers, Node(0, lanes), counts) for it in kinds.values()]
        self._buckets = [(flat, number) for flat in self._flats for number in range(flat.buckets)]

    def begin(self, sums: Sequence[Gradients], counts: Sequence[int]) -> None:
        """Begins to add the sums of all workers; :meth:`counts`, and :meth:`finish` or :meth:`give_up` follow.

        Args:
            sums: Of each node of this worker's cover, the gradients of all parameters. They stay as they are, unless the
                worker is alone.
            counts: The numbers of this worker.
        """
        self._sums = sums
        self._exchanges = [flat.exchange(number, sums) for flat, number in self._buckets]
        for flat, number in self._buckets[:1]:
            flat.set_counts(number, counts)
        for exchange in self._exchanges[:_UNDER_WAY]:
            next(exchange)

    def counts(self) -> List[int]:
        """Returns the sums of the workers' numbers."""
        flat, number = self._buckets[0]
        return flat.counts(number)

    def finish(self, samples: int) -> None:
        """Sets the gradients of the parameters to the sum over all lanes, divided by the number of samples.

        They share their memory with those of the next call.
        """
        if self._is_alone:
            (gradients,) = self._sums
            present = [it for it in gradients if it is not None]
            _divide(present, samples)
            for parameter, gradient in zip(self._parameters, gradients):
                parameter.grad = gradient
            return
        for flat in self._flats:
            flat.samples = samples
        count = len(self._exchanges)
        for number in range(count + 1):
            # One is added, the one before comes back, and its memory is used for another one.
            for step in (number, number - 1):
                if 0 <= step < count:
                    next(self._exchanges[step], None)
            if _UNDER_WAY <= number - 1 + _UNDER_WAY < count:
                next(self._exchanges[number - 1 + _UNDER_WAY])
        for flat in self._flats:
            flat.set_gradients(self._parameters)
        self._sums, self._exchanges = (), []

    def give_up(self) -> None:
        """Ends what was begun, without a result. All workers do so at once."""
        for flat in self._flats:
            flat.samples = None
        for exchange in self._exchanges[:_UNDER_WAY]:
            next(exchange, None)
        self._sums, self._exchanges = (), []


class _Piece(NamedTuple):
    """Some numbers of a gradient, and their place in what is sent."""

    target: torch.Tensor
    node: int
    parameter: int
    first: int


class _Flat:
    """The parameters of one type and device as one sequence, with the memory for their exchange."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], numbers: List[int], covers: List[List[Node]], root: Node, counts: int
    ) -> None:
        self._numbers, self._covers, self._root = numbers, covers, root
        self.samples: Optional[int] = None
        self._own = len(covers[dist.get_rank()])
        like = parameters[numbers[0]]
        sizes = [parameters[number].numel() for number in numbers]
        self._begins = [0, *itertools.accumulate(sizes)]
        # So that all slices of a bucket have one size.
        end = -(-self._begins[-1] // len(covers)) * len(covers)
        # Buckets of about one size.
        wanted = max(1, -(-end * like.element_size() // _BUCKET_BYTES))
        bucket = max(1, -(-end // wanted // len(covers))) * len(covers)
        self._bounds = [(begin, min(begin + bucket, end)) for begin in range(0, end, bucket)]
        # Of what follows the sums that go to a worker: its numbers, as values of this type.
        self._room = -(-counts * 8 // like.element_size())
        self._whole = like.detach().new_empty(end)
        some, size = self._bounds[:_UNDER_WAY], min(bucket, end) // len(covers)
        self._sent = [self._whole.new_zeros(sum(self._sizes(size)[1])) for _ in some]
        self._got = [self._whole.new_empty(sum(self._sizes(size)[0])) for _ in some]
        self._works: Dict[int, Any] = {}
        self._pieces = [list(self._cut(number)) for number in range(self.buckets)]

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return len(self._bounds)

    def set_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Lets the parameters have what the exchanges have brought."""
        for number, begin in zip(self._numbers, self._begins):
            parameter = parameters[number]
            parameter.grad = self._whole[begin : begin + parameter.numel()].view_as(parameter)

    def set_counts(self, number: int, counts: Sequence[int]) -> None:
        """Sets the numbers that go to all workers with a bucket, which is not begun."""
        encoded = torch.tensor(counts, dtype=torch.int64).view(self._whole.dtype)
        for row in self._rows_sent(number):
            row[len(row) - self._room :] = encoded

    def counts(self, number: int) -> List[int]:
        """Waits for a bucket of all workers; returns the sums of their numbers."""
        self._wait(number)
        # Where rows end, in memory of their own, which is aligned.
        encoded = torch.stack([row[len(row) - self._room :] for row in self._rows_got(number)])
        return encoded.view(torch.int64).sum(dim=0).tolist()  # type: ignore[no-any-return]

    def exchange(self, number: int, sums: Sequence[Gradients]) -> Iterator[None]:
        """Returns the exchange of a bucket, in three steps: each waits for what the one before has begun."""
        begin, end = self._bounds[number]
        width = (end - begin) // len(self._covers)
        _fill(self._pieces[number], sums)
        got, sent = self._sizes(width)
        memory = self._got[number % _UNDER_WAY][: sum(got)], self._sent[number % _UNDER_WAY][: sum(sent)]
        self._works[number] = dist.all_to_all_single(*memory, got, sent, async_op=True)
        yield
        self._wait(number)
        if self.samples is None:
            return
        held: Dict[Node, torch.Tensor] = {}
        for row, nodes in zip(self._rows_got(number), self._covers):
            held.update(zip(nodes, row[: len(row) - self._room].view(len(nodes), width)))
        total = _folded(self._root, held)
        _divide([total], self.samples)
        works = _gather(self._whole[begin:end], total)
        yield
        for work in works:
            work.wait()

    def _wait(self, number: int) -> None:
        work = self._works.pop(number, None)
        if work is not None:
            work.wait()

    def _sizes(self, width: int) -> Tuple[List[int], List[int]]:
        """Returns how many values come from each worker, and go to each, if slices have this width."""
        got = [len(nodes) * width + self._room for nodes in self._covers]
        return got, [self._own * width + self._room] * len(self._covers)

    def _rows_sent(self, number: int) -> List[torch.Tensor]:
        begin, end = self._bounds[number]
        _, sizes = self._sizes((end - begin) // len(self._covers))
        return list(self._sent[number % _UNDER_WAY][: sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]

    def _rows_got(self, number: int) -> List[torch.Tensor]:
        begin, end = self._bounds[number]
        sizes, _ = self._sizes((end - begin) // len(self._covers))
        return list(self._got[number % _UNDER_WAY][: sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]

    def _cut(self, number: int) -> Iterator[_Piece]:
        """Cuts a bucket where a parameter or a slice ends."""
        begin, end = self._bounds[number]
        width = (end - begin) // len(self._covers)
        rows, end = self._rows_sent(number), min(end, self._begins[-1])
        cuts = sorted({*range(begin, end, width), *(it for it in self._begins if begin < it < end)})
        for first, last in zip(cuts, [*cuts[1:], end]):
            place = bisect.bisect_right(self._begins, first) - 1
            row, column = divmod(first - begin, width)
            for node in range(self._own):
                at = node * width + column
                target = rows[row][at : at + last - first]
                yield _Piece(target, node, self._numbers[place], first - self._begins[place])


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


def _gather(whole: torch.Tensor, own: torch.Tensor) -> List[Any]:
    """Begins to send a slice to all workers, and to get theirs; returns what to wait for."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if own.device.type != "cpu":
        return [dist.all_gather_into_tensor(whole, own, async_op=True)]
    # An all-gather of gloo takes half as long again as messages.
    works, slices = [], whole.view(world_size, -1)
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        works += [dist.irecv(slices[source], source), dist.isend(own, target)]
    slices[rank].copy_(own)
    return works


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
