"""Trains the click model with PyTorch in one process, its table in memory: train_clicks_torch.py DATA SIZE THREADS."""

import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

import clicks  # noqa: E402
import task  # noqa: E402
import torch  # noqa: E402
from perceptron import perceptron  # noqa: E402

DEVIATION = 0.01
"""Of initial weights and factors."""


class DeepFm(torch.nn.Module):
    def __init__(self, size: clicks.Clicks, rows: int):
        super().__init__()
        # The first value of a row is the weight.
        width = 1 + size.factors
        self.table = torch.nn.Embedding(rows, width, sparse=True)
        torch.nn.init.normal_(self.table.weight, std=DEVIATION)
        self.of_counts = torch.nn.Parameter(torch.randn(clicks.COUNTS, width) * DEVIATION)
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.deep = perceptron(clicks.COLUMNS * size.factors + clicks.COUNTS, size.hidden, 1)

    def forward(self, counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        values = self.table(rows)
        factors = values[:, :, 1:]
        sums = values.sum(1) + counts @ self.of_counts
        squares = factors.square().sum((1, 2)) + (counts.square() @ self.of_counts[:, 1:].square()).sum(1)
        pairs = 0.5 * (sums[:, 1:].square().sum(1) - squares)
        deep = self.deep(torch.cat([factors.flatten(1), counts], 1)).squeeze(1)
        return self.bias + sums[:, 0] + pairs + deep


def main() -> None:
    directory, size = pathlib.Path(sys.argv[1]), clicks.CLICKS
    torch.set_num_threads(int(sys.argv[3]))
    torch.manual_seed(0)
    net = DeepFm(size, clicks.table_rows(directory, size))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=size.learning_rate)
    is_trained = clicks.is_trained(size)
    records = [torch.from_numpy(it) for it in clicks.read(directory, size, is_trained)]
    for _ in range(size.passes):
        # That of the last pass remains.
        start = time.time()
        for counts, rows, label in zip(*(it.split(size.batch) for it in records)):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(net(counts, rows), label).backward()
            optimizer.step()
    end = time.time()
    held_out = clicks.read(directory, size, ~is_trained)
    with torch.no_grad():
        outputs = net(torch.from_numpy(held_out.counts), torch.from_numpy(held_out.rows)).numpy()
    task.report(start, end, size.records_of_pass / 1000, clicks.loss(outputs, held_out.label))


if __name__ == "__main__":
    main()
