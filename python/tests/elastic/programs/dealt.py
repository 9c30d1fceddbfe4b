"""Uses each record of some passes once, as it is dealt, and prints which ones the final state has seen.

usage: dealt.py PASSES PROCESSES DIRECTORY

It waits after every tenth update, before its commit, until the file `go-<update>` is in the directory.
"""

import os
import sys
import time

import numpy as np
import steadfast
import steadfast.data
from steadfast import elastic
from steadfast.elastic.torch import TorchState
from torch.utils.data import DataLoader

PASSES, PROCESSES, DIRECTORY = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
RECORDS = 101

data = steadfast.data.TaskDataset(RECORDS, batch_size=3, passes=PASSES, seed=3)
loader = DataLoader(data, batch_size=None, num_workers=PROCESSES, persistent_workers=PROCESSES > 0)
state = TorchState(data=data, update=0, used=np.zeros(RECORDS, np.int64))
if "SAVE_TO" in os.environ:
    state.save_to(os.environ["SAVE_TO"])


def used_by_all(batches):
    """Returns how often the batches of all workers have each record, as an exchange of gradients would."""
    counts = np.zeros(RECORDS, np.int64)
    for batch in batches:
        np.add.at(counts, batch.numpy(), 1)
    total = np.zeros(RECORDS, np.int64)
    for rank in range(elastic.world_size()):
        total += np.frombuffer(bytes(elastic.group().broadcast_bytes(counts.tobytes(), rank)), np.int64)
    return total


@elastic.run
def train(state):
    print(f"begin {state.update} with {state.used.sum()} of {elastic.world_size()}", flush=True)
    # Every second worker uses two batches for each update.
    per_update = 1 + elastic.assignment().rank % 2
    of_update = []
    for number, batch in enumerate(data.batches(loader, per_update=per_update), 1):
        of_update += [] if batch is None else [batch]
        if number % per_update != 0:
            continue
        state.used += used_by_all(of_update)
        of_update, state.update = [], state.update + 1
        if state.update % 10 == 0:
            print(f"waits in {state.update} as {os.getpid()}", flush=True)
            while not os.path.exists(os.path.join(DIRECTORY, f"go-{state.update}")):
                time.sleep(0.02)
        if state.update % 2 == 1:
            state.commit()
    state.commit()


train(state)
print(f"used {state.used.min()} to {state.used.max()} in {state.used.size}", flush=True)
