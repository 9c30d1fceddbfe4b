"""An optimizer for programs that call ``loss.backward()`` and ``optimizer.step()`` themselves."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Optional, SupportsIndex

import torch

from ..errors import InvalidError
from ._accumulator import GradientAccumulator, checked_samples

__all__ = ["DistributedOptimizer"]

_KEY = "steadfast"


class _Accumulator(GradientAccumulator):
    """One that takes gradients which the program has computed, of a model that it need not know."""

    _needs_model = False

    def add(self, samples: int) -> bool:
        """Takes the mean gradient of a pass; returns whether the update has ended."""
        parameters = self._parameters()
        gradients = [it.grad for it in parameters]
        # Discards what earlier passes have left if this one is the first of a round.
        self._follow()
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        if self._checked != self._round:
            self._check_replicas()
            self._checked = self._round
        present = [it for it in gradients if it is not None]
        if samples != 1 and present:
            torch._foreach_mul_(present, samples)
        self._end_backward(samples)
        return self.step()


class _Distributed(torch.optim.Optimizer):
    """What stands before the class of an optimizer."""

    _accumulator: _Accumulator
    update_gradients: bool
    """Whether the last call of ``step`` has updated the parameters."""

    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], Any]] = None, *, samples: SupportsIndex = 1
    ) -> Any:
        """Ends a pass, and updates the parameters after the last one of an update.

        Args:
            closure: Computes the loss and its gradients, if the program has not.
            samples: Number of samples of the pass, if passes have different numbers: an update takes the mean over
                all samples. By default each pass counts alike.

        Returns:
            What the closure returns.

        Raises:
            InvalidError: As of :meth:`GradientAccumulator.step`.
        """
        if self._accumulator.is_updating:
            return super().step()  # type: ignore[call-arg]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_gradients = self._accumulator.add(checked_samples(samples))
        return loss

    # PyTorch runs the hooks of an optimizer around `step` of its own class, which is called within this one.
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> Dict[str, Any]:
        """Returns the state of the optimizer, and what a program needs to go on with the same bits."""
        return {**super().state_dict(), _KEY: self._accumulator.state_dict()}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continues from a state, also from that of an optimizer that was not wrapped.

        Raises:
            InvalidError: As of :meth:`GradientAccumulator.load_state_dict`.
        """
        if _KEY in state_dict:
            self._accumulator.load_state_dict(state_dict[_KEY])
        super().load_state_dict({name: it for name, it in state_dict.items() if name != _KEY})


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    fixed_global_batch_size: bool = False,
    *,
    lanes: Optional[int] = None,
    model: Optional[torch.nn.Module] = None,
    **settings: Any,
) -> Any:
    """Returns an optimizer of the same class whose updates have the gradients of all workers.

    ::

        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), fixed_global_batch_size=True)
        for x, y in loader:
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
            if optimizer.update_gradients:
                schedule.step()

    The loop stays as it is, and the model is not wrapped in ``DistributedDataParallel``.

    With ``fixed_global_batch_size`` an update has the gradients of ``lanes`` passes, however many workers there are:
    each of n workers computes ``lanes // n``, and the first ``lanes % n`` one more. They are added in a fixed order.
    With ``model`` each pass has its own random states, and buffers are averaged, so that the model has the same bits
    for any number of workers: as of :class:`GradientAccumulator` with ``order="fixed"``, for which
    ``ElasticSampler(lanes=…)`` deals the samples. Without it, an update has one pass of each worker.

    Its ``state_dict`` has what the accumulator keeps. Gradients of passes do not stay in the parameters.

    Args:
        optimizer: It is not used any more.
        fixed_global_batch_size: Whether an update has the same number of passes for any number of workers.
        lanes: Number of passes of an update. By default the largest number of workers, which the variable
            ``MAX_WORKER_NUM`` has.
        model: The module, if training draws random numbers or changes buffers, as dropout and BatchNorm do.
        settings: Others of :class:`GradientAccumulator`, such as ``clip_norm`` and ``seed``.

    Raises:
        InvalidError: A value is invalid, or the number of passes is not known.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidError(f"`optimizer` is of the type {type(optimizer).__name__}; pass an optimizer of PyTorch")
    if isinstance(optimizer, _Distributed):
        raise InvalidError("`optimizer` is a DistributedOptimizer already; pass the optimizer that it was made of")
    for name in ("order", "scaler"):
        if name in settings:
            raise InvalidError(f"a DistributedOptimizer takes no `{name}`; use `GradientAccumulator`")
    if fixed_global_batch_size:
        settings.update(lanes=_checked_lanes(lanes), order="fixed")
    elif lanes is not None:
        raise InvalidError("`lanes` is the number of passes of a fixed batch; pass `fixed_global_batch_size=True`, too")
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (_Distributed, base), {}))
    # Schedules that were made of the optimizer change the groups of this one, but count calls of their own `step`.
    vars(optimizer).pop("step", None)
    wrapped.__dict__ = vars(optimizer)
    wrapped.update_gradients = False
    wrapped._accumulator = _Accumulator(wrapped, model=model, **settings)
    return wrapped


def _checked_lanes(lanes: Optional[int]) -> int:
    if lanes is not None:
        return lanes
    text = os.environ.get("MAX_WORKER_NUM", "")
    if text.isdecimal() and int(text):
        return int(text)
    found = f'is "{text}"' if text else "is not set"
    raise InvalidError(
        f"the number of passes of an update is not known: `MAX_WORKER_NUM` {found}; pass `lanes`, or start the program "
        "with `steadfast run --nnodes MIN:MAX`"
    )
