"""A DeepFM (Guo et al. 2017) whose embedding tables are on the parameter servers: steadfast local clicks.toml

A row exists for each user, item and city that training has met; a step fetches and changes only those of its records.
"""

import steadfast.torch as st
import torch

COLUMNS = ["user", "item", "city"]


class DeepFM(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weights = st.Embedding("weights", 1, columns=COLUMNS, initial="zeros")
        self.factors = st.Embedding("factors", dim, columns=COLUMNS, initial=("normal", 0.05))
        self.deep = torch.nn.Sequential(
            torch.nn.Linear(len(COLUMNS) * dim + 1, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, hour, *categories):
        ids = torch.stack(categories, dim=1)
        factors = self.factors(ids)
        # The sum of the products of all pairs of factors (Rendle 2010).
        pairs = (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1) / 2
        deep = self.deep(torch.cat([factors.flatten(1), hour.unsqueeze(1)], dim=1))
        return self.weights(ids).sum(dim=(1, 2)) + pairs + deep.squeeze(1)


def accuracy(output, label):
    return ((output > 0) == (label > 0.5)).to(torch.float32)


def build(spec):
    return st.Model(
        DeepFM(spec.options["dim"]),
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        metrics={"accuracy": accuracy},
        inputs=["hour", *COLUMNS],
        target="click",
        label=torch.float32,
    )
