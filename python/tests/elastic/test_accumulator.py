"""How an update is clipped, scaled, left out and saved, and what is refused, in one process."""

from __future__ import annotations

import copy
import math
from typing import Any, List

import pytest
import steadfast
from steadfast import elastic

torch = pytest.importorskip("torch")
et = pytest.importorskip("steadfast.elastic.torch")

pytestmark = pytest.mark.usefixtures("alone")


def vector(size: int = 2) -> Any:
    return torch.nn.Parameter(torch.zeros(size))


def of(parameter: Any, **settings: Any) -> Any:
    """An accumulator whose updates subtract the gradient."""
    return et.GradientAccumulator(torch.optim.SGD([parameter], lr=1.0), **settings)


def update(accumulator: Any, parameter: Any, *gradients: List[float]) -> None:
    """Takes an update of batches of one sample, with these gradients."""
    for gradient in gradients:
        accumulator.backward((parameter * torch.tensor(gradient)).sum(), 1)
        stepped = accumulator.step()
    assert stepped


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_an_update_is_clipped_as_pytorch_clips_its_mean_gradient(scale):
    """accelerate#641, accelerate#113: by value first, then by norm, once all batches are added, and unscaled once."""
    gradients = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)) * 10
    twin = vector(5)
    twin.grad = gradients.mean(0)
    torch.nn.utils.clip_grad_value_([twin], 4.0)
    norm = torch.nn.utils.clip_grad_norm_([twin], 5.0)
    assert norm > 5 and twin.grad.abs().max() < 4
    parameter = vector(5)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    accumulator = of(parameter, lanes=4, scaler=scaler, clip_value=4.0, clip_norm=5.0)
    assert accumulator.grad_norm is None
    update(accumulator, parameter, *gradients.tolist())
    assert torch.allclose(-parameter.detach(), twin.grad)
    assert torch.allclose(accumulator.grad_norm, norm)


def test_an_infinite_limit_only_computes_the_norm():
    parameter = vector()
    accumulator = of(parameter, clip_norm=math.inf)
    update(accumulator, parameter, [30.0, 40.0])
    assert (parameter.tolist(), accumulator.grad_norm.item()) == ([-30.0, -40.0], 50.0)
    update(accumulator, parameter, [0.0, 0.0])
    assert (parameter.tolist(), accumulator.grad_norm.item()) == ([-30.0, -40.0], 0.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_an_error_if_asked_for_and_the_next_update_counts(value):
    """Otherwise it goes the way that PyTorch's does."""
    parameter = vector()
    accumulator = of(parameter, lanes=2, clip_norm=1.0, error_if_nonfinite=True)
    accumulator.backward((parameter * torch.tensor([value, 0.0])).sum(), 1)
    accumulator.step()
    with pytest.raises(steadfast.InvalidError, match=f"the norm of the gradient of this update is {value}"):
        accumulator.step()
    assert parameter.tolist() == [0, 0]
    update(accumulator, parameter, [0.5, 0.0], [0.5, 0.0])
    assert parameter.tolist() == [-0.5, 0]
    accumulator = of(parameter, clip_norm=1.0)
    update(accumulator, parameter, [value, 0.0])
    assert not torch.isfinite(accumulator.grad_norm)
    assert not torch.isfinite(parameter[0])


def test_an_update_that_the_scaler_leaves_out_is_no_error_and_is_told():
    """pytorch#55585: a schedule that counts updates asks for it."""
    parameter = vector()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accumulator = of(parameter, scaler=scaler, clip_norm=1.0, error_if_nonfinite=True)
    update(accumulator, parameter, [math.inf, 0.0])
    assert (parameter.tolist(), accumulator.was_skipped, scaler.get_scale()) == ([0, 0], True, 2.0)
    update(accumulator, parameter, [0.5, 0.0])
    assert (parameter.tolist(), accumulator.was_skipped) == ([-0.5, 0], False)


def test_a_worker_whose_batches_are_empty_takes_part_in_a_scaled_update(monkeypatch):
    """Its scaler has scaled nothing yet."""
    parameter = vector()
    accumulator = of(parameter, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))

    def added(_: int) -> None:
        parameter.grad = torch.tensor([4.0, 8.0])

    # As another worker's gradients.
    monkeypatch.setattr(accumulator, "_add_over_workers", added)
    assert accumulator.step()
    assert parameter.tolist() == [-1, -2]


def test_hooks_of_the_optimizer_see_the_gradient_of_the_update():
    """Whatever else is to be done between the sum and the update: once, unscaled."""
    parameter, seen = vector(), []
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.tolist()))
    accumulator = et.GradientAccumulator(optimizer, lanes=2, scaler=torch.amp.GradScaler("cpu"))
    update(accumulator, parameter, [1.0, 0.0], [0.0, 3.0])
    assert seen == [[0.5, 1.5]]


def normalized() -> Any:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("buffers", ["average", "broadcast", "own"])
def test_buffers_are_averaged_or_those_of_the_first_batch_or_a_workers_own(buffers):
    model = normalized()
    parts = torch.randn(8, 3).split([5, 3])
    ends = []
    for start in ([0], [1], [0, 1]):
        twin = copy.deepcopy(model)
        for index in start:
            twin(parts[index])
        ends.append(twin[1].running_var)
    expected = {
        "average": (ends[0] * 5 + ends[1] * 3) / 8,
        "broadcast": ends[0],
        "own": ends[2],
    }[buffers]
    accumulator = et.GradientAccumulator(
        torch.optim.SGD(model.parameters(), lr=0.0), lanes=2, model=model, buffers=buffers
    )
    for part in parts:
        accumulator.backward(model(part).mean(), len(part))
        accumulator.step()
    assert torch.allclose(model[1].running_var, expected)
    assert model[1].num_batches_tracked == (2 if buffers == "own" else 1)


class Counting(torch.nn.Module):
    """A layer with buffers of many kinds, each of which the batch `x` changes by `x`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        # Not exact as a floating point number.
        self.register_buffer("large", torch.tensor(2**53 + 1))
        self.register_buffer("small", torch.zeros(1, dtype=torch.float16))
        self.register_buffer("complex", torch.zeros(1, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("notes", torch.zeros(1), persistent=False)

    def forward(self, number: int) -> Any:
        self.large += number
        self.small += number
        self.complex += number * 1j
        self.seen[:] = True
        # Another size with each batch.
        self.notes = torch.zeros(number)
        return (self.weight * number).sum()


def test_buffers_of_any_type_are_averaged():
    """The mean of changes by 2 and 5, of one sample and of two, is 4."""
    model = Counting()
    accumulator = et.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.0), lanes=2, model=model)
    for number, samples in ((2, 1), (5, 2)):
        accumulator.backward(model(number), samples)
        accumulator.step()
    assert model.large.item() == 2**53 + 1 + 4
    assert (model.small.item(), model.complex.item(), model.seen.tolist()) == (4.0, 4j, [True, True])


def test_a_buffer_that_is_replaced_by_one_of_another_size_is_named():
    model = Counting()
    accumulator = et.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    loss = model(2)
    model.small = torch.zeros(3)
    with pytest.raises(steadfast.InvalidError, match=r"replaced the buffer `small` by one of torch.float32 \(3,\)"):
        accumulator.backward(loss, 1)


def test_an_accumulator_is_part_of_a_state():
    parameter = vector()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = of(parameter, lanes=2, scaler=scaler)
    state = elastic.TorchState(optimizer=accumulator._optimizer, accumulator=accumulator)
    update(accumulator, parameter, [math.inf, 0.0], [1.0, 0.0])
    assert scaler.get_scale() == 4.0
    # In the middle of the next one.
    accumulator.backward(parameter.sum(), 1)
    accumulator.step()
    state.restore()
    assert scaler.get_scale() == 8.0
    update(accumulator, parameter, [1.0, 0.0], [3.0, 0.0])
    assert parameter.tolist() == [-2, 0]


def test_a_state_of_other_updates_is_refused():
    saved = of(vector(), lanes=8).state_dict()
    with pytest.raises(steadfast.InvalidError, match="saved state has 8 lanes, this accumulator has 4 .*`lanes=8`"):
        of(vector(), lanes=4).load_state_dict(saved)
    with pytest.raises(steadfast.InvalidError, match="8 lanes, this accumulator has one lane per worker"):
        of(vector()).load_state_dict(saved)
    with pytest.raises(steadfast.InvalidError, match="has no scaler, this accumulator has one"):
        of(vector(), lanes=8, scaler=torch.amp.GradScaler("cpu")).load_state_dict(saved)
    scaled = of(vector(), lanes=8, scaler=torch.amp.GradScaler("cpu")).state_dict()
    with pytest.raises(steadfast.InvalidError, match="has a scaler, this accumulator has none"):
        of(vector(), lanes=8).load_state_dict(scaled)
    # One that is turned off is none.
    of(vector(), lanes=8, scaler=torch.amp.GradScaler("cpu", enabled=False)).load_state_dict(saved)


def test_habits_of_a_plain_loop_are_refused_before_they_change_an_update():
    parameter = vector()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    accumulator = et.GradientAccumulator(optimizer, lanes=2)
    accumulator.backward(parameter.sum(), 1)
    with pytest.raises(steadfast.InvalidError, match=r"`optimizer.step\(\)` was called before an update has ended"):
        optimizer.step()
    accumulator.step()
    optimizer.zero_grad()
    with pytest.raises(
        steadfast.InvalidError, match="gradients of earlier batches .* are gone; do not call `zero_grad`"
    ):
        accumulator.backward(parameter.sum(), 1)
    with pytest.raises(steadfast.InvalidError, match="do not call `zero_grad`"):
        accumulator.step()
    # After an update both are harmless.
    accumulator = et.GradientAccumulator(optimizer, lanes=1)
    update(accumulator, parameter, [1.0, 1.0])
    optimizer.step()
    optimizer.zero_grad()
    update(accumulator, parameter, [1.0, 1.0])
    assert parameter.tolist() == [-2, -2]


def test_a_scaler_that_the_program_calls_too_is_refused():
    parameter = vector()
    scaler = torch.amp.GradScaler("cpu")
    accumulator = of(parameter, scaler=scaler)
    accumulator.backward(parameter.sum(), 1)
    scaler.unscale_(accumulator._optimizer)
    with pytest.raises(steadfast.InvalidError, match="scaler was used outside of the accumulator"):
        accumulator.step()


def test_a_scaler_of_another_optimizer_is_refused():
    scaler = torch.amp.GradScaler("cpu")
    first = of(vector(), scaler=scaler)
    with pytest.raises(steadfast.InvalidError, match="that of another optimizer's accumulator"):
        of(vector(), scaler=scaler)
    # In the next round.
    et.GradientAccumulator(first._optimizer, scaler=scaler)


def test_a_loss_that_changes_nothing_is_refused():
    accumulator = of(vector())
    with pytest.raises(steadfast.InvalidError, match="no gradient for any parameter of the optimizer"):
        accumulator.backward(vector().sum(), 1)
    with pytest.raises(steadfast.InvalidError, match="depends on no parameter that has a gradient"):
        accumulator.backward(torch.ones(()), 1)
    with pytest.raises(steadfast.InvalidError, match=r"the loss has the shape \(2,\)"):
        accumulator.backward(vector() * 2, 1)


@pytest.mark.parametrize("samples, message", [(0, "leave `backward` out"), (1.5, "a whole number")])
def test_a_batch_has_a_number_of_samples(samples, message):
    parameter = vector()
    with pytest.raises(steadfast.InvalidError, match=message):
        of(parameter).backward(parameter.sum(), samples)


def test_settings_that_do_not_fit_each_other_are_refused():
    model = normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for settings, message in (
        ({"lanes": 0}, "`lanes` is 0; it is at least 1"),
        ({"clip_value": 0.0}, "`clip_value` is 0.0; it is larger than 0"),
        ({"clip_norm": math.nan}, "`clip_norm` is nan"),
        ({"error_if_nonfinite": True}, "`error_if_nonfinite` needs a norm"),
        ({"buffers": "mean", "model": model}, '`buffers` is "mean"; use "average", "broadcast", "own"'),
        ({"buffers": "average"}, "there is no model; pass `model`"),
        ({"model": normalized()}, "updates no parameter of `model`"),
    ):
        with pytest.raises(steadfast.InvalidError, match=message):
            et.GradientAccumulator(optimizer, **settings)
    elastic.group()
    with pytest.raises(steadfast.InvalidError, match="pass its module, and do not wrap it"):
        et.GradientAccumulator(optimizer, model=torch.nn.parallel.DistributedDataParallel(model))


def test_the_first_loss_of_each_round_is_checked():
    """The training function may wrap or change the model in each."""
    model = normalized().eval()
    accumulator = et.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1))
    accumulator.backward(model(torch.randn(4, 3)).mean(), 4)
    accumulator.step()
    elastic._membership.membership().next_round(None)
    with pytest.raises(steadfast.InvalidError, match="the model has a BatchNorm"):
        accumulator.backward(model.train()(torch.randn(4, 3)).mean(), 4)


class Wrapper(torch.optim.Optimizer):
    """As those of Accelerate are made."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)


def test_a_wrapped_optimizer_is_refused():
    with pytest.raises(steadfast.InvalidError, match="wrapper of the type Wrapper; pass the optimizer that it wraps"):
        et.GradientAccumulator(Wrapper(torch.optim.SGD([vector()], lr=1.0)))


def test_statistics_of_a_workers_own_need_no_model():
    model = normalized()
    accumulator = et.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), buffers="own")
    accumulator.backward(model(torch.randn(4, 3)).mean(), 4)
    assert accumulator.step()
