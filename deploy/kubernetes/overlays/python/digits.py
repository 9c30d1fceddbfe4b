"""A perceptron with dropout on handwritten digits, in PyTorch."""

import steadfast.torch as st
import torch


def build(spec):
    net = torch.nn.Sequential(
        torch.nn.Linear(spec.features, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(128, 10),
    )
    return st.Model(net, loss=torch.nn.functional.cross_entropy, metrics={"accuracy": st.accuracy})
