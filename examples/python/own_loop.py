"""Softmax regression in NumPy, with a loop of its own over parameter servers."""

import numpy as np
import steadfast


class Softmax(steadfast.Model):
    """Describes the parameters, and evaluates; the gradient is computed in the loop below."""

    metric_name = "accuracy"

    def parameters(self):
        return {"weight": (64, 10), "bias": (10,)}

    def initialize(self, seed):
        return {"weight": 0.01 * np.random.default_rng(seed).standard_normal((64, 10))}

    def gradient(self, parameters, batch, key):
        probability, label = self.predict(parameters, batch)
        rows = np.arange(len(label))
        loss_sum = -np.log(probability[rows, label]).sum()
        probability[rows, label] -= 1
        return loss_sum, {
            "weight": batch["features"].T @ probability,
            "bias": probability.sum(axis=0),
        }

    def evaluate(self, parameters, batch):
        probability, label = self.predict(parameters, batch)
        loss_sum = -np.log(probability[np.arange(len(label)), label]).sum()
        return loss_sum, (probability.argmax(axis=1) == label).sum()

    @staticmethod
    def predict(parameters, batch):
        score = batch["features"] @ parameters["weight"] + parameters["bias"]
        score = np.exp(score - score.max(axis=1, keepdims=True))
        return score / score.sum(axis=1, keepdims=True), batch["label"].astype(np.int64)


if __name__ == "__main__":
    model = Softmax()
    with steadfast.Trainer(model=model) as trainer:
        for work in trainer:
            loss_sum, gradients = model.gradient(work.parameters, work.batch, work.key)
            work.push(gradients, loss_sum=loss_sum)
