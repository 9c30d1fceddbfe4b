"""The programs of worker processes: each reaches its agent through a socket, and others through gloo."""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import signal
import threading
from typing import Any, List

import torch

# The first step of an optimizer imports this, which takes seconds.
import torch._dynamo
import torch.distributed as dist
from steadfast import InvalidError, elastic
from steadfast.elastic.torch import GradientAccumulator, ProcessGroup, TorchState

from coordinator import RemoteAgent

SAMPLES = 96
LANES = 4
BATCH = 2


def join(port: int, member: str, timeout: float = 30, form_timeout: float = 30) -> Any:
    """Returns the agent and the membership of a worker, and makes the membership that of its process."""
    torch.set_num_threads(1)
    agent = RemoteAgent(port, member)
    connect = functools.partial(ProcessGroup, timeout=timeout, form_timeout=form_timeout)
    membership = elastic.Membership(agent, connect)
    elastic._membership.CURRENT.set(membership)
    return agent, membership


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def data() -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    return torch.arange(SAMPLES * 3).remainder(17).float().view(SAMPLES, 3)


def expected(epochs: int) -> List[float]:
    """The weights after training, whatever the number of workers."""
    return (data().sum(0) * (-epochs / (LANES * BATCH))).tolist()


def train(port: int, member: str, epochs: int = 1, dies_at: int = 0, pauses_at: int = 0) -> None:
    """Trains a model whose gradient is the sum of its samples; each update uses LANES batches.

    Args:
        dies_at: The update in the middle of which the worker kills itself.
        pauses_at: The update at which the worker waits for the next change of members.
    """
    agent, membership = join(port, member)
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = elastic.ElasticSampler(SAMPLES, lanes=LANES)
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, updates=0)
    samples = data()

    def backward(accumulator: GradientAccumulator, batch: List[int]) -> None:
        if batch:
            accumulator.backward(model(samples[batch]).sum() / len(batch), len(batch))

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        place = elastic.assignment()
        agent.note("begin", member, place.round, place.world_size, state.updates)
        accumulator = GradientAccumulator(optimizer, lanes=LANES)
        while state.epoch < epochs:
            sampler.set_epoch(state.epoch)
            for index, batch in enumerate(sampler.batches(BATCH)):
                backward(accumulator, batch)
                if state.updates + 1 == dies_at:
                    # The first of the exchanges of this update is done by all, the second by none.
                    dist.all_reduce(torch.zeros(1 + len(list(model.parameters())), dtype=torch.int64))
                    die()
                if not accumulator.step():
                    continue
                sampler.record_batch(index, BATCH)
                state.updates += 1
                if state.updates % 3 == 0:
                    state.commit()
                elif state.updates == pauses_at:
                    agent.note("paused", member)
                    while True:
                        state.check_host_updates()
                else:
                    state.check_host_updates()
            state.epoch += 1

    run(state)
    place = elastic.assignment()
    agent.note("end", member, place.world_size, state.updates, model.weight.tolist()[0])


def train_replicas(port: int, member: str, dies_at: int = 0) -> None:
    """Trains with DistributedDataParallel, whose failures come from the backward pass."""
    agent, membership = join(port, member)
    torch.manual_seed(ord(member[0]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        replica = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
        while state.step < 12:
            optimizer.zero_grad()
            output = replica(torch.full((2, 4), float(state.step)))
            if state.step == dies_at and dies_at:
                die()
            output.sum().backward()
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    run(state)
    agent.note("end", member, elastic.assignment().world_size, [it.sum().item() for it in model.parameters()])


def regroup(port: int, member: str, rounds: int) -> None:
    """Is in many groups, one after the other, each left in the middle of an exception."""
    agent, membership = join(port, member)
    counts = []

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        model = torch.nn.Linear(2, 2)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        # It is freed by the garbage collector only.
        replica.cycle = [replica]
        replica(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        counts.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))])
        if len(counts) < rounds:
            raise elastic.CollectiveError("left on purpose")

    run(TorchState(model=torch.nn.Linear(2, 2)))
    agent.note("end", member, counts)


def exchange_until_it_fails(port: int, member: str, form_timeout: float = 30) -> None:
    """Exchanges with short timeouts until it is alone."""
    agent, membership = join(port, member, timeout=1, form_timeout=form_timeout)

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        agent.note("begin", member, elastic.assignment().world_size)
        while elastic.assignment().world_size > 1:
            state.check_host_updates()

    run(elastic.ObjectState())
    agent.note("end", member, threading.active_count())


def never_connects(port: int, member: str) -> None:
    agent, _ = join(port, member)
    agent.assignment()
    agent.note("here", member)
    signal.pause()


def accumulate(port: int, member: str) -> None:
    """Takes the updates of one epoch; reports how many, and of how many samples each was."""
    agent, membership = join(port, member)
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.ones(1))
    # A gradient of zero would change the unused one, by its decay.
    groups = [{"params": [weight]}, {"params": [unused], "weight_decay": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    sampler = elastic.ElasticSampler(50, lanes=8)
    state = TorchState(optimizer=optimizer, sampler=sampler)
    means = []

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        accumulator = GradientAccumulator(optimizer, lanes=8)
        for batch in sampler.batches(2):
            if batch:
                loss = weight * torch.tensor(batch, dtype=torch.float64).mean()
                accumulator.backward(loss.sum(), len(batch))
            before = weight.item()
            if accumulator.step():
                means.append(before - weight.item())

    run(state)
    agent.note("end", member, means, unused.item())


def normalize(port: int, member: str) -> None:
    """Trains a model with BatchNorm, scaled and clipped, for one epoch; reports its state."""
    agent, membership = join(port, member)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sampler = elastic.ElasticSampler(SAMPLES, lanes=LANES)
    state = TorchState(model=model, optimizer=optimizer, scaler=scaler, sampler=sampler)
    samples = data() / 17

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        accumulator = GradientAccumulator(optimizer, lanes=LANES, model=model, scaler=scaler, clip_norm=0.1)
        for index, batch in enumerate(sampler.batches(BATCH)):
            if batch:
                accumulator.backward(model(samples[batch]).square().mean(), len(batch))
            if accumulator.step():
                sampler.record_batch(index, BATCH)
                state.commit()

    run(state)
    values = {name: it.tolist() for name, it in model.state_dict().items()}
    agent.note("end", member, values, scaler.get_scale())


def follow_buffers(port: int, member: str, buffers: str) -> None:
    """Passes batches of different sizes through a BatchNorm whose weights do not change; reports its buffers."""
    agent, membership = join(port, member)
    model = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sampler = elastic.ElasticSampler(SAMPLES - 9, lanes=LANES)
    # Few are large, so sums depend on their order.
    samples = (data().double() + 1).log()
    samples[::19] *= 1e6

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        accumulator = GradientAccumulator(optimizer, lanes=LANES, model=model, buffers=buffers)
        for batch in sampler.batches(8):
            if len(batch) > 1:
                accumulator.backward(model(samples[batch]).mean(), len(batch))
            accumulator.step()

    run(TorchState(model=model, optimizer=optimizer, sampler=sampler))
    agent.note("end", member, model.running_mean.tolist(), model.running_var.tolist(), int(model.num_batches_tracked))


def overflow(port: int, member: str) -> None:
    """Takes four scaled updates, the second of which is not finite on the last worker alone."""
    agent, membership = join(port, member)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    @elastic.run(membership=membership)
    def run(state: Any) -> List[Any]:
        accumulator = GradientAccumulator(optimizer, scaler=scaler, clip_norm=5.0, error_if_nonfinite=True)
        place, found = elastic.assignment(), []
        for number in range(4):
            # The first worker has no sample in the first update.
            if place.rank or number:
                factor = float("inf") if number == 1 and place.rank == place.world_size - 1 else 6.0
                accumulator.backward((weight * torch.tensor([factor, 8.0])).sum(), 1)
            accumulator.step()
            found.append([accumulator.was_skipped, scaler.get_scale()])
        return found

    found = run(TorchState(optimizer=optimizer, scaler=scaler))
    agent.note("end", member, found, weight.tolist())


def disagree(port: int, member: str, of: str) -> None:
    """Makes an accumulator with settings of its own; reports the error."""
    agent, membership = join(port, member)
    model = torch.nn.Linear(2, 1 if of != "model" else 1 + int(member == "b"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {
        "model": {},
        "lanes": {"lanes": 4 if member == "a" else 8},
        "clip_norm": {} if member == "a" else {"clip_norm": 1.0},
        "scale": {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0 if member == "a" else 4.0)},
        "buffers": {"model": model, "buffers": "own" if member == "a" else "average"},
        "wrapped": {},
    }[of]

    @elastic.run(membership=membership)
    def run(state: Any) -> None:
        replica = torch.nn.parallel.DistributedDataParallel(model) if of == "wrapped" else model
        if of == "wrapped":
            # Gradients that the wrapper does not add are not refused.
            accumulator = GradientAccumulator(optimizer)
            with replica.no_sync():
                accumulator.backward(replica(torch.ones(1, 2)).sum(), 1)
            accumulator.step()
        accumulator = GradientAccumulator(optimizer, **settings)
        while True:
            accumulator.backward(replica(torch.ones(1, 2)).sum(), 1)
            accumulator.step()

    try:
        run(elastic.ObjectState())
    except InvalidError as error:
        agent.note("end", member, str(error))


def page(port: int, member: str, path: str, dies_at: int = 0, pauses_at: int = 0) -> None:
    """Runs a program of the documentation, whose state is `state`, with the variables that an agent sets.

    Args:
        dies_at: The step after which the worker kills itself, before its commit.
        pauses_at: The step after whose commit the worker waits for the next change of members.
    """
    agent, membership = join(port, member)
    place = membership.assignment
    values = {"RANK": place.rank, "WORLD_SIZE": place.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(MASTER_ADDR=place.master_addr, MASTER_PORT=str(place.master_port), TORCHELASTIC_RUN_ID="page")
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    os.chdir(os.path.dirname(path))
    commit = elastic.State.commit

    def committed(state: Any) -> None:
        if state.step == dies_at:
            die()
        commit(state)
        if state.step == pauses_at:
            agent.note("paused", member)
            while True:
                state.check_host_updates()

    elastic.State.commit = committed  # type: ignore[method-assign]
    # As in a process that was not forked from a server of forks.
    multiprocessing.set_start_method("fork", force=True)
    state = runpy.run_path(path, run_name="__main__")["state"]
    weights = [it.tolist() for it in state.model.parameters()]
    rate = state.optimizer.param_groups[0]["lr"]
    environment = [os.environ[name] for name in ("RANK", "WORLD_SIZE")]
    place = elastic.assignment()
    assert environment == [str(place.rank), str(place.world_size)]
    agent.note("end", member, place.world_size, state.epoch, state.step, rate, weights)
