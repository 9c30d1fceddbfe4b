"""Writes generated clicks in the shape of Criteo's logs, of any length.

    python3 criteo_like.py --records 100000 --seed 1 --out clicks.tsv

Each line has a label, 13 counts and 26 categories of 8 hexadecimal digits, separated by tabs; many counts and some
categories are empty. Ids follow power laws. The label follows from a weight of each category and from the inner
products of hidden factors of some columns (Rendle 2010), so no linear model can predict it as well as a factorization
machine. The same records and seed give the same bytes.
"""

import argparse
import functools
import math
import random
from typing import List, TextIO, Tuple

# Ids of each column of categories.
SIZES = [
    1400, 550, 40000, 20000, 300, 20, 10000, 600, 3, 30000, 5000, 40000, 3000,
    26, 10000, 40000, 10, 4000, 2000, 4, 40000, 15, 15, 30000, 90, 20000,
]  # fmt: skip
POWER = 1.3
EMPTY_CATEGORIES = 0.05
# Share of each column of counts that is empty, and the deviation of its logarithms.
EMPTY_COUNTS = [0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.04, 0.0, 0.04, 0.45, 0.04, 0.75, 0.2]
SPREADS = [1.0, 2.0, 1.5, 1.0, 3.0, 2.0, 1.5, 1.0, 2.0, 0.5, 1.0, 0.5, 1.0]
# Columns whose categories have factors, and number and deviation of these.
PAIRED = [4, 7, 13, 16, 24]
FACTORS = 3
DEVIATION = 0.9
WEIGHT_DEVIATION = 0.3
COUNT_WEIGHTS = [0.2, 0.0, -0.1, 0.1, -0.15, -0.1, 0.15, 0.0, 0.1, 0.1, 0.0, 0.0, -0.1]
BIAS = -0.6


@functools.lru_cache(maxsize=None)
def hidden(seed: int, column: int, rank: int) -> Tuple[str, float, List[float]]:
    """Name, weight and factors of a category."""
    rng = random.Random(f"{seed} {column} {rank}")
    factors = [rng.gauss(0.0, DEVIATION) for _ in range(FACTORS)] if column in PAIRED else []
    return f"{rng.getrandbits(32):08x}", rng.gauss(0.0, WEIGHT_DEVIATION), factors


def rank(rng: random.Random, size: int) -> int:
    """Draws from 0 to `size` − 1 with probabilities of about (rank + 1) ** −POWER."""
    exponent = 1.0 - POWER
    at_end = (size + 1.0) ** exponent
    return min(size, int((1.0 + rng.random() * (at_end - 1.0)) ** (1.0 / exponent))) - 1


def record(rng: random.Random, seed: int) -> str:
    score = BIAS
    counts = []
    for empty, spread, weight in zip(EMPTY_COUNTS, SPREADS, COUNT_WEIGHTS):
        count = int(math.exp(abs(rng.gauss(0.0, spread)))) - 1
        is_empty = rng.random() < empty
        counts.append("" if is_empty else str(count))
        score += 0.0 if is_empty else weight * math.log1p(count)
    categories = []
    sums, squares = [0.0] * FACTORS, 0.0
    for column, size in enumerate(SIZES):
        name, weight, factors = hidden(seed, column, rank(rng, size))
        if rng.random() < EMPTY_CATEGORIES:
            categories.append("")
            continue
        categories.append(name)
        score += weight
        for index, factor in enumerate(factors):
            sums[index] += factor
            squares += factor * factor
    score += 0.5 * (sum(it * it for it in sums) - squares)
    label = int(rng.random() < 1.0 / (1.0 + math.exp(-2.0 * score)))
    return "\t".join([str(label), *counts, *categories]) + "\n"


def write(records: int, seed: int, out: TextIO) -> None:
    rng = random.Random(seed)
    for _ in range(records):
        out.write(record(rng, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--out", required=True, metavar="FILE")
    args = parser.parse_args()
    with open(args.out, "w", newline="\n") as out:
        write(args.records, args.seed, out)


if __name__ == "__main__":
    main()
