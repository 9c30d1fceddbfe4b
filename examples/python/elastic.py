"""Elastic training with a loop of one's own: workers come and go, each sample counts once per epoch.

steadfast run --standalone --nproc-per-node 2 -- python examples/python/elastic.py
"""

import time

import steadfast.elastic as elastic
import torch
from steadfast.elastic.torch import GradientAccumulator, collate
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LANES = 5, 16, 8

inputs = torch.randn(4096, 20, generator=torch.Generator().manual_seed(1))
labels = (inputs.sum(dim=1) > 0).long()
data = TensorDataset(inputs, labels)

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = elastic.ElasticSampler(data, lanes=LANES)
accumulator = GradientAccumulator(optimizer, lanes=LANES)
state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    while state.epoch < EPOCHS:
        sampler.set_epoch(state.epoch)
        loader = DataLoader(data, batch_sampler=sampler.batches(BATCH), collate_fn=collate)
        for index, batch in enumerate(loader):
            if batch is not None:
                inputs, labels = batch
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accumulator.backward(loss, samples=len(labels))
            if accumulator.step():
                sampler.record_batch(index, BATCH)
                state.step += 1
                state.commit()
                time.sleep(0.05)  # so that there is time to kill something
        place = elastic.assignment()
        if place.rank == 0:
            print(f"epoch {state.epoch}, step {state.step}, {place.world_size} workers, loss {loss.item():.4f}")
        state.epoch += 1


train(state)
print(f"finished after {state.step} steps, sum of parameters {sum(it.sum().item() for it in model.parameters()):.6f}")
