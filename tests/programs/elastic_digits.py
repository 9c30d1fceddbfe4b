"""Trains a perceptron on the digits with DistributedDataParallel, and logs every step, commit and restore.

The fault tests start it as the worker of elastic jobs and check its logs (`tests/src/faults/elastic`). Each worker
has a log of its own, of one JSON object per line, which survives its death.
"""

import hashlib
import json
import os
import sys
import time

import numpy as np
import steadfast.elastic as elastic
import torch
from steadfast.data import TaskDataset
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

DATA, LOGS, STEPS, PAUSE_MS, ORDER = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
NODE = os.environ["CHAOS_NODE"]
BATCH, STEPS_PER_COMMIT = 16, 3

LOG = os.open(os.path.join(LOGS, f"{NODE}-{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def log(event: str, **fields: object) -> None:
    # One write, without a buffer: a worker that is killed leaves whole lines.
    os.write(LOG, (json.dumps({"event": event, **fields}) + "\n").encode())


log("start", node=NODE, local_rank=int(os.environ["LOCAL_RANK"]), pid=os.getpid())
torch.set_num_threads(1)
torch.manual_seed(1)
table = np.loadtxt(DATA, delimiter=",", skiprows=1, dtype=np.float32)
features, labels = torch.from_numpy(table[:, :-1] / 16), torch.from_numpy(table[:, -1]).long()
held_out = torch.arange(len(labels)) % 5 == 0
train_features, train_labels = features[~held_out], labels[~held_out]

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if ORDER == "dynamic":
    data = TaskDataset(len(train_labels), BATCH, passes=None)
    # Its process reads ahead.
    loader = DataLoader(data, batch_size=None, num_workers=1)
else:
    data = elastic.ElasticSampler(train_labels)


def weights_sha() -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


class LoggedState(elastic.TorchState):
    """Counts commits as a part of the state, so a worker that goes back also goes back to an earlier count."""

    def save(self) -> None:
        self.commits += 1
        # First: whatever another process may get has been logged.
        self.log("commit")
        super().save()

    def restore(self) -> None:
        super().restore()
        self.log("restore")

    def log(self, event: str, **fields: object) -> None:
        place = elastic.assignment()
        log(
            event,
            round=place.round,
            rank=place.rank,
            commit=self.commits,
            step=self.step,
            sha=weights_sha(),
            **fields,
        )


state = LoggedState(model=model, optimizer=optimizer, data=data, epoch=0, step=0, commits=0)


def batches():
    """Yields the records of each step, without an end."""
    if ORDER == "dynamic":
        yield from data.batches(loader)
        return
    while True:
        data.set_epoch(state.epoch)
        for index, batch in enumerate(data.batches(BATCH)):
            # Each step uses its batch before it commits.
            data.record_batch(index, BATCH)
            yield torch.as_tensor(batch, dtype=torch.long)
        state.epoch += 1


@elastic.run
def train(state):
    state.log("begin")
    replica = DistributedDataParallel(model)
    for batch in batches() if state.step < STEPS else ():
        optimizer.zero_grad()
        # Not the mean: at the end of an epoch the batch of a worker can be empty.
        loss = cross_entropy(replica(train_features[batch]), train_labels[batch], reduction="sum") / BATCH
        loss.backward()
        optimizer.step()
        state.step += 1
        state.log("step", loss=loss.item())
        time.sleep(PAUSE_MS / 1000)
        if state.step % STEPS_PER_COMMIT == 0 or state.step == STEPS:
            state.commit()
        else:
            state.check_host_updates()
        if state.step == STEPS:
            return


train(state)
with torch.no_grad():
    correct = model(features[held_out]).argmax(dim=1) == labels[held_out]
state.log("end", accuracy=correct.float().mean().item())
