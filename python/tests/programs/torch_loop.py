"""A perceptron in PyTorch, with a loop of its own that uses no part of steadfast.torch."""

import steadfast
import torch

torch.set_num_threads(1)
NET = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


class Perceptron(steadfast.Model):
    metric_name = "accuracy"

    def parameters(self):
        return {name: tuple(it.shape) for name, it in NET.named_parameters()}

    def initialize(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: 0.1 * torch.randn(it.shape, generator=generator) for name, it in NET.named_parameters()}

    def gradient(self, parameters, batch, key):
        given = {name: torch.tensor(it, requires_grad=True) for name, it in parameters.items()}
        output = torch.func.functional_call(NET, given, torch.from_numpy(batch["features"]))
        label = torch.from_numpy(batch["label"]).long()
        loss = torch.nn.functional.cross_entropy(output, label, reduction="sum")
        loss.backward()
        return loss.item(), {name: it.grad for name, it in given.items()}

    def evaluate(self, parameters, batch):
        given = {name: torch.tensor(it) for name, it in parameters.items()}
        output = torch.func.functional_call(NET, given, torch.from_numpy(batch["features"]))
        label = torch.from_numpy(batch["label"]).long()
        loss = torch.nn.functional.cross_entropy(output, label, reduction="sum")
        return loss.item(), (output.argmax(dim=1) == label).sum().item()


if __name__ == "__main__":
    model = Perceptron()
    with steadfast.Trainer(model=model) as trainer:
        for work in trainer:
            loss, gradients = model.gradient(work.parameters, work.batch, work.key)
            work.push(gradients, loss_sum=loss)
