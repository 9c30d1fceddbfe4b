"""A training script that only knows PyTorch. It sums over all workers until the file `finish` appears."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

directory = sys.argv[1]
node = os.environ["NODE"]


def note(event: str, **more: object) -> None:
    fields = {
        "event": event,
        "node": node,
        "pid": os.getpid(),
        "agent": os.getppid(),
        "time": time.time(),
        **more,
    }
    fields.update(
        {
            key.lower(): int(os.environ[key])
            for key in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        }
    )
    fields["store"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with open(os.path.join(directory, "events"), "a") as file:
        file.write(json.dumps(fields) + "\n")


dist.init_process_group("gloo")
finished = False
step = 0
while not finished:
    # Keeps two cores from being busy with nothing else.
    time.sleep(0.02)
    fail = os.path.join(directory, f"fail-{node}")
    if os.path.exists(fail):
        os.remove(fail)
        note("fails")
        sys.exit(7)
    values = torch.tensor([1.0, float(os.path.exists(os.path.join(directory, "finish")))])
    dist.all_reduce(values)
    if step == 0:
        assert values[0] == dist.get_world_size()
        note("started")
    step += 1
    finished = bool(values[1] > 0)
note("finished")
dist.destroy_process_group()
