"""Trains with gradients that are added in a fixed order; the first worker writes its steps per second.

usage: fixed_order.py SIZE FILE
"""

import pathlib
import sys
import time

import steadfast.elastic as elastic
import torch
from bench import BATCH, CLASSES, FEATURES, HIDDEN, RECORDS, STEPS, TRAINERS
from perceptron import perceptron
from steadfast.elastic.torch import GradientAccumulator

size, file = sys.argv[1], pathlib.Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
features = torch.randn(RECORDS, FEATURES)
label = features[:, :CLASSES].argmax(dim=1)
net = perceptron(FEATURES, HIDDEN[size], CLASSES)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
accumulator = GradientAccumulator(optimizer, lanes=TRAINERS, order="fixed", model=net)
state = elastic.ObjectState(step=0)


@elastic.run
def train(state: elastic.ObjectState) -> float:
    rank, start = elastic.assignment().rank, 0.0
    for step in range(STEPS[size]):
        if step == STEPS[size] // 10:
            start = time.time()
        at = (TRAINERS * step + rank) * BATCH % (RECORDS - BATCH)
        loss = torch.nn.functional.cross_entropy(net(features[at : at + BATCH]), label[at : at + BATCH])
        accumulator.backward(loss, BATCH)
        accumulator.step()
    return (STEPS[size] - STEPS[size] // 10) / (time.time() - start)


rate = train(state)
if elastic.assignment().rank == 0:
    file.write_text(str(rate))
