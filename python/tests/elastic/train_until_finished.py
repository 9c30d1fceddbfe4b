"""A training script that only knows PyTorch. It trains until the file `finish` appears.

With `sum` it sums over all workers in each step; with `wait` its workers do not notice each other.
"""

import json
import os
import sys
import time

mode, directory = sys.argv[1:]
node = os.environ["NODE"]


def note(event: str) -> None:
    fields = {"event": event, "node": node, "pid": os.getpid(), "agent": os.getppid()}
    for key in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        fields[key.lower()] = int(os.environ[key])
    fields["store"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    fields["time"] = time.time()
    with open(os.path.join(directory, "events"), "a") as file:
        file.write(json.dumps(fields) + "\n")


def exists(name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))


def fail_if_asked() -> None:
    try:
        os.remove(os.path.join(directory, f"fail-{node}"))
    except FileNotFoundError:
        return
    note("fails")
    sys.exit(7)


def step() -> bool:
    return exists("finish") or exists(f"finish-{node}")


if mode == "sum":
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def step() -> bool:
        values = torch.tensor([1.0, float(exists("finish"))])
        dist.all_reduce(values)
        assert values[0] == dist.get_world_size()
        return bool(values[1] > 0)


finished = step()
note("started")
while not finished:
    # Keeps two cores from being busy with nothing else.
    time.sleep(0.02)
    fail_if_asked()
    finished = step()
note("finished")
if mode == "sum":
    dist.destroy_process_group()
