"""Trains with the parameter servers of Paddle Fleet: train_paddle.py DATA SIZE."""

import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

import recovery  # noqa: E402
import task  # noqa: E402


def network(size: task.Size):
    """Returns the mean loss of a batch, in Paddle's static graph."""
    import paddle

    value = paddle.static.data("features", [size.batch, task.FEATURES], "float32")
    label = paddle.static.data("label", [size.batch, 1], "int64")
    for hidden in size.hidden:
        value = paddle.static.nn.fc(value, hidden, activation="relu")
    score = paddle.static.nn.fc(value, size.classes)
    return paddle.nn.functional.cross_entropy(score, label)


def process(directory: pathlib.Path, size: task.Size) -> None:
    """One worker or parameter server, as the variables of the environment say."""
    import numpy
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    paddle.seed(0)
    fleet.init(is_collective=False)
    loss = network(size)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(size.learning_rate), strategy)
    optimizer.minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    rank = fleet.worker_index()
    features, label = task.read(directory, size)
    label = label.reshape(-1, 1)
    for step, at in enumerate(task.batch_starts(size, rank)):
        if step == size.warm_up:
            fleet.barrier_worker()
            start = time.time()
        feed = {"features": features[at : at + size.batch], "label": label[at : at + size.batch]}
        executor.run(paddle.static.default_main_program(), feed=feed)
    fleet.barrier_worker()
    end = time.time()
    if rank == 0:
        scope = paddle.static.global_scope()
        value = lambda name: numpy.array(scope.find_var(name).get_tensor())  # noqa: E731
        numbers = range(len(size.hidden) + 1)
        layers = [(value(f"fc_{it}.w_0"), value(f"fc_{it}.b_0").reshape(-1)) for it in numbers]
        steps = size.steps - size.warm_up
        task.report(start, end, steps * task.WORKERS, task.loss(directory, size, layers))
    fleet.stop_worker()


def launch() -> None:
    """Runs this program as every worker and parameter server, and ends with the workers."""
    servers = [recovery.free_address() for _ in range(task.PSERVERS)]
    workers = [recovery.free_address() for _ in range(task.WORKERS)]
    common = {
        **os.environ,
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(workers),
        "PADDLE_TRAINERS_NUM": str(task.WORKERS),
        "POD_IP": "127.0.0.1",
        "PADDLE_WITH_GLOO": "0",
    }
    processes = []
    for role, addresses in (("PSERVER", servers), ("TRAINER", workers)):
        for number, address in enumerate(addresses):
            own = {"TRAINING_ROLE": role, "PADDLE_PORT": address.rpartition(":")[2], "PADDLE_TRAINER_ID": str(number)}
            processes.append(subprocess.Popen([sys.executable, *sys.argv], env={**common, **own}))
    codes = [it.wait() for it in processes[task.PSERVERS :]]
    for server in processes[: task.PSERVERS]:
        server.kill()
        server.wait()
    sys.exit(max(codes))


if __name__ == "__main__":
    if "TRAINING_ROLE" in os.environ:
        process(pathlib.Path(sys.argv[1]), task.SIZES[sys.argv[2]])
    else:
        launch()
