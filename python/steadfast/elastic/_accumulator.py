"""Updates of a model with the gradients of several batches, added over all workers."""

from __future__ import annotations

import gc
import hashlib
import operator
import time
import weakref
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, SupportsIndex, Tuple

import torch
import torch.distributed as dist

from ..errors import InvalidError
from ..randomness import seed_all
from ._alike import Setting, check_alike
from ._buffers import Buffers, trains_statistics
from ._lane_sums import Gradients, LaneSums, OrderedSum
from ._membership import assignment as current_assignment
from ._membership import membership
from .accumulation import own_lanes

__all__ = ["GradientAccumulator", "checked_samples"]

_BUFFERS = ("average", "broadcast", "own")
_ORDERS = ("any", "fixed")
_REDUCTIONS = ("mean", "sum")


class GradientAccumulator:
    """Updates a model with the mean gradient of as many batches, whatever the number of workers.

    ::

        accumulator = steadfast.elastic.torch.GradientAccumulator(optimizer, lanes=8)
        for index, batch in enumerate(loader):
            if batch is not None:
                accumulator.backward(loss(model(batch.x), batch.y), samples=len(batch.x))
            if accumulator.step():
                sampler.record_batch(index, batch_size)
                state.commit()

    Each worker computes its part of the batches (:func:`accumulation_steps`). Gradients are added over all
    workers and divided by the number of samples in them: the result is the mean over the samples also if
    batches have different sizes. The model is not wrapped in ``DistributedDataParallel``: workers exchange nothing
    until the last batch of an update, as with its ``no_sync``.

    When the workers change in the middle of an update, its gradients are discarded.

    With ``order="fixed"`` the model and the optimizer have **the same bits for any number of workers**, also if
    workers come and leave, or are killed. Gradients are then added in one order, and the random states of Python, NumPy
    and PyTorch are set at the first call of the model in each batch, from the seed, the update and the batch. It needs
    ``lanes``, ``model``, a seed that all workers have, the accumulator in the state
    (``TorchState(…, accumulator=accumulator)``), and on all workers the same kind of processor and the same number of
    threads.

    It may be part of a state (``TorchState(…, accumulator=accumulator)``): then the scaler is kept with it, and a
    program that goes on with another number of lanes is refused.

    Args:
        optimizer: Updates the model.
        lanes: Number of batches of an update, at least the number of workers; the same as of the
            :class:`ElasticSampler`. By default one for each worker.
        reduction: What the loss is of its samples: ``"mean"`` or ``"sum"``.
        model: The module, if it has buffers that training changes, such as the running statistics of BatchNorm.
        buffers: What becomes of its buffers: ``"average"``, the default with a model, averages their changes over
            the samples of an update, as gradients are; ``"broadcast"`` takes those after the first batch of an
            update, which rank 0 computes; with ``"own"`` each worker keeps its own, until all get those of the oldest
            in a round with new workers.
        scaler: Scales the losses, and the gradients back once they are added; an update with a gradient that
            is not finite on any worker is left out on all. Pass losses as they are, and do not call the scaler.
        clip_value: Largest absolute value of each component of an update's gradient.
        clip_norm: Largest norm of an update's gradient, all parameters of the optimizer together, after
            ``clip_value``. With ``math.inf`` the norm is only computed.
        error_if_nonfinite: Whether an update whose norm is infinite or no number is an error, on all workers, in
            place of an update; needs ``clip_norm``. Updates that the scaler leaves out are no errors.
        order: In which order gradients are added: ``"any"``, which depends on the number of workers, or ``"fixed"``.
        seed: What the random states of each batch depend on, with ``order="fixed"``.

    Raises:
        InvalidError: A value is invalid, or values do not fit each other.
    """

    _needs_model = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lanes: Optional[int] = None,
        reduction: str = "mean",
        model: Optional[torch.nn.Module] = None,
        buffers: Optional[str] = None,
        scaler: Optional["torch.amp.GradScaler"] = None,
        clip_value: Optional[float] = None,
        clip_norm: Optional[float] = None,
        error_if_nonfinite: bool = False,
        order: str = "any",
        seed: int = 0,
    ) -> None:
        if reduction not in _REDUCTIONS:
            raise InvalidError(f'`reduction` is "{reduction}"; use "mean" or "sum"')
        if order not in _ORDERS:
            raise InvalidError(f'`order` is "{order}"; use "any" or "fixed"')
        if order == "fixed" and (lanes is None or (model is None and self._needs_model)):
            raise InvalidError(
                '`order="fixed"` needs `lanes`, the number of batches whose gradients are added, and `model`, whose calls '
                "begin a batch"
            )
        if lanes is not None and lanes < 1:
            raise InvalidError(f"`lanes` is {lanes}; it is at least 1")
        for name, limit in (("clip_value", clip_value), ("clip_norm", clip_norm)):
            if limit is not None and not limit > 0:
                raise InvalidError(f"`{name}` is {limit}; it is larger than 0")
        if error_if_nonfinite and clip_norm is None:
            raise InvalidError(
                "`error_if_nonfinite` needs a norm; pass `clip_norm`, or `clip_norm=math.inf`, which only computes it"
            )
        self._optimizer = optimizer
        self._lanes = lanes
        self._reduction = reduction
        self._scaler = scaler
        self._clip_value = clip_value
        self._clip_norm = clip_norm
        self._is_error_if_nonfinite = error_if_nonfinite
        self._is_fixed = order == "fixed"
        self._seed = operator.index(seed)
        # Updates so far, with a fixed order.
        self._updates = 0
        self._buffers_mode = _checked_mode(buffers, model)
        if model is not None:
            _check_model(model, self._parameters())
        if scaler is not None:
            _claim(scaler, optimizer)
        self._buffers: Optional[Buffers] = None
        if model is not None and self._buffers_mode in ("average", "broadcast"):
            self._buffers = Buffers(model, self._buffers_mode)
        self._grad_norm: Optional[torch.Tensor] = None
        self._was_skipped = False
        self._round = -1
        self._batches = 0
        self._samples = 0
        # Of the batch that has not ended: its samples, and whether its random states are set.
        self._added = 0
        self._is_seeded = False
        self._sums: Optional[LaneSums] = None
        self._ordered: Optional[_Ordered] = None
        # Whether the next update has most likely gradients of the same parameters. All workers agree on it.
        self._is_expected = False
        # The rounds in which a loss was checked, and in which workers have compared their settings.
        self._checked = -1
        self._agreed = -1
        self._is_updating = False
        # When the update before has ended, in this round.
        self._update_ended: Optional[float] = None
        if model is not None and (self._buffers is not None or self._is_fixed):
            self._follow_before(model)
        self._refuse_steps()

    @property
    def grad_norm(self) -> Optional[torch.Tensor]:
        """Norm of the last update's gradient before it was clipped to ``clip_norm``, the same on all workers.

        As ``torch.nn.utils.clip_grad_norm_`` returns it. ``None`` without ``clip_norm``, and before the first update.
        """
        return self._grad_norm

    @property
    def is_updating(self) -> bool:
        """Whether the optimizer takes the step of an update."""
        return self._is_updating

    @property
    def was_skipped(self) -> bool:
        """Whether the scaler has left the last update out, on all workers. Then a schedule takes no step, either."""
        return self._was_skipped

    def backward(self, loss: torch.Tensor, samples: SupportsIndex) -> None:
        """Adds the gradient of a batch.

        Args:
            loss: The loss of the batch: its mean or its sum, as ``reduction`` says.
            samples: Number of samples of the batch.

        Raises:
            InvalidError: The loss or the number is invalid, the loss has no gradient for a parameter of the
                optimizer or is scaled already, gradients of earlier batches are gone, or training has changed
                buffers of a model that was not passed to the accumulator.
        """
        self._follow()
        number = checked_samples(samples)
        self._check(loss)
        loss = loss * number if self._reduction == "mean" else loss
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._end_backward(number)

    def step(self) -> bool:
        """Ends a batch, and updates the model after the last one of an update.

        Returns:
            Whether the update has ended. It does on all workers at once.

        Raises:
            InvalidError: No worker has added a sample, workers have made their accumulators with different settings,
                or the norm is not finite and ``error_if_nonfinite`` is set; then the update is left out, on all
                workers.
        """
        self._follow()
        place = current_assignment()
        self._end_batch()
        if self._batches < len(self._own_lanes()):
            return False
        self._check_gradients()
        self._note_busy()
        try:
            if self._agreed != place.round:
                self._check_agreement(place.world_size)
                self._agreed = place.round
            self._add_over_workers(place.world_size)
            self._update()
        finally:
            self._discard()
        self._update_ended = time.perf_counter()
        # Also an update that the scaler left out.
        self._updates += 1
        return True

    def state_dict(self) -> Dict[str, Any]:
        """Returns the number of lanes, the state of the scaler and, with a fixed order, what random states depend on.

        The batches of an unfinished update do not count.
        """
        scaler = None if self._scaler is None else self._scaler.state_dict()
        fixed = {"updates": self._updates, "threads": torch.get_num_threads(), "seed": self._seed}
        return {"lanes": self._lanes, "scaler": scaler, **(fixed if self._is_fixed else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Discards an unfinished update.

        Raises:
            InvalidError: The state is that of another number of lanes or, with a fixed order, of threads, or of another
                seed, or only one of the two has a scaler.
        """
        lanes, scaler = state["lanes"], state["scaler"]
        if lanes != self._lanes:
            raise InvalidError(
                f"the saved state has {_shown(lanes)}, this accumulator has {_shown(self._lanes)}: its updates would "
                f"be of other samples; pass `lanes={lanes}`, or leave the accumulator out of the state"
            )
        if bool(scaler) != (self._scaler is not None and self._scaler.is_enabled()):
            raise InvalidError(
                f"the saved state has {'a' if scaler else 'no'} scaler, this accumulator has "
                f"{'none' if scaler else 'one'}; make it as when the state was saved"
            )
        if self._scaler is not None and scaler:
            self._scaler.load_state_dict(scaler)
        seed = state.get("seed", self._seed)
        if self._is_fixed and seed != self._seed:
            raise InvalidError(
                f"the saved state has the seed {seed}, and this accumulator {self._seed}: its random numbers would be "
                f"others; pass `seed={seed}`"
            )
        threads = state.get("threads")
        if self._is_fixed and threads not in (None, torch.get_num_threads()):
            raise InvalidError(
                f"the saved state is that of {threads} threads, and this worker has {torch.get_num_threads()}: with another "
                f"number it computes other bits; call `torch.set_num_threads({threads})`"
            )
        self._updates = state.get("updates", 0)
        # What was computed with other values is discarded at the next use.
        self._round = -1

    def _update(self) -> None:
        scaler = self._scaler
        before = 1.0
        if scaler is not None:
            before = scaler.get_scale()
            self._unscale(scaler)
        parameters = self._parameters()
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value)
        if self._clip_norm is not None:
            self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        if self._is_error_if_nonfinite and (scaler is None or not scaler.is_enabled()):
            self._check_norm()
        self._is_updating = True
        try:
            if scaler is None:
                self._optimizer.step()
                return
            # All workers have the same gradients, so all of them take the update or leave it out.
            scaler.step(self._optimizer)
            scaler.update()
            self._was_skipped = scaler.get_scale() < before
        finally:
            self._is_updating = False

    def _unscale(self, scaler: "torch.amp.GradScaler") -> None:
        if scaler.is_enabled() and scaler._scale is None:
            # Only a loss creates the scale, and this worker had none.
            scaler.scale(self._parameters()[0].detach().new_zeros(()))
        try:
            scaler.unscale_(self._optimizer)
        except RuntimeError as error:
            raise InvalidError(
                f"the scaler was used outside of the accumulator ({error}); do not call `unscale_`, `step` or `update`: "
                "`step` of the accumulator does"
            ) from error

    def _check_norm(self) -> None:
        norm = self._grad_norm
        if norm is None or torch.isfinite(norm):
            return
        raise InvalidError(
            f"the norm of the gradient of this update is {norm.item()}, so the update was left out on all workers; look "
            "for the loss that is not finite, or pass `error_if_nonfinite=False`"
        )

    def _check(self, loss: torch.Tensor) -> None:
        """Checks a loss: most of all the first one of a round, since the program computes others likewise."""
        if loss.numel() != 1:
            raise InvalidError(
                f"the loss has the shape {tuple(loss.shape)}; pass one number: the mean over the samples, or their sum "
                'with `reduction="sum"`'
            )
        if not loss.requires_grad:
            raise InvalidError(
                "the loss depends on no parameter that has a gradient; compute it outside of `torch.no_grad()`, from a "
                "model whose parameters are not all frozen"
            )
        self._check_gradients()
        if self._checked == self._round:
            return
        if _is_scaled(loss):
            raise InvalidError(
                "the loss is scaled by a GradScaler, whose scale would stay in the update; pass "
                "`GradientAccumulator(…, scaler=scaler)`, and the loss as it is"
            )
        if self._buffers_mode is None and trains_statistics(loss):
            raise InvalidError(
                "the model has a BatchNorm, whose running statistics would differ between the workers; pass "
                "`GradientAccumulator(…, model=model)`, which averages them, set these layers to `eval()`, or pass "
                '`buffers="own"`'
            )
        self._check_replicas()
        self._checked = self._round

    def _check_replicas(self) -> None:
        if current_assignment().world_size > 1 and _is_replicated(self._parameters()):
            raise InvalidError(
                "the model is wrapped in DistributedDataParallel, which adds gradients in each batch; call the module "
                "itself: the accumulator adds them once an update"
            )

    def _check_gradients(self) -> None:
        if (self._added if self._is_fixed else self._samples) and not self._has_gradients():
            raise InvalidError(
                "the gradients of earlier batches of this update are gone; do not call `zero_grad`: `step` of the "
                "accumulator does"
            )

    def _check_agreement(self, world_size: int) -> None:
        """Checks, once a round, that all workers have made their accumulators likewise."""
        if world_size > 1:
            check_alike(_max, "accumulators", self._settings(world_size))

    def _settings(self, world_size: int) -> List[Setting]:
        parameters = self._parameters()
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        buffers = 0 if self._buffers is None else len(self._buffers.changed())
        numbers = sum(it.numel() for it in parameters)
        mode = self._buffers_mode or "own"
        in_state = "keep the scaler or the accumulator in the state"
        threads = "set OMP_NUM_THREADS on all, or call `torch.set_num_threads`"
        return [
            Setting("`lanes`", self._lanes or world_size),
            Setting("`reduction`", _REDUCTIONS.index(self._reduction), words=_REDUCTIONS),
            Setting("`clip_value`", float(self._clip_value or 0.0)),
            Setting("`clip_norm`", float(self._clip_norm or 0.0)),
            Setting("numbers of parameters", len(parameters), "make the same optimizer on all"),
            Setting("sizes of parameters", numbers, "make the same model on all"),
            Setting("`buffers`", _BUFFERS.index(mode), words=_BUFFERS),
            Setting("numbers of buffers", buffers, "make the same model on all"),
            Setting("scales of the scaler", float(scaler.get("scale", 0.0)), in_state),
            Setting("growth of the scaler", scaler.get("_growth_tracker", 0), in_state),
            Setting("`order`", int(self._is_fixed), words=_ORDERS),
            Setting("`seed`", self._seed if self._is_fixed else 0),
            Setting("numbers of updates", self._updates if self._is_fixed else 0, "keep the accumulator in the state"),
            Setting("numbers of threads", torch.get_num_threads() if self._is_fixed else 0, threads),
        ]

    def _follow_before(self, model: torch.nn.Module) -> None:
        """Follows the rounds before each call of the model, which changes the buffers."""
        this = weakref.ref(self)

        def before(module: torch.nn.Module, _: Any) -> None:
            accumulator = this()
            if accumulator is not None:
                accumulator._follow()
                # An evaluation does not begin a batch.
                if accumulator._is_fixed and module.training:
                    accumulator._set_seed()

        weakref.finalize(self, model.register_forward_pre_hook(before).remove)

    def _refuse_steps(self) -> None:
        """Refuses steps of the optimizer that are not those of the accumulator, in the middle of an update."""
        this = weakref.ref(self)

        def before(*_: Any) -> None:
            accumulator = this()
            if accumulator is None or accumulator._is_updating or not accumulator._samples:
                return
            if accumulator._round == current_assignment().round:
                raise InvalidError(
                    "`optimizer.step()` was called before an update has ended, which would update this worker alone; "
                    "call `step` of the accumulator in its place"
                )

        try:
            hook = self._optimizer.register_step_pre_hook(before)
        except AttributeError as error:
            # Accelerate's derives from `Optimizer`, but is none.
            raise InvalidError(
                f"the optimizer is a wrapper of the type {type(self._optimizer).__name__}; pass the optimizer that it "
                "wraps"
            ) from error
        weakref.finalize(self, hook.remove)

    def _follow(self) -> None:
        """Discards what was computed in an earlier round."""
        number = current_assignment().round
        if number != self._round:
            self._discard()
            self._round = number
            self._update_ended = None

    def _note_busy(self) -> None:
        # An accelerator computes after its calls have returned.
        if self._update_ended is not None and self._parameters()[0].device.type == "cpu":
            membership().note_update(time.perf_counter() - self._update_ended)

    def _own_lanes(self) -> range:
        place = current_assignment()
        return own_lanes(place.rank, place.world_size, self._lanes or place.world_size)

    def _lane(self) -> int:
        """The number of the present batch among those of the update."""
        return self._own_lanes()[self._batches]

    def _set_seed(self) -> None:
        """Sets the random states of a batch, at its first call of the model."""
        if self._is_seeded:
            return
        text = f"{self._seed}/{self._updates}/{self._lane()}"
        seed_all(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1)
        self._is_seeded = True

    def _end_backward(self, number: int) -> None:
        """Counts a gradient that was added to those of the parameters: the sum over that many samples."""
        if not self._has_gradients():
            raise InvalidError(
                "the loss has no gradient for any parameter of the optimizer; make the optimizer of the parameters of "
                "the model that computes the loss"
            )
        if self._buffers is not None:
            self._buffers.end_batch(number, self._lane(), current_assignment().world_size)
        self._samples += number
        self._added += number

    def _end_batch(self) -> None:
        """Keeps the gradients of a batch apart, if their order is fixed."""
        if self._is_fixed:
            self._check_gradients()
            parameters = self._parameters()
            if self._sums is None:
                self._sums = LaneSums(self._lanes or 1)
            self._sums.add(self._lane(), [it.grad for it in parameters])
            for parameter in parameters:
                parameter.grad = None
        self._added = 0
        self._is_seeded = False
        self._batches += 1

    def _discard(self) -> None:
        self._optimizer.zero_grad()
        self._batches = 0
        self._samples = 0
        self._added = 0
        self._is_seeded = False
        self._sums = None
        if self._buffers is not None:
            self._buffers.begin()

    def _parameters(self) -> List[torch.Tensor]:
        return [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def _has_gradients(self) -> bool:
        return any(it.grad is not None for group in self._optimizer.param_groups for it in group["params"])

    def _add_over_workers(self, world_size: int) -> None:
        parameters = self._parameters()
        # A parameter without a gradient on any worker is not updated; zero would be an update for some
        # optimizers.
        sums = [[it.grad for it in parameters]] if self._sums is None else self._sums.sums()
        has_gradient = [int(any(it is not None for it in of_one)) for of_one in zip(*sums)]
        changed = [] if self._buffers is None else self._buffers.changed()
        counts = [self._samples, *has_gradient, *changed]
        # Mostly the same parameters have gradients as in the updates before. Then these numbers go with the gradients.
        begun = self._expected(parameters) if world_size > 1 else None
        if begun is not None:
            begun.sum.begin(_some(sums, begun.numbers), counts)
            counts = begun.sum.counts()
        elif world_size > 1:
            counts = _sum(counts)
        samples, *used = counts
        used, changed = used[: len(parameters)], used[len(parameters) :]
        numbers = [number for number, count in enumerate(used) if count]
        if begun is not None and (not samples or begun.numbers != numbers):
            begun.sum.give_up()
            begun = None
        if not samples:
            raise InvalidError("no worker has added a sample to this update")
        if not self._is_fixed:
            _add_in_any_order(parameters, used, samples, world_size)
        else:
            if begun is None:
                begun = self._ordered_for(parameters, numbers, len(counts))
                begun.sum.begin(_some(sums, numbers), counts)
            begun.sum.finish(samples)
        if self._buffers is not None:
            self._buffers.end(changed, samples, self._lanes or world_size, world_size)

    def _expected(self, parameters: Sequence[torch.Tensor]) -> Optional[_Ordered]:
        """Returns the sum of the last two updates of the round, if the same parameters had gradients in both."""
        ordered = self._ordered
        is_next = ordered is not None and ordered.made_for == (self._round, _marks(parameters))
        return ordered if is_next and self._is_expected else None

    def _ordered_for(self, parameters: Sequence[torch.Tensor], numbers: List[int], counts: int) -> _Ordered:
        """Returns the sum for those parameters that have a gradient on some worker."""
        made_for = self._round, _marks(parameters)
        known = self._ordered
        if known is not None and (known.made_for, known.numbers) == (made_for, numbers):
            self._is_expected = True
            return known
        # Its memory is free before there is that of the next.
        self._ordered = known = None
        self._is_expected = False
        added = OrderedSum([parameters[it] for it in numbers], self._lanes or 1, counts)
        self._ordered = _Ordered(made_for, numbers, added)
        return self._ordered


class _Ordered(NamedTuple):
    """The sum of the gradients of some parameters."""

    made_for: Tuple[int, List[Any]]
    """The round, and all parameters."""
    numbers: List[int]
    """The numbers of those that have gradients."""
    sum: OrderedSum


def _some(sums: Sequence[Gradients], numbers: Sequence[int]) -> List[Gradients]:
    return [[gradients[it] for it in numbers] for gradients in sums]


def _marks(parameters: Sequence[torch.Tensor]) -> List[Any]:
    return [(id(it), it.dtype, it.device) for it in parameters]


_CLAIMED: "weakref.WeakKeyDictionary[Any, weakref.ref[torch.optim.Optimizer]]" = weakref.WeakKeyDictionary()
"""The optimizer of each scaler: one that is shared would change its scale in the middle of the other's update."""


def _claim(scaler: "torch.amp.GradScaler", optimizer: torch.optim.Optimizer) -> None:
    known = _CLAIMED.get(scaler)
    other = None if known is None else known()
    if other is not None and other is not optimizer:
        raise InvalidError(
            "the scaler is that of another optimizer's accumulator, in the middle of whose updates its scale would "
            "change; make a GradScaler for each"
        )
    _CLAIMED[scaler] = weakref.ref(optimizer)


def _checked_mode(buffers: Optional[str], model: Optional[torch.nn.Module]) -> Optional[str]:
    if buffers is None:
        return None if model is None else "average"
    if buffers not in _BUFFERS:
        raise InvalidError(f'`buffers` is "{buffers}"; use {", ".join(_quoted(it) for it in _BUFFERS)}')
    if buffers != "own" and model is None:
        raise InvalidError(f'`buffers` is "{buffers}", but there is no model; pass `model`')
    return buffers


def _check_model(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidError(
            "`model` is a DistributedDataParallel; pass its module, and do not wrap it: the accumulator adds gradients "
            "itself, once an update"
        )
    known = {id(it) for it in model.parameters()}
    if not any(id(it) in known for it in parameters):
        raise InvalidError(
            "the optimizer updates no parameter of `model`; make the optimizer of `model.parameters()`, after the model "
            "is what it will be"
        )


def checked_samples(samples: SupportsIndex) -> int:
    """Returns a number of samples, from 1 on."""
    try:
        number = operator.index(samples)
    except TypeError as error:
        raise InvalidError(f"`samples` is {samples}; it is a whole number") from error
    if number < 1:
        raise InvalidError(f"`samples` is {number}; leave `backward` out for a batch without samples")
    return number


def _is_scaled(loss: torch.Tensor) -> bool:
    """Whether a loss is the result of ``GradScaler.scale``."""
    factor = getattr(loss.grad_fn, "_saved_other", None)
    if not isinstance(factor, torch.Tensor) or factor.requires_grad:
        return False
    # A loss does not refer to its scaler. This looks once, and only if the loss is a product with such a factor.
    # Its class is asked for by type: `isinstance` would run the code of proxies.
    known = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
    scalers = (it for it in gc.get_objects() if issubclass(type(it), known))
    return any(it.is_enabled() and it._scale is factor for it in scalers)


def _is_replicated(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a DistributedDataParallel of this round adds the gradients of some of these parameters."""
    if not dist.is_initialized():
        return False
    known = {id(it) for it in parameters}
    wrapper = torch.nn.parallel.DistributedDataParallel
    # A parameter does not refer to its wrapper, either. This looks once.
    for it in gc.get_objects():
        if not issubclass(type(it), wrapper) or it.__dict__.get("process_group") is not dist.group.WORLD:
            continue
        if it.require_backward_grad_sync and any(id(parameter) in known for parameter in it.parameters()):
            return True
    return False


def _add_in_any_order(parameters: Sequence[torch.Tensor], used: Sequence[int], samples: int, world_size: int) -> None:
    alike: Dict[Tuple[torch.dtype, torch.device], List[torch.Tensor]] = {}
    for parameter, count in zip(parameters, used):
        if count:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for some in alike.values():
        _add_gradients(some, samples, world_size)


def _add_gradients(parameters: Sequence[torch.Tensor], samples: int, world_size: int) -> None:
    """Replaces gradients by their sum over all workers, divided by the number of samples."""
    gradients = [torch.zeros_like(it) if it.grad is None else it.grad for it in parameters]
    total = torch.cat([it.flatten() for it in gradients])
    if world_size > 1:
        dist.all_reduce(total)
    total /= samples
    sizes = [it.numel() for it in parameters]
    for parameter, gradient in zip(parameters, total.split(sizes)):  # type: ignore[no-untyped-call]
        parameter.grad = gradient.view_as(parameter)


def _shown(lanes: Optional[int]) -> str:
    return "one lane per worker" if lanes is None else f"{lanes} lanes"


def _quoted(word: str) -> str:
    return f'"{word}"'


def _sum(values: Sequence[int]) -> List[int]:
    """Returns the sum of each value over all workers."""
    found = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(found)
    return found.tolist()  # type: ignore[no-any-return]


def _max(values: Sequence[int]) -> List[int]:
    """Returns the maximum of each value over all workers."""
    found = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()  # type: ignore[no-any-return]
