"""The perceptron of the benches."""

import steadfast.torch as st
import torch


def perceptron(spec):
    hidden = spec.options["hidden"]
    net = torch.nn.Sequential(
        torch.nn.Linear(spec.features, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, 10),
    )
    return st.Model(net, loss=torch.nn.functional.cross_entropy)
