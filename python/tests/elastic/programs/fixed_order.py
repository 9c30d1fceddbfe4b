"""Trains models with `GradientAccumulator(order="fixed")`, and prints a SHA-256 of each and of its optimizer.

usage: fixed_order.py UPDATES DIRECTORY

At each tenth update it waits for the file `go-UPDATE` in the directory, if there is a file `stops`.
"""

import math
import pathlib
import sys
import time

import steadfast.elastic as elastic
import torch
from digests import digest
from steadfast.elastic import _lane_sums
from steadfast.elastic.torch import GradientAccumulator, collate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

updates, directory = int(sys.argv[1]), pathlib.Path(sys.argv[2])
LANES, BATCH, SAMPLES = 8, 3, 8 * 3 * 4 + 5

torch.set_num_threads(1)
# Several buckets for each model, also within parameters.
_lane_sums._BUCKET_BYTES = 1000


class Perceptron(nn.Module):
    """With dropout, a frozen and an unused parameter, one that only some batches use, and one of some updates."""

    is_rare = False

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(12, 16).requires_grad_(False)
        self.hidden, self.seldom, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(2, 2)
        self.rare, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = nn.functional.dropout(self.frozen(x).relu(), 0.3, self.training)
        x = self.rare(x) if self.is_rare else x
        x = (self.seldom(x) if x.sum() > 40 else self.hidden(x)).relu()
        return self.last(x)


class Residual(nn.Module):
    """With convolutions and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.other = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        x = self.norm(self.first(x.view(-1, 1, 3, 4))).relu()
        x = (x + self.other(self.second(x))).relu()
        return self.last(x.mean((2, 3)))


class Transformer(nn.Module):
    """With an embedding that is also the last layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(16, 11, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding((x * 3).long().abs() % 11)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers(x)
        return self.last(x.float().mean(1))[:, :4]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.LSTM(4, 12, 2, batch_first=True, dropout=0.2), nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.layers(x.view(-1, 3, 4))[0][:, -1])


MODELS = {"perceptron": Perceptron, "residual": Residual, "transformer": Transformer, "recurrent": Recurrent}

inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(3))
data = TensorDataset(inputs, inputs.sum(1).floor().long() % 4)


def optimizer_of(name, model):
    decayed = [it for it in model.parameters() if it.dim() > 1]
    others = [it for it in model.parameters() if it.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "lr": 0.02}]
    if name == "residual":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


class Trained:
    """A model, and what trains it."""

    def __init__(self, name):
        self.name, self.model = name, MODELS[name]()
        self.optimizer = optimizer_of(name, self.model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, updates)
        self.accumulator = GradientAccumulator(
            self.optimizer,
            lanes=LANES,
            order="fixed",
            seed=5,
            model=self.model,
            clip_norm=0.5 if name == "perceptron" else math.inf,
        )

    def parts(self):
        """What belongs to the state."""
        return {f"{self.name}_{part}": it for part, it in vars(self).items() if part != "name"}

    def backward(self, x, labels):
        self.model.is_rare = self.accumulator.state_dict()["updates"] % 5 == 4
        is_divided = self.name == "recurrent" and len(labels) > 1
        for part in [slice(0, 1), slice(1, None)] if is_divided else [slice(None)]:
            loss = nn.functional.cross_entropy(self.model(x[part]), labels[part])
            self.accumulator.backward(loss, len(labels[part]))

    def step(self):
        has_ended = self.accumulator.step()
        if has_ended:
            self.schedule.step()
        return has_ended


def wait(update):
    while (directory / "stops").exists() and not (directory / f"go-{update}").exists():
        time.sleep(0.02)


torch.manual_seed(1)
trained = [Trained(name) for name in MODELS]
sampler = elastic.ElasticSampler(data, lanes=LANES, seed=2)
parts = {name: part for it in trained for name, part in it.parts().items()}
state = elastic.TorchState(**parts, sampler=sampler, epoch=0, update=0)


@elastic.run
def train(state):
    print(f"begin {state.update} of {elastic.world_size()}", flush=True)
    while state.update < updates:
        sampler.set_epoch(state.epoch)
        loader = DataLoader(data, batch_sampler=sampler.batches(BATCH), collate_fn=collate)
        for index, batch in enumerate(loader):
            if batch is not None:
                for it in trained:
                    it.backward(*batch)
            if not all([it.step() for it in trained]):
                continue
            sampler.record_batch(index, BATCH)
            state.update += 1
            print(f"update {state.update}", flush=True)
            if state.update % 10 == 0:
                wait(state.update)
            state.commit()
            if state.update == updates:
                return
        state.epoch += 1


train(state)
for it in trained:
    print(f"result {it.name} {digest(it.model, it.optimizer)}", flush=True)
