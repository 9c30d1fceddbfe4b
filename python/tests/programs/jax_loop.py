"""Softmax regression in JAX, with a loop of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import steadfast


@jax.jit
def loss_sum(parameters, features, label):
    score = features @ parameters["weight"] + parameters["bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(score), label[:, None], axis=1).sum()


value_and_gradient = jax.jit(jax.value_and_grad(loss_sum))


class Softmax(steadfast.Model):
    metric_name = "accuracy"

    def parameters(self):
        return {"weight": (64, 10), "bias": (10,)}

    def initialize(self, seed):
        return {"weight": 0.01 * jax.random.normal(jax.random.key(seed), (64, 10))}

    def gradient(self, parameters, batch, key):
        return value_and_gradient(parameters, batch["features"], batch["label"].astype(np.int32))

    def evaluate(self, parameters, batch):
        label = batch["label"].astype(np.int32)
        score = batch["features"] @ parameters["weight"] + parameters["bias"]
        return loss_sum(parameters, batch["features"], label), (score.argmax(axis=1) == label).sum()


if __name__ == "__main__":
    model = Softmax()
    with steadfast.Trainer(model=model) as trainer:
        for work in trainer:
            loss, gradients = model.gradient(work.parameters, work.batch, work.key)
            work.push(gradients, loss_sum=float(loss))
