"""Times how parameters and gradients of 64 MiB cross between Python and the trainer."""

import json
import os
import statistics
import time

import numpy as np
import steadfast

VALUES = 1 << 24


class Large(steadfast.Model):
    def parameters(self):
        return {"weight": (VALUES,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        raise NotImplementedError("the loop below computes")

    def evaluate(self, parameters, batch):
        return 0.0, 0.0


def timed(what):
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


gradient, total = np.full(VALUES, 1e-6, np.float32), np.zeros(VALUES, np.float32)
found = {"parameters": [], "push": [], "add": []}
with steadfast.Trainer(model=Large()) as trainer:
    for work in trainer:
        found["add"].append(timed(lambda: np.add(total, gradient, out=total)))
        found["parameters"].append(timed(lambda work=work: work.parameters["weight"]))
        found["push"].append(timed(lambda work=work: work.push({"weight": gradient}, loss_sum=0.0)))
add = statistics.median(found["add"])
measured = {name: statistics.median(found[name]) / add for name in ("parameters", "push")}
with open(os.environ["BENCH_OUT"], "w") as file:
    json.dump(measured, file)
