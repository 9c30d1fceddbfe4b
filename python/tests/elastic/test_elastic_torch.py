"""The state of a PyTorch model, and the mean of accumulated gradients, in one process."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from typing import Any

import pytest
import steadfast
from steadfast import elastic

from coordinator import free_port

torch = pytest.importorskip("torch")
et = pytest.importorskip("steadfast.elastic.torch")

pytestmark = pytest.mark.usefixtures("alone")


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def train_batch(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(32.0).view(8, 4)).square().sum().backward()
    optimizer.step()


def bits(*stateful: Any) -> Any:
    return copy.deepcopy([it.state_dict() for it in stateful])


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda it: torch.optim.SGD(it, 0.1, momentum=0.9)])
def test_model_optimizer_schedule_and_attributes_go_back_together(make):
    """S001-41"""
    model = net()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule, batch=0, seen=torch.zeros(2))
    initial = bits(model, optimizer, schedule)
    train_batch(model, optimizer)
    state.restore()
    assert equal(bits(model, optimizer, schedule), initial)

    train_batch(model, optimizer)
    schedule.step()
    state.batch, state.seen[1] = 1, 5
    state.commit()
    saved = bits(model, optimizer, schedule)
    for _ in range(2):
        train_batch(model, optimizer)
        schedule.step()
        state.batch += 1
        state.seen += 1
        state.restore()
        assert equal(bits(model, optimizer, schedule), saved)
        assert (state.batch, state.seen.tolist()) == (1, [0, 5])
    # The optimizer still updates this model.
    train_batch(model, optimizer)
    assert not equal(bits(model), saved[:1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64", "int8", "bool"])
def test_tensors_of_all_types_come_back(dtype):
    values = torch.arange(6).view(2, 3).to(getattr(torch, dtype)).T
    state = elastic.TorchState(values=values, scalar=torch.tensor(True), none=torch.zeros(0, 3))
    state.restore()
    assert equal(state.values, values)
    assert state.values.shape == (3, 2)
    assert state.none.shape == (0, 3)


def test_what_refers_to_a_process_group_is_not_saved():
    elastic.group()
    with pytest.raises(steadfast.InvalidError, match="belongs to one process group"):
        elastic.TorchState(model=torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)))


AT_EXIT = """
import atexit
import torch
# What is registered first is called last.
atexit.register(lambda: print("at the end:", torch.distributed.is_initialized()))
import steadfast.elastic as elastic

state = elastic.TorchState(model=torch.nn.Linear(1, 1))
elastic.run(lambda state: torch.nn.parallel.DistributedDataParallel(state.model))(state)
print("after training:", torch.distributed.is_initialized())
"""


def test_a_program_leaves_its_group_before_the_interpreter_ends():
    """S003-24: threads of a group that is left to the end may abort a process that has succeeded."""
    shown = subprocess.run([sys.executable, "-c", AT_EXIT], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout == "after training: True\nat the end: False\n", shown


def test_a_parameter_by_itself_is_refused():
    with pytest.raises(steadfast.InvalidError, match="`weight` is a torch.nn.parameter.Parameter"):
        elastic.TorchState(weight=torch.nn.Parameter(torch.ones(1)))


def test_a_group_of_ones_own_is_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(steadfast.InvalidError, match="initialized already"):
            elastic.group()
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_that_was_not_formed_does_not_count(monkeypatch):
    """Otherwise its worker would look for the others under another key in each later round."""
    place = elastic.Assignment(1, 0, 0, 2, 1, 0, 2, "127.0.0.1", free_port())
    # As if the other worker had come, and was then lost.
    monkeypatch.setattr(et, "_gather", lambda *_: None)
    for _ in range(2):
        with pytest.raises(elastic.CollectiveError):
            et.ProcessGroup(place, form_timeout=0.2)
    elastic.group()
    assert torch.distributed.distributed_c10d._world.group_count == 1


@pytest.mark.parametrize("rank, reason", [(0, "not all of 2 workers"), (1, "rank 0 does not serve")])
def test_workers_that_are_missing_are_not_waited_for_when_the_round_is_over(rank, reason):
    """One that was restarted while it started never comes to the group that the others wait in."""
    place = elastic.Assignment(1, rank, 0, 2, 1, rank, 2, "127.0.0.1", free_port())
    start = time.monotonic()
    with pytest.raises(elastic.CollectiveError, match=f"the round is over: {reason}"):
        et.ProcessGroup(place, is_over=lambda: start + 0.1 < time.monotonic())
    assert time.monotonic() < start + 10


@pytest.mark.parametrize("others", [0, 1])
def test_all_workers_form_their_group_or_none_does(others):
    """One that has left was there: it must not be counted by those that come later."""
    store = torch.distributed.HashStore()
    if others:
        store.add("here", others)
    with pytest.raises(elastic.CollectiveError, match="not all of 3 workers"):
        et._gather(store, 3, time.monotonic() + 10, lambda: True)
    for _ in range(2):
        with pytest.raises(elastic.CollectiveError, match="a worker has left"):
            et._gather(store, 3, time.monotonic() + 10, lambda: False)
    store = torch.distributed.HashStore()
    store.add("here", 2)
    et._gather(store, 3, time.monotonic() + 10, lambda: True)


def test_a_program_alone_can_use_torch_distributed():
    @elastic.run
    def train(state):
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        state.commit()
        return ones.item(), torch.distributed.get_world_size()

    assert train(elastic.TorchState(model=net())) == (1, 1)


def test_accumulated_gradients_are_the_mean_over_all_samples():
    """S002-8: also if batches have different sizes."""
    model = torch.nn.Linear(4, 1)
    twin = copy.deepcopy(model)
    features = torch.randn(7, 4)
    for reduction in ("mean", "sum"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = et.GradientAccumulator(optimizer, lanes=3, reduction=reduction)
        stepped = []
        for part in features.split([4, 2, 1]):
            accumulator.backward(getattr(model(part), reduction)(), len(part))
            stepped.append(accumulator.step())
        assert stepped == [False, False, True]
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        optimizer.zero_grad()
        twin(features).mean().backward()
        optimizer.step()
        assert torch.allclose(model.weight, twin.weight, rtol=1e-5)


def test_an_empty_batch_counts_as_none():
    weight = torch.nn.Parameter(torch.zeros(1))
    accumulator = et.GradientAccumulator(torch.optim.SGD([weight], lr=1.0), lanes=2)
    accumulator.backward(weight.sum() * 3, 1)
    assert not accumulator.step()
    assert accumulator.step()
    assert weight.item() == -3
    accumulator.step()
    with pytest.raises(steadfast.InvalidError, match="no worker has added a sample"):
        accumulator.step()


def test_gradients_of_an_earlier_round_are_discarded():
    weight = torch.nn.Parameter(torch.zeros(1))
    accumulator = et.GradientAccumulator(torch.optim.SGD([weight], lr=1.0), lanes=2)
    accumulator.backward(weight.sum() * 100, 1)
    assert not accumulator.step()
    elastic._membership.membership().next_round(None)
    for _ in range(2):
        accumulator.backward(weight.sum(), 1)
        stepped = accumulator.step()
    assert stepped
    assert weight.item() == -1


SCHEDULES = {
    "multi_step": lambda it: torch.optim.lr_scheduler.MultiStepLR(it, [1, 3]),
    "one_cycle": lambda it: torch.optim.lr_scheduler.OneCycleLR(it, 0.1, 10),
    "cyclic": lambda it: torch.optim.lr_scheduler.CyclicLR(it, 0.1, 0.2),
    "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda it: torch.optim.lr_scheduler.SequentialLR(
        it,
        [torch.optim.lr_scheduler.ConstantLR(it), torch.optim.lr_scheduler.MultiStepLR(it, [3])],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was_saved(name):
    """S001-41"""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SCHEDULES[name](optimizer)
    state = elastic.TorchState(optimizer=optimizer, schedule=schedule)

    def rates() -> Any:
        found = []
        for _ in range(4):
            optimizer.step()
            schedule.step(*([1.0] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    saved = bits(schedule)
    first = rates()
    state.restore()
    assert equal(bits(schedule), saved) and type(bits(schedule)[0]) is type(saved[0])
    assert rates() == first


def test_what_pytorch_describes_tensors_with_is_kept():
    values = {
        "size": torch.Size([2, 3]),
        "dtype": [torch.bfloat16],
        "device": torch.device("cpu"),
    }
    state = elastic.ObjectState(**values)
    for name in values:
        setattr(state, name, None)
    state.restore()
    for name, value in values.items():
        found = getattr(state, name)
        assert type(found) is type(value) and repr(found) == repr(value)


def scaled_update(features: Any, **settings: Any) -> Any:
    """Returns the weights after an update of two batches."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    accumulator = et.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), lanes=2, **settings)
    for part in features.split(4):
        accumulator.backward(model(part).square().mean(), len(part))
        accumulator.step()
    return model.weight.detach()


def test_a_scaler_changes_no_update():
    features = torch.randn(8, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = scaled_update(features)
    assert torch.equal(scaled_update(features, scaler=scaler), plain)
    assert scaler.get_scale() == 1024.0
    # An update that is not finite is left out, and the next scale is smaller.
    features[5] = float("inf")
    initial = scaled_update(features[:4])
    assert torch.equal(scaled_update(features, scaler=scaler), initial)
    assert scaler.get_scale() == 512.0


def test_a_loss_that_is_scaled_already_is_refused():
    weight = torch.nn.Parameter(torch.ones(1))
    accumulator = et.GradientAccumulator(torch.optim.SGD([weight], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(steadfast.InvalidError, match="scaled by a GradScaler.*scaler=scaler"):
        accumulator.backward(scaler.scale(weight.sum()), 1)
    off = torch.amp.GradScaler("cpu", enabled=False)
    accumulator.backward(off.scale(weight.sum()) * torch.tensor(1024.0), 1)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_norm_of_the_whole_update_is_clipped(scale):
    weight = torch.nn.Parameter(torch.zeros(2))
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    accumulator = et.GradientAccumulator(optimizer, lanes=2, scaler=scaler, clip_norm=0.5)
    for gradient in ([6.0, 0.0], [0.0, 8.0]):
        accumulator.backward((weight * torch.tensor(gradient)).sum(), 1)
        accumulator.step()
    assert weight.tolist() == pytest.approx([-0.3, -0.4], rel=1e-5)
    with pytest.raises(steadfast.InvalidError, match="`clip_norm` is 0; it is larger than 0"):
        et.GradientAccumulator(optimizer, clip_norm=0)


def test_buffers_that_would_differ_between_workers_are_refused():
    model = net()
    accumulator = et.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(steadfast.InvalidError, match="BatchNorm.*model=model"):
        accumulator.backward(model(torch.randn(8, 4)).mean(), 8)
    model[1].eval()
    accumulator.backward(model(torch.randn(8, 4)).mean(), 8)


def test_buffers_change_by_the_mean_over_the_samples_of_an_update():
    model, twin = net(), net()
    features = torch.randn(9, 4)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = et.GradientAccumulator(optimizer, lanes=2, model=model)
    changes = torch.zeros(3)
    for part in features.split(6):
        before = twin[1].running_mean.clone()
        twin(part)
        changes += (twin[1].running_mean - before) * len(part) / 9
        twin[1].running_mean.copy_(before)
        accumulator.backward(model(part).mean(), len(part))
        accumulator.step()
    assert torch.allclose(model[1].running_mean, changes)
    assert model[1].num_batches_tracked == 1
    # What a round that has ended has computed does not count.
    state = bits(model)
    accumulator.backward(model(features).mean(), 9)
    elastic._membership.membership().next_round(None)
    model.load_state_dict(state[0])
    for part in features.split(6):
        accumulator.backward(model(part).mean(), len(part))
        accumulator.step()
    assert model[1].num_batches_tracked == 2


def test_a_loader_yields_the_batches_of_a_sampler():
    data = [(torch.tensor([float(i)]), i) for i in range(5)]
    sampler = elastic.ElasticSampler(data, lanes=4, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler.batches(1), collate_fn=et.collate)
    assert [None if it is None else it[1].tolist() for it in loader] == [
        [0],
        [1],
        [2],
        [3],
        [4],
        None,
        None,
        None,
    ]
    assert len(loader) == 8
