"""A loop over a model with a table, which tries to save it."""

import os

import numpy as np
import steadfast


class Bias(steadfast.Model):
    metric_name = "loss"

    def parameters(self):
        return {"bias": (1,)}

    def tables(self):
        return {"user": steadfast.Table(dim=1)}

    def ids(self, batch):
        return {"user": batch["user"]}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        rows = parameters["user"]
        residual = rows.values[rows.places, 0] + parameters["bias"][0] - batch["click"]
        gradient = np.zeros_like(rows.values)
        np.add.at(gradient, rows.places, residual[:, None].astype(np.float32))
        return float(0.5 * (residual**2).sum()), {"user": gradient, "bias": [residual.sum()]}

    def evaluate(self, parameters, batch):
        loss_sum, _ = self.gradient(parameters, batch, None)
        return loss_sum, loss_sum


model = Bias()
with steadfast.Trainer(model=model) as trainer:
    for work in trainer:
        loss_sum, gradients = model.gradient(work.parameters, work.batch, work.key)
        work.push(gradients, loss_sum=loss_sum)
    try:
        trainer.save_model("model.safetensors")
    except steadfast.InvalidError as error:
        with open(os.environ["SAID"], "w") as file:
            file.write(str(error))
