"""Writes the fixtures of columns.rs: the same 40 records by the libraries that define their formats.

pip install tensorflow-cpu pyarrow webdataset && python make.py
"""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
import webdataset

HERE = pathlib.Path(__file__).parent
RECORDS = 40


def record(i):
    return {
        "image": bytes([i, 255 - i]),
        "label": i % 5,
        "pair": [float(i), -float(i)],
        "score": i * 0.5,
        "text": f"ä {i}",
        "tokens": list(range(i, i + i % 4)),
    }


def example(it):
    def bytes_of(*values):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    def ints(values):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def floats(values):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    feature = {
        "image": bytes_of(it["image"]),
        "label": ints([it["label"]]),
        "pair": floats(it["pair"]),
        "score": floats([it["score"]]),
        "text": bytes_of(it["text"].encode()),
        "tokens": ints(it["tokens"]),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def tfrecord(path, compression=None):
    with tf.io.TFRecordWriter(str(path), options=compression) as writer:
        for i in range(RECORDS):
            writer.write(example(record(i)))
    # What TensorFlow itself reads back.
    read = tf.data.TFRecordDataset(str(path), compression_type=compression or "")
    for i, raw in enumerate(read):
        feature = tf.train.Example.FromString(raw.numpy()).features.feature
        assert list(feature["tokens"].int64_list.value) == record(i)["tokens"]
        assert list(feature["pair"].float_list.value) == record(i)["pair"]


def parquet(path):
    records = [record(i) for i in range(RECORDS)]
    schema = pa.schema(
        {
            "image": pa.binary(),
            "label": pa.int32(),
            "pair": pa.list_(pa.float32(), 2),
            "score": pa.float32(),
            "text": pa.string(),
            "tokens": pa.list_(pa.int64()),
        }
    )
    table = pa.Table.from_pylist(records, schema)
    pq.write_table(table, path, row_group_size=15, data_page_size=64, store_schema=False)


def fixed_lists(path):
    """With Arrow's own schema, as pyarrow writes by default."""
    rows = range(RECORDS)
    pairs = pa.array([[float(i), -float(i)] for i in rows], pa.list_(pa.float32(), 2))
    tokens = pa.array([list(range(i % 4)) for i in rows], pa.list_(pa.int64()))
    image = pa.array([[i, 255 - i, 7] for i in rows], pa.list_(pa.uint8(), 3))
    pq.write_table(pa.table({"pair": pairs, "tokens": tokens, "image": image}), path)


def tar(path):
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(RECORDS):
            it = record(i)
            # A long name has an extended header.
            key = ("long/" * 30 if i % 7 == 3 else "") + f"{i:04}"
            sample = {"bin": it["image"], "cls": it["label"], "txt": it["text"]}
            writer.write({"__key__": key, **sample, "tokens.json": it["tokens"]})


tfrecord(HERE / "columns.tfrecord")
tfrecord(HERE / "columns.tfrecord.gz", "GZIP")
parquet(HERE / "columns.parquet")
fixed_lists(HERE / "fixed_lists.parquet")
tar(HERE / "columns.tar.gz")
