"""Trains with parameter servers over torch.distributed.rpc, asynchronously: train_rpc.py DATA SIZE.

Each server has a contiguous part of all parameters. A step of a worker is one call of each server, which applies
the gradient and answers with the new values.
"""

import pathlib
import sys
import threading
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

import recovery  # noqa: E402
import task  # noqa: E402
import torch  # noqa: E402
from perceptron import perceptron  # noqa: E402
from torch.distributed import rpc  # noqa: E402


class Part:
    """The parameters of a server."""

    def __init__(self, learning_rate: float):
        self.learning_rate = learning_rate
        self.lock = threading.Lock()
        self.values = torch.empty(0)


PART = Part(0.0)
"""That of this process, if it is a server."""


def begin(values: torch.Tensor, learning_rate: float) -> None:
    PART.values, PART.learning_rate = values, learning_rate


def push_and_pull(gradient: torch.Tensor) -> torch.Tensor:
    with PART.lock:
        PART.values.sub_(gradient, alpha=PART.learning_rate)
        return PART.values.clone()


def views(flat: torch.Tensor, net: torch.nn.Module) -> list:
    """Returns the parts of `flat` in the shapes of the parameters."""
    parts = flat.split([it.numel() for it in net.parameters()])
    return [part.view_as(it) for part, it in zip(parts, net.parameters())]


def work(rank: int, directory: pathlib.Path, size: task.Size, barrier) -> None:
    features, label = map(torch.from_numpy, task.read(directory, size))
    torch.manual_seed(0)
    net = perceptron(task.FEATURES, size.hidden, size.classes)
    # Parameters and gradients are views of one tensor each, so nothing is copied before it is sent.
    values = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    gradient = torch.zeros_like(values)
    for parameter, value, part in zip(net.parameters(), views(values, net), views(gradient, net)):
        parameter.data, parameter.grad = value, part
    servers = [f"server{i}" for i in range(task.PSERVERS)]
    parts, gradients = values.chunk(task.PSERVERS), gradient.chunk(task.PSERVERS)
    if rank == 0:
        for server, part in zip(servers, parts):
            rpc.rpc_sync(server, begin, (part.clone(), size.learning_rate))
    barrier.wait()
    for step, at in enumerate(task.batch_starts(size, rank)):
        if step == size.warm_up:
            barrier.wait()
            start = time.time()
        gradient.zero_()
        batch = slice(at, at + size.batch)
        torch.nn.functional.cross_entropy(net(features[batch]), label[batch]).backward()
        calls = [rpc.rpc_async(server, push_and_pull, (it,)) for server, it in zip(servers, gradients)]
        for call, part in zip(calls, parts):
            part.copy_(call.wait())
    barrier.wait()
    if rank == 0:
        steps = size.steps - size.warm_up
        task.report(start, time.time(), steps * task.WORKERS, task.loss(directory, size, task.torch_layers(net)))


def process(rank: int, directory: pathlib.Path, size: task.Size, port: int, barrier) -> None:
    torch.set_num_threads(1)
    name = f"worker{rank}" if rank < task.WORKERS else f"server{rank - task.WORKERS}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=task.WORKERS + task.PSERVERS, rpc_backend_options=options)
    if rank < task.WORKERS:
        work(rank, directory, size, barrier)
    rpc.shutdown()


if __name__ == "__main__":
    port = int(recovery.free_address().rpartition(":")[2])
    barrier = torch.multiprocessing.get_context("spawn").Barrier(task.WORKERS)
    arguments = (pathlib.Path(sys.argv[1]), task.SIZES[sys.argv[2]], port, barrier)
    torch.multiprocessing.spawn(process, arguments, nprocs=task.WORKERS + task.PSERVERS)
