"""The records of files as a dataset."""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import operator
import os
import threading
from typing import Any, Dict, List, Mapping, Optional, Sequence, SupportsIndex, Union

import numpy as np

from . import _native

__all__ = ["FileDataset"]

_OBJECT_BYTES = 64
"""About how many bytes an object of Python takes beside its content."""


class FileDataset:
    """The records of files, as a map-style dataset for PyTorch: Parquet, CSV, TSV, JSON lines, TFRecord, LibSVM, tar.

    ::

        data = steadfast.data.FileDataset("s3://bucket/train/*.parquet", columns=["image", "label"])
        sampler = steadfast.elastic.ElasticSampler(data, lanes=8)
        loader = DataLoader(data, batch_sampler=sampler.batches(32))

    A sample is a dictionary: by name of its column a number, an array, text or bytes. Files are listed, and their records
    counted, when it is made; those of text formats are read once for that.

    Records are read in groups, a part of a file each, and kept in memory up to ``cache_bytes`` in each process. If the
    files have more, and the order is shuffled, most records are read with a group of their own, which is slow.

    It can be pickled, and used in forked processes, as the workers of a loader are.

    Args:
        source: Paths, URLs or patterns of files.
        columns: Names of the columns, with ``*`` for any text. By default all.
        cache_bytes: Most bytes of records that are kept, but always those of one group.
        dataset: Other keys of ``[dataset]`` in a job file: ``format``, ``types``, ``header``; or ``features`` and
            ``label`` in place of columns.

    Raises:
        InvalidError: The files, or the settings, are not valid; says which.
        UnavailableError: The store of the files does not answer.
    """

    def __init__(
        self,
        source: Union[str, Sequence[str]],
        columns: Optional[Sequence[str]] = None,
        *,
        cache_bytes: int = 1 << 28,
        **dataset: Any,
    ) -> None:
        sources = [source] if isinstance(source, str) else [str(it) for it in source]
        if columns is None and not {"features", "label", "categories"} & dataset.keys():
            columns = ["*"]
        keys = {"source": sources, **dataset}
        if columns is not None:
            keys["columns"] = list(columns)
        self._cache_bytes = cache_bytes
        self._begin(json.dumps(keys, default=list))

    def _begin(self, keys: str) -> None:
        self._keys = keys
        self._files = _native.Files(keys)
        # Where each group ends.
        self._ends = list(itertools.accumulate(self._files.groups()))
        self._kept: "collections.OrderedDict[int, Dict[str, Any]]" = collections.OrderedDict()
        self._kept_bytes = 0
        self._lock, self._process = threading.Lock(), os.getpid()

    def __len__(self) -> int:
        """Returns the number of records."""
        return self._ends[-1]

    def __getitem__(self, index: SupportsIndex) -> Dict[str, Any]:
        """Returns a record: its values by name of the column."""
        group, place = self._find(operator.index(index))
        return _record(self._group(group), place)

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> List[Dict[str, Any]]:
        """Returns several records, in the order of their indices. Loaders of PyTorch call it once for a batch."""
        places = [self._find(operator.index(it)) for it in indices]
        # So that each group is read once, however few are kept.
        groups = {group: self._group(group) for group in sorted({group for group, _ in places})}
        return [_record(groups[group], place) for group, place in places]

    def __getstate__(self) -> Mapping[str, Any]:
        return {"keys": self._keys, "cache_bytes": self._cache_bytes}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._cache_bytes = state["cache_bytes"]
        self._begin(state["keys"])

    def _find(self, index: int) -> "tuple[int, int]":
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"the dataset has {len(self)} records, and none of index {index}")
        group = bisect.bisect_right(self._ends, number)
        return group, number - (self._ends[group - 1] if group else 0)

    def _group(self, group: int) -> Dict[str, Any]:
        if self._process != os.getpid():
            # Forked, perhaps while another thread had the lock.
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            found = self._kept.get(group)
            if found is not None:
                self._kept.move_to_end(group)
                return found
        # Without the lock: threads read other groups meanwhile.
        found = self._files.read(group)
        size = _bytes(found)
        with self._lock:
            if group not in self._kept:
                self._kept[group] = found
                self._kept_bytes += size
            while self._cache_bytes < self._kept_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= _bytes(dropped)
        return found


def _record(group: Mapping[str, Any], place: int) -> Dict[str, Any]:
    return {name: _value(column, place) for name, column in group.items()}


def _value(column: Any, place: int) -> Any:
    if isinstance(column, tuple):
        values, offsets = column
        return values[offsets[place] : offsets[place + 1]]
    return column[place]


def _bytes(group: Mapping[str, Any]) -> int:
    columns = itertools.chain.from_iterable(it if isinstance(it, tuple) else (it,) for it in group.values())
    return sum(map(_bytes_of, columns))


def _bytes_of(column: "np.ndarray[Any, Any]") -> int:
    objects = column.tolist() if column.dtype == object else ()
    return column.nbytes + sum(_OBJECT_BYTES + len(it) for it in objects)
