"""The files of a run directory, and the table made from them.

`metrics.jsonl` is the source of truth: one row per evaluation, appended and flushed as
the run goes. run.log and assignments.jsonl (see `assignments`) are appended to as well. The
results of a finished run (summary.json, the Parquet files, curves.png) are written under a
temporary name and then renamed, so that no reader sees half a file.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import yaml

from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import escape_csv
from fedjax_cfl.runs.regular_files import check_run, open_regular, read_regular, refuse_damage
from fedjax_cfl.scores import SCORES, score_of

METRICS_FILE, CLIENTS_FILE = "metrics.jsonl", "clients.parquet"
SUMMARY_FILE = "summary.json"  # its presence says that the run is finished
INDEX_FILE = "index.csv"  # of a sweep: what varies between its runs
NEW_CLIENTS_FILE = "new_clients.parquet"
RUN_ID = b"run_id"  # of a Parquet file's metadata: the run that wrote it
WHOLE = ("round", "group", "concept", "labels")  # columns of whole numbers, or lists of them
# of a row: a value for each group, or for each true group
LIST_FIELDS = ("group_sizes", "group_loss", "group_discrepancy")
LIST_FIELDS += tuple(
    f"{part}_{name}" for part in ("group", "concept") for score in SCORES for name in score.measured
)
MAX_NUMBER = 3.5e38  # of a number in a row: beyond what float32 holds
WINDOW = 10  # evaluations, of last10_evals_*
# what a summary copies from the last row, behind the scores
LAST_ROW_FIELDS = (
    "groupless_clients", "nonfinite_model_clients", "units_up", "units_down", "bytes_up",
    "bytes_down", "client_updates", "local_steps", "sim_time_s",
)  # fmt: skip
SUMMED_FIELDS = ("dropped_clients", "nonfinite_clients", "hostile_clients", "late_clients")


# writing


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which becomes `path` when the block ends
    well and is removed when it does not.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_plain(value: Any) -> Any:
    """Turns arrays and NumPy or JAX scalars into JSON's own types, and NaN and
    infinities into None.
    """
    if isinstance(value, dict):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text, in UTF-8."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, obj: Any) -> None:
    """Writes `obj` as indented JSON."""
    write_text(path, json.dumps(to_plain(obj), indent=2, allow_nan=False) + "\n")


def write_columns(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows of the same names as a table for spreadsheets; NaN and None leave a cell
    empty.
    """
    import pandas  # only now: a run needs none of it

    table = pandas.DataFrame(rows, dtype=object).map(escape_csv)
    with atomic_write(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\r\n")


def write_parquet(
    path: Path, columns: dict[str, Any], run_id: str = "", **noted: bytes | str
) -> None:
    """Writes a Parquet file with checksums, by which a reader, see `read_columns`, sees damage.

    `columns` has the values [K] of each column by its name; an array with more axes, as labels
    [K, C], becomes a column of lists. `run_id` is noted in it, for a reader to see that it is of
    this run, as is what else is `noted`.
    """
    arrays: Any = {name: to_arrow(values) for name, values in columns.items()}
    table = pa.table(arrays, metadata={RUN_ID: run_id, **noted})
    with atomic_write(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


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


def append_row(handle: IO[str], row: dict[str, Any]) -> None:
    """Appends one row and flushes, so that a killed run loses at most the row it was writing."""
    handle.write(json.dumps(to_plain(row), allow_nan=False) + "\n")
    handle.flush()


# reading


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns a row, {} for JSON that is no row, and None for what is no JSON."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    except RecursionError:
        return {}
    number = row.get("round") if isinstance(row, dict) else None
    return row if type(number) is int and number >= 0 else {}


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl in order of rounds; a torn last line is ignored.

    A run that resumes from a checkpoint repeats the rounds after it: the later row of a
    round counts. Raises InputError for rows that no run wrote.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise InputError(f"no {METRICS_FILE} in {str(run_dir)!r}: expected a run directory")
    with refuse_damage(path):
        lines = read_regular(path).splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None and number == len(lines) and not line.endswith(b"\n"):
            break  # a killed run was writing it
        if not row:
            raise InputError(
                f"{path}, line {number}: not a JSON object with an integer 'round':"
                f" {line[:40].decode(errors='replace')!r}"
            )
        check_numbers(f"{path}, round {row['round']}", row)
        while rows and rows[-1]["round"] >= row["round"]:
            rows.pop()
        rows.append(row)
    return rows


def check_numbers(where: str, row: dict[str, Any]) -> None:
    """Raises InputError unless the values of a row are numbers, lists of numbers or null; `where`
    begins the message.
    """
    number: Any
    for name, value in row.items():
        for number in value if isinstance(value, list) and name in LIST_FIELDS else [value]:
            known = isinstance(number, int | float) and not isinstance(number, bool)
            if number is not None and not (known and abs(number) <= MAX_NUMBER):
                raise InputError(
                    f"{where}: {name} is no number up to {MAX_NUMBER:g}, expected what a run writes"
                )


def read_summary(run_dir: str | Path) -> dict[str, Any] | None:
    """Reads summary.json, or returns None where the run has not finished."""
    path = Path(run_dir) / SUMMARY_FILE
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises InputError for a file that holds none."""
    with refuse_damage(path):
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


def read_clients(run_dir: str | Path, run_id: str | None = None) -> dict[str, np.ndarray] | None:
    """Reads clients.parquet as arrays: one a column [K], labels [K, C]; None: the run has no such
    file. Raises InputError as `read_columns` does.
    """
    path = Path(run_dir) / CLIENTS_FILE
    if not path.exists():
        return None
    return read_columns(path, {"client": 1, "group": 1, "concept": 1}, run_id)[0]


def read_columns(
    path: Path, axes: dict[str, int], run_id: str | None = None
) -> tuple[dict[str, np.ndarray], dict[bytes, bytes]]:
    """Returns the columns of a Parquet file, arrays [rows] or of lists [rows, entries], and its
    metadata.

    Args: `axes` of the columns that must be there; `run_id` is that of the run whose file it is,
    None: any. Raises InputError for a file that is damaged, without rows, of another run or of
    other columns than a run writes.
    """
    with refuse_damage(path), open_regular(path) as handle:
        # not `read_table`, which imports pandas
        file = pyarrow.parquet.ParquetFile(handle, page_checksum_verification=True)
        table = file.read()
        metadata = table.schema.metadata or {}
        check_run(metadata.get(RUN_ID, b"").decode(errors="replace"), run_id)
        if not table.num_rows:
            raise ValueError("it has no rows")
        found = {name: _to_numpy(name, table[name].combine_chunks()) for name in table.column_names}
        for name, expected in axes.items():
            if name not in found or found[name].ndim != expected:
                raise ValueError(f"it has no column {name} as a run writes it")
    return found, metadata


def _to_numpy(name: str, column: Any) -> np.ndarray:
    """Returns a column as an array of names, int64 or float64, in which null is NaN."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.value_lengths().unique().to_pylist()
        if len(lengths) != 1 or not lengths[0]:
            raise ValueError(f"lists of column {name} are empty or not equally long")
        return _to_numpy(name, column.flatten()).reshape(len(column), -1)
    whole = name in WHOLE or pa.types.is_integer(kind)
    if column.null_count and (whole or name == "client"):
        raise ValueError(f"column {name} has nulls")
    if name != "client":
        column = column.cast(pa.int64() if whole else pa.float64())
        if not column.null_count:  # not `to_numpy`, which imports pandas
            return np.array(np.from_dlpack(column))
    return np.array(column.to_pylist(), None if name == "client" else float)


def read_settings(run_dir: str | Path) -> dict[str, Any]:
    """Reads every setting of a run, nested as in conf/."""
    path = Path(run_dir) / ".hydra" / "config.yaml"
    with refuse_damage(path):
        settings = yaml.load(read_regular(path), PlainLoader)
        groups = {
            "model.module": settings["model"]["module"],
            "made_of": settings.get("made_of", {}),
        }
        for name, group in groups.items():
            if not isinstance(group, dict):
                raise ValueError(f"{name} is no group of settings")
    return settings


class PlainLoader(yaml.SafeLoader):
    """Reads values only, as safe_load does, and no aliases: a few lines of aliases of aliases
    are more values than a memory holds, and no run writes one.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias, *name")
        return super().compose_node(parent, index)


def series(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """Returns one value per row, [R] or [R, m] for per-group lists; NaN where it is
    null or absent.
    """
    values = [row.get(name) for row in rows]
    width = max((len(value) for value in values if isinstance(value, list)), default=0)
    blank = [None] * width or None  # which NumPy reads as NaN
    return np.array([blank if value is None else value for value in values], float)


# numbers


def rounds_to(rows: list[dict[str, Any]], target: float) -> int | None:
    """Returns the first evaluated round whose accuracy is at least `target`, whose RMSE at most
    that; or None.
    """
    score = score_of(rows)
    known = [row for row in rows if row.get(score.name) is not None]
    reached = (row["round"] for row in known if not score.is_better(target, row[score.name]))
    return next(reached, None)


def summarize_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Reduces a run to its headline numbers: means skip nulls, the variance divides by
    n, and of equal bests the first counts.

    `best_of` says over how many evaluations the best was taken: fewer for a clustered
    method, whose first accuracies do not count. `last10_evals_*`, the mean and the best
    of the last ten evaluations, compare methods over the same window. Of a regression the names
    have rmse in place of accuracy, and the best is the lowest; of labels they have micro_f1. Where
    a round was chosen on validation samples, the best, the final one and all scores but those of
    the last ten are its.
    """
    rows, score = to_plain(rows), score_of(rows)
    name = score.name
    scored = [row for row in rows if row.get(name) is not None]
    choose = max if score.higher else min
    best = choose(scored, key=lambda row: row[name], default={})
    tail = [row[name] for row in rows[-WINDOW:] if row.get(name) is not None]
    spread = [row["discrepancy"] for row in rows if row.get("discrepancy") is not None]
    last = rows[-1] if rows else {}
    told, number = last, last.get("chosen_round")
    if number is not None:
        told = best = next((row for row in rows if row["round"] == number), {})
    return {
        "rounds": last.get("round", 0),
        **({} if number is None else {"chosen_round": number, "chosen_on": "validation samples"}),
        **{each: told.get(each) for each in (f"validation_macro_{name}",) if each in told},
        f"best_{name}": best.get(name),
        "best_round": best.get("round"),
        f"final_{name}": told.get(name),
        "best_of": len(scored),
        f"last10_evals_{name}": float(np.mean(tail)) if tail else None,
        f"last10_evals_best_{name}": choose(tail, default=None),
        "discrepancy_mean": float(np.mean(spread)) if spread else None,
        "discrepancy_variance": float(np.var(spread)) if spread else None,
        **{name: told.get(name) for name in score.beside},
        **{name: last.get(name) for name in LAST_ROW_FIELDS},
        **{name: sum(row.get(name) or 0 for row in rows) for name in SUMMED_FIELDS},
    }


def tail_macro_score(rows: list[dict[str, Any]]) -> float | None:
    """Returns the mean over the last 5 % of the evaluations, at least one, of the mean score over
    clients.
    """
    name, count = f"macro_{score_of(rows).name}", max(1, round(0.05 * len(rows)))
    values = [row[name] for row in rows[-count:] if row.get(name) is not None]
    return float(np.mean(values)) if values else None
