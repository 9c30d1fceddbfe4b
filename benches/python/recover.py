"""A training program whose recovery is timed: logs when it has imported PyTorch, joined a group, and done a step.

Arguments: `restart` for a plain program with `init_process_group`, or `in-process` for one with `steadfast.elastic`.
Trains until it is killed.
"""

import time

STARTED = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (imported by DistributedDataParallel and optimizers at their first use)

WORKER = f"{os.environ['NODE']}.{os.environ['LOCAL_RANK']}"
LOG = os.path.join(os.environ["TEST_LOGS"], f"{WORKER}-{os.getpid()}.jsonl")
PAUSE_SECONDS = 0.005

file = open(LOG, "a", buffering=1)


def log(event: str, **fields: object) -> None:
    file.write(json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **fields}) + "\n")


log("imported", seconds=time.time() - STARTED)
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
features, labels = torch.randn(32, 64), torch.randint(10, (32,))


def train(commit) -> None:
    replica = torch.nn.parallel.DistributedDataParallel(model)
    log("joined", world=torch.distributed.get_world_size())
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(replica(features), labels).backward()
        optimizer.step()
        log("step")
        time.sleep(PAUSE_SECONDS)
        commit()


if sys.argv[1] == "restart":
    torch.distributed.init_process_group("gloo")
    train(lambda: None)
else:
    import steadfast.elastic as elastic

    state = elastic.TorchState(model=model, optimizer=optimizer)
    elastic.run(lambda state: train(state.commit))(state)
