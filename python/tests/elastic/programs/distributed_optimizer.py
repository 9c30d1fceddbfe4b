"""Trains with an optimizer of `DistributedOptimizer`, and prints a SHA-256 of the model and of the optimizer.

usage: distributed_optimizer.py UPDATES
"""

import sys

import steadfast.elastic as elastic
import torch
from digests import digest
from steadfast.elastic.torch import DistributedOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

updates = int(sys.argv[1])
LANES, BATCH, SAMPLES = 6, 3, 6 * 3 * 4 + 5

torch.set_num_threads(1)
torch.manual_seed(1)
inputs = torch.randn(SAMPLES, 12)
data = TensorDataset(inputs, inputs.sum(1).floor().long() % 4)
net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
optimizer = DistributedOptimizer(optimizer, fixed_global_batch_size=True, lanes=LANES, model=net)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
sampler = elastic.ElasticSampler(data, lanes=LANES, seed=2)
state = elastic.TorchState(net, optimizer, sampler, schedule=schedule, epoch=0, update=0)


@elastic.run
def train(state):
    print(f"begin {state.update} of {elastic.world_size()}", flush=True)
    while state.update < updates:
        sampler.set_epoch(state.epoch)
        for index, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler.batches(BATCH, drop_last=True))):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step(samples=len(x))
            if not optimizer.update_gradients:
                continue
            schedule.step()
            sampler.record_batch(index, BATCH)
            state.update += 1
            state.commit()
            if state.update == updates:
                return
        state.epoch += 1


train(state)
print(f"result net {digest(net, optimizer)}", flush=True)
