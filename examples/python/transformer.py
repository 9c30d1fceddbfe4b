"""A small transformer that predicts the next character of a text, in PyTorch."""

import steadfast.torch as st
import torch

CHARACTERS = 128


class Transformer(torch.nn.Module):
    def __init__(self, window, width=32, layers=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(CHARACTERS, width)
        self.position = torch.nn.Parameter(0.1 * torch.randn(window, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = torch.nn.Linear(width, CHARACTERS)
        self.output.weight = self.embedding.weight  # tied: one parameter

    def forward(self, characters):
        hidden = self.encoder(self.embedding(characters.long()) + self.position)
        return self.output(hidden[:, -1])


def build(spec):
    net = Transformer(window=spec.features)
    return st.Model(net, loss=torch.nn.functional.cross_entropy, metrics={"accuracy": st.accuracy})
