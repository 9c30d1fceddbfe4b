"""The model of the benches, for trainers of Steadfast."""

import steadfast.torch as st
import torch
from perceptron import perceptron


def build(spec):
    net = perceptron(spec.features, spec.options["hidden"], spec.options["classes"])
    return st.Model(net, loss=torch.nn.functional.cross_entropy)
