"""Creates the small datasets of this directory.

Needs scikit-learn (it ships the digits), numpy and pyarrow, and UCI's file of the mushrooms:

    python make.py agaricus-lepiota.data
"""

import gzip
import json
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent
ROWS_PER_GROUP = 600
LINEAR_SEED = 20240607
LINEAR_ROWS = 2000
LINEAR_WEIGHTS = [2.0, -3.0, 0.5, 1.25, -0.75, 4.0]
LINEAR_NOISE = 0.01
WINDOW = 24
WINDOWS_EVERY = 5
CLICKS = 4000
CLICKS_SEED = 20261125
USERS, ITEMS, FACTORS, POWER = 400, 250, 3, 1.05
CITIES = "Aachen Bilbao Cork Dakar Essen Faro Ghent Hue Izmir Jaipur Kyoto Lima".split()
MUSHROOM = (
    "cap_shape cap_surface cap_color bruises odor gill_attachment gill_spacing gill_size gill_color stalk_shape "
    "stalk_root stalk_surface_above_ring stalk_surface_below_ring stalk_color_above_ring stalk_color_below_ring "
    "veil_type veil_color ring_number ring_type spore_print_color population habitat"
).split()
REVIEWS = 1200
REVIEWS_SEED = 20261124
GOOD = "bright clear quick reliable sturdy quiet light precise comfortable simple".split()
BAD = "dim blurred slow faulty fragile loud heavy vague awkward tangled".split()
THINGS = "lamp screen engine bicycle tent keyboard chair map radio kettle".split()


def digits() -> pa.Table:
    packed = resources.files("sklearn") / "datasets" / "data" / "digits.csv.gz"
    with packed.open("rb") as file, gzip.open(file, "rt") as text:
        rows = np.loadtxt(text, delimiter=",").astype(np.uint8)
    assert rows.shape == (1797, 65), rows.shape
    names = [f"pixel_{i}" for i in range(64)] + ["digit"]
    return pa.table({name: rows[:, i] for i, name in enumerate(names)})


def as_csv(table: pa.Table) -> str:
    rows = zip(*(column.to_pylist() for column in table.columns))
    lines = [",".join(table.column_names)] + [",".join(map(str, row)) for row in rows]
    return "\n".join(lines) + "\n"


def linear() -> str:
    rng = np.random.Generator(np.random.PCG64(LINEAR_SEED))
    x = np.round(rng.uniform(-1.0, 1.0, (LINEAR_ROWS, len(LINEAR_WEIGHTS))), 5)
    y = x @ np.array(LINEAR_WEIGHTS) + rng.normal(0.0, LINEAR_NOISE, LINEAR_ROWS)
    lines = [",".join([f"x{i}" for i in range(len(LINEAR_WEIGHTS))] + ["y"])]
    for features, label in zip(x, y):
        lines.append(",".join([f"{value:.5f}" for value in features] + [f"{label:.5f}"]))
    return "\n".join(lines) + "\n"


def license_windows() -> str:
    text = " ".join((HERE.parents[1] / "LICENSE").read_text().split())
    lines = [",".join([f"t{i:02}" for i in range(WINDOW)] + ["next"])]
    for start in range(0, len(text) - WINDOW - 1, WINDOWS_EVERY):
        lines.append(",".join(str(ord(it)) for it in text[start : start + WINDOW + 1]))
    return "\n".join(lines) + "\n"


def clicks() -> str:
    """Who clicks on what follows from factors of users and items; a few of both are in most records."""
    rng = np.random.Generator(np.random.PCG64(CLICKS_SEED))

    def drawn(count: int) -> np.ndarray:
        shares = 1.0 / np.arange(1, count + 1) ** POWER
        return rng.choice(count, CLICKS, p=shares / shares.sum())

    users, items, cities = drawn(USERS), drawn(ITEMS), drawn(len(CITIES))
    of_users, of_items = (rng.normal(0.0, 1.0, (count, FACTORS)) for count in (USERS, ITEMS))
    hours = np.round(rng.uniform(0.0, 1.0, CLICKS), 3)
    liking = (of_users[users] * of_items[items]).sum(axis=1) + 0.5 * (cities % 3 - 1) + hours - 0.5
    clicked = rng.random(CLICKS) < 1.0 / (1.0 + np.exp(-2.0 * liking))
    lines = ["click,hour,user,item,city"]
    for click, hour, user, item, city in zip(clicked, hours, users, items, cities):
        lines.append(f"{int(click)},{hour:.3f},u{user},i{item},{CITIES[city]}")
    return "\n".join(lines) + "\n"


def mushrooms(source: Path) -> str:
    rows = [line.split(",") for line in source.read_text().split()]
    assert len(rows) == 8124 and all(len(row) == 1 + len(MUSHROOM) for row in rows)
    lines = [",".join(["poisonous", *MUSHROOM])]
    lines += [",".join([str(int(label == "p")), *values]) for label, *values in rows]
    return "\n".join(lines) + "\n"


def reviews() -> str:
    rng = np.random.Generator(np.random.PCG64(REVIEWS_SEED))
    lines = []
    for _ in range(REVIEWS):
        label = int(rng.integers(2))
        words = [rng.choice(GOOD if rng.random() < (0.85 if label else 0.15) else BAD) for _ in range(3)]
        thing = rng.choice(THINGS)
        text = f"The {thing} is {words[0]} and {words[1]}"
        text += f", if a little {words[2]}." if rng.random() < 0.5 else "."
        lines.append(json.dumps({"text": text, "label": label}))
    return "\n".join(lines) + "\n"


def main() -> None:
    table = digits()
    pa.parquet.write_table(table, HERE / "digits.parquet", row_group_size=ROWS_PER_GROUP, compression="zstd")
    (HERE / "digits.csv").write_text(as_csv(table))
    (HERE / "linear.csv").write_text(linear())
    (HERE / "license.csv").write_text(license_windows())
    (HERE / "clicks.csv").write_text(clicks())
    (HERE / "mushrooms.csv").write_text(mushrooms(Path(sys.argv[1])))
    (HERE / "reviews.jsonl").write_text(reviews())


if __name__ == "__main__":
    main()
