"""Trains with PyTorch's DistributedDataParallel over gloo: train_ddp.py DATA SIZE."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

import ddp  # noqa: E402
import recovery  # noqa: E402
import task  # noqa: E402
import torch  # noqa: E402
from perceptron import perceptron  # noqa: E402


def replica(rank: int, directory: pathlib.Path, size: task.Size, port: int) -> None:
    torch.manual_seed(0)
    net = perceptron(task.FEATURES, size.hidden, size.classes)
    features, label = map(torch.from_numpy, task.read(directory, size))
    batches = ((features[at : at + size.batch], label[at : at + size.batch]) for at in task.batch_starts(size, rank))
    start, end = ddp.train(net, batches, size.learning_rate, size.warm_up, rank, task.WORKERS, port)
    if rank == 0:
        steps = size.steps - size.warm_up
        task.report(start, end, steps * task.WORKERS, task.loss(directory, size, task.torch_layers(net)))


if __name__ == "__main__":
    port = int(recovery.free_address().rpartition(":")[2])
    arguments = (pathlib.Path(sys.argv[1]), task.SIZES[sys.argv[2]], port)
    torch.multiprocessing.spawn(replica, arguments, nprocs=task.WORKERS)
