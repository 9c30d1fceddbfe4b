"""The records of files as a dataset."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import steadfast
from steadfast.data import FileDataset

RECORDS = 100


@pytest.fixture
def lines(tmp_path) -> str:
    """Two files of JSON lines; returns their pattern."""
    for number, records in enumerate([range(60), range(60, RECORDS)]):
        rows = ({"id": it, "x": [it / 2, -it], "words": f"word {it}", "list": list(range(it % 4))} for it in records)
        (tmp_path / f"part-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "part-*.jsonl")


def checked(sample, number: int) -> None:
    assert sample["id"] == number
    assert sample["x"].tolist() == [number / 2, -number]
    assert sample["words"] == f"word {number}"
    assert sample["list"].tolist() == list(range(number % 4))


def test_records_are_found_by_their_index_in_the_order_of_the_files(lines):
    """S002-2: a dataset of files works with samplers that deal indices."""
    for cache_bytes in (1 << 28, 0):
        data = FileDataset(
            lines, types={"x": "float64[2]", "list": "int64[]"}, records_per_task=7, cache_bytes=cache_bytes
        )
        assert len(data) == RECORDS
        for number in [0, 6, 7, 59, 60, 99, 3]:
            checked(data[number], number)
        checked(data[-1], 99)
        wanted = np.random.default_rng(1).permutation(RECORDS)
        for number, sample in zip(wanted, data.__getitems__(wanted)):
            checked(sample, number)
        with pytest.raises(IndexError, match="100 records, and none of index 100"):
            data[100]
        assert [sample["id"] for sample in data] == list(range(RECORDS))


def test_memory_for_records_is_limited(lines):
    data = FileDataset(lines, columns=["id"], records_per_task=10, cache_bytes=200)
    for number in range(RECORDS):
        assert data[number]["id"] == number
    assert sorted(data._kept) == [8, 9]
    assert data._kept_bytes == 160


def test_it_works_in_the_processes_of_loaders(lines):
    """S002-2: forked ones, also while a thread of the program reads, and others."""
    torch_data = pytest.importorskip("torch.utils.data")
    data = FileDataset(lines, columns=["id", "words"], records_per_task=7)
    assert data[50]["id"] == 50
    data._lock.acquire()
    for start in ("fork", "spawn"):
        loader = torch_data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=start)
        batches = list(loader)
        assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(RECORDS))
        assert batches[0]["words"] == [f"word {it}" for it in batches[0]["id"].tolist()]
    data._lock.release()
    assert pickle.loads(pickle.dumps(data))[5]["words"] == "word 5"


def test_features_and_label_are_read_as_in_a_job(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,y\n1,2,0\n3,4,1\n")
    data = FileDataset([str(tmp_path / "a.csv")], features=["a", "b"], label="y", feature_scale=0.5)
    assert (data[1]["features"].tolist(), data[1]["label"]) == ([1.5, 2.0], 1.0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a.bin", {}, "does not tell its format; pass `format`"),
        ("b.csv", {}, "b.csv"),
        ("a.csv", {"columns": ["z"]}, "`z`"),
        ("a.csv", {"formatt": "csv"}, "unknown key `dataset.formatt`"),
        ("a.csv", {"follow": True}, "`.*follow`"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(tmp_path, name, settings, message):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(steadfast.InvalidError, match=message):
        FileDataset(str(tmp_path / name), **settings)
