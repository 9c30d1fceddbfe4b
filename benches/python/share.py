"""Times the part of a trainer's work that is PyTorch's own: forward, loss and backward."""

import json
import os
import time
from types import SimpleNamespace

import steadfast
import torch
from models import build

spent = 0.0


def timed(function):
    def call(*args, **more):
        global spent
        start = time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            spent += time.perf_counter() - start

    return call


model = build(SimpleNamespace(features=64, options={"hidden": [1024, 1024], "classes": 10}))
model.module.forward = timed(model.module.forward)
model._loss = timed(model._loss)
torch.Tensor.backward = timed(torch.Tensor.backward)

with steadfast.Trainer(model=model) as trainer:
    for work in trainer:
        loss_sum, gradients = model.gradient(work.parameters, work.batch, work.key)
        work.push(gradients, loss_sum=loss_sum)
with open(os.environ["BENCH_OUT"], "w") as file:
    json.dump({"torch": spent}, file)
