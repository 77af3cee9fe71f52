"""The columns of a run's Parquet files, checked: whatever was done to a file, reading it ends in
arrays of the types and ranges that a run writes, or in one line that names file and column.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.regular_files import explain, open_regular

RUN_ID = b"run_id"  # of a file's metadata: the run that wrote it, see `settings.digest_identity`
MAX_INTEGER = 2**31 - 1


class Column(NamedTuple):
    """What a column may hold."""

    allowed: str  # completes "must hold ..."
    low: float = -np.inf
    high: float = np.inf
    whole: bool = False
    nulls: bool = False  # null is allowed, and NaN then
    names: bool = False  # also text; each only once
    lists: bool = False  # a list in each row, all equally long
    needed: bool = True


NUMBER = Column("numbers or null", nulls=True, needed=False)
COUNT = Column("whole numbers >= 0", 0, MAX_INTEGER, whole=True, needed=False)
GROUP = Column("whole numbers, -1 for none", -1, MAX_INTEGER, whole=True)
NAME = Column("names, text or whole numbers, each once", whole=True, names=True)


def to_arrow(values: Any) -> pa.Array:
    """Returns values [K] as a column, and values [K, ...] as one of lists. Numbers and text go
    without `pyarrow.array`, which imports pandas: that takes as long as a short run.
    """
    values = np.asarray(values)
    if values.ndim > 1:
        lists = values.reshape(len(values), -1)
        ends = np.arange(len(lists) + 1, dtype=np.int64) * lists.shape[1]
        return pa.LargeListArray.from_arrays(to_arrow(ends), to_arrow(lists.reshape(-1)))
    if values.dtype.kind == "U":
        texts = [text.encode() for text in values.tolist()]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        parts = pa.py_buffer(ends), pa.py_buffer(b"".join(texts))
        return pa.LargeStringArray.from_buffers(len(texts), *parts)
    if values.dtype.kind not in "iuf":
        return pa.array(values)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def read_columns(
    path: Path, columns: Mapping[str, Column], run_id: str | None = None
) -> tuple[dict[str, np.ndarray], dict[bytes, bytes]]:
    """Returns the columns of a table, arrays [rows] or [rows, entries of a list], and its metadata.

    Args: `columns` are those that must be there, unless they are not `needed`; any other must
    hold numbers; `run_id` is that of the run whose file it is, None: any.
    Raises InputError for a file that cannot be read, without rows, or with other columns than a
    run writes, and for the file of another run.
    """
    try:
        with open_regular(path) as handle:
            table = pyarrow.parquet.read_table(handle)
            names, metadata = table.column_names, table.schema.metadata or {}
            if len(set(names)) < len(names):
                raise ValueError("it has two columns of one name")
            missing = [name for name in columns if columns[name].needed and name not in names]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            if not table.num_rows:
                raise ValueError("it has no rows")
            found = {
                name: _read_column(name, table[name], columns.get(name, NUMBER)) for name in names
            }
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {explain(error)}") from None
    written = metadata.get(RUN_ID, b"").decode(errors="replace")
    if run_id and written and written != run_id:
        raise InputError(
            f"{path}: is of another run than the files beside it; put back the file that this run"
            " has written"
        )
    return found, metadata


def _read_column(name: str, column: pa.ChunkedArray, rule: Column) -> np.ndarray:
    """Returns one column. Raises ValueError for what its rule does not allow."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if is_list != rule.lists:
        raise ValueError(f"column {name} must hold {'lists of ' * rule.lists}{rule.allowed}")
    if not rule.lists:
        return _read_values(name, column.combine_chunks(), rule)
    lengths = {n for part in column.chunks for n in part.value_lengths().unique().to_pylist()}
    if len(lengths) != 1 or not lengths.isdisjoint((None, 0)):
        raise ValueError(f"column {name} must hold lists of one length, with an entry at least")
    flat = _read_values(name, pa.concat_arrays([c.flatten() for c in column.chunks]), rule)
    return flat.reshape(len(column), -1)


def _read_values(name: str, values: Any, rule: Column) -> np.ndarray:
    """Returns the values of an array without lists, as `_read_column` does."""
    kind, wrong = values.type, f"column {name} must hold {rule.allowed}"
    found, usual = np.empty(0), False
    if rule.names and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        found = np.asarray(values.to_pylist())
        usual = not values.null_count
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind):
        whole = pa.types.is_integer(kind) and not values.null_count
        found = values.to_numpy(zero_copy_only=False)
        found = found if whole else np.array(values.to_pylist(), np.float64)  # null is NaN
        known = ~np.isnan(found) if rule.nulls else np.ones(found.shape, bool)
        inside = (found >= rule.low) & (found <= rule.high)
        if rule.whole:
            inside &= found == np.floor(found)
        usual = bool((inside | ~known).all())
        if usual and rule.whole and found.dtype != np.uint64:
            found = found.astype(np.int64)
    if not usual:
        raise ValueError(wrong)
    if rule.names and np.unique(found).size < found.size:
        raise ValueError(f"{wrong}; one is there twice")
    return found
