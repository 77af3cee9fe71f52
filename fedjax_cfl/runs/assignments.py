"""assignments.parquet: who was in which group at every evaluation of a run.

While a run goes on, each evaluation is appended to assignments.part, which becomes the
Parquet file when the run ends: a Parquet file cannot be appended to. A record of the
part is int32, little-endian: round, group [R], true group [R]; -1: none, or unknown.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedjax_cfl.errors import InputError, warn
from fedjax_cfl.runs.columns import COUNT, GROUP, RUN_ID, read_columns
from fedjax_cfl.runs.results import atomic_write

if TYPE_CHECKING:  # JAX is not needed to read them
    from fedjax_cfl.simulation.driver import Grouping

ASSIGNMENTS_FILE, PART = "assignments.parquet", "assignments.part"
SAMPLED = b"clients"  # of the file's metadata: which clients it holds, where not all
COLUMNS = {
    "round": COUNT._replace(needed=True),
    "group": GROUP._replace(lists=True),
    "concept": GROUP._replace(lists=True, needed=False),
}


class Assignments(NamedTuple):
    """Who was in which group at each of E evaluations, of R clients: all, or a sample."""

    rounds: np.ndarray  # [E] int32
    clients: np.ndarray  # [R] int64, rows of clients.parquet
    groups: np.ndarray  # [E, R] int32, -1: the client had no model yet
    concepts: np.ndarray | None  # [E, R] int32, true groups, -1 where unknown; None: all unknown


class AssignmentLog(NamedTuple):
    """What writes the groups of one run."""

    append: "Callable[[int, Grouping], None]"  # (round, grouping): at once
    # () -> [number of records, their SHA-256]; flushes them to the disk first
    fingerprint: Callable[[], list[Any]]


# writing


def sample_clients(num_clients: int, most: int, seed: int) -> np.ndarray:
    """Returns the numbers [R] of all clients, or of `most` drawn by the seed, in order."""
    if num_clients <= most:
        return np.arange(num_clients)
    rng = np.random.default_rng([seed, num_clients])
    return np.sort(rng.choice(num_clients, most, replace=False))


@contextlib.contextmanager
def open_assignments(run_dir: Path, clients: np.ndarray) -> Iterator[AssignmentLog]:
    """Yields what appends to assignments.part of a run that keeps the groups of `clients` [R].

    The run does not need this file to go on: where it is removed, cut or made longer meanwhile,
    what is left of it is written again.
    """
    path, size = run_dir / PART, record_size(clients)
    with contextlib.ExitStack() as files:
        handle = files.enter_context(path.open("a+b"))
        held = path.read_bytes()
        digest, written = hashlib.sha256(held), len(held) // size

        def repair() -> None:
            nonlocal handle, digest, written
            if is_whole(handle, path, written * size):
                return
            handle.seek(0)  # the file that was opened, also where it has no name any more
            held = handle.read()
            kept = held[: size * min(written, len(held) // size)]
            with atomic_write(path) as temporary:
                temporary.write_bytes(kept)
            handle = files.enter_context(path.open("a+b"))
            if lost := written - len(kept) // size:
                warn_lost(run_dir, f"the groups of {lost} evaluations are lost")
            digest, written = hashlib.sha256(kept), len(kept) // size

        def append(round: int, grouping: "Grouping") -> None:
            nonlocal written
            repair()
            both = [np.asarray(column)[clients] for column in grouping[:2]]
            record = np.concatenate([[round], *both]).astype("<i4").tobytes()
            handle.write(record)
            handle.flush()
            digest.update(record)
            written += 1

        def fingerprint() -> list[Any]:
            repair()
            os.fsync(handle.fileno())
            return [written, digest.hexdigest()]

        yield AssignmentLog(append, fingerprint)


def is_whole(handle: IO[bytes], path: Path, size: int) -> bool:
    """Returns whether a path still names the open file, of so many bytes."""
    there = os.fstat(handle.fileno())
    with contextlib.suppress(OSError):
        return os.path.samestat(there, path.stat()) and there.st_size == size
    return False


def warn_lost(run_dir: Path, what: str) -> None:
    """Prints that assignments.part is not what the run has written to it."""
    warn(f"run_dir={run_dir}: {PART} was removed or changed while the run went on; {what}")


def record_size(clients: np.ndarray) -> int:
    """Returns the bytes of one evaluation in assignments.part."""
    return 4 * (1 + 2 * clients.size)


def verified_assignments(
    run_dir: Path, clients: np.ndarray, step: int, fingerprint: list[Any]
) -> bytes:
    """Returns the records of assignments.part that a run keeps when it goes on from a
    checkpoint. Raises InputError if they are missing or have changed since the checkpoint was
    saved.

    `clients` [R] are those whose groups it keeps; `step` is the checkpoint's round; `fingerprint`
    is what it stores of them, [number of records, their SHA-256].
    """
    (records, digest), path = fingerprint, run_dir / PART
    if path.is_file():
        held = path.read_bytes()
    else:  # the run had finished, and now has more rounds
        found = read_assignments(run_dir)
        held = b"" if found is None else _pack(found)
    kept = held[: records * record_size(clients)]
    if hashlib.sha256(kept).hexdigest() != digest and clients.size:
        raise InputError(
            f"run_dir={run_dir}: {PART if path.is_file() else ASSIGNMENTS_FILE} has lost or changed"
            f" groups that the checkpoint of round {step} has recorded ({records} evaluations); put"
            " the file back, or choose another"
        )
    return kept


def _pack(found: Assignments) -> bytes:
    """Returns the records of assignments.part."""
    concepts = np.full_like(found.groups, -1) if found.concepts is None else found.concepts
    return np.column_stack([found.rounds, found.groups, concepts]).astype("<i4").tobytes()


def finish_assignments(
    run_dir: Path,
    clients: np.ndarray,
    num_clients: int,
    fingerprint: list[Any] | None = None,
    run_id: str = "",
) -> None:
    """Turns assignments.part of a finished run into assignments.parquet, a row for each
    evaluation: round, group and, where any is known, concept, lists [R] of the smallest
    integers that hold them, of the `clients` [R] of all K = `num_clients`. `run_id` is noted in it.

    Of a part that is not as the last checkpoint has it, by its `fingerprint`, nothing is kept,
    with a warning.
    """
    path = run_dir / PART
    held = path.read_bytes() if path.is_file() else b""
    if fingerprint is not None:
        held = held[: fingerprint[0] * record_size(clients)]
        if hashlib.sha256(held).hexdigest() != fingerprint[1] and clients.size:
            warn_lost(run_dir, f"{ASSIGNMENTS_FILE} is not written")
            path.unlink(missing_ok=True)
            return
    if clients.size and held:
        table = np.frombuffer(held, "<i4").reshape(-1, record_size(clients) // 4)
        rounds, groups, concepts = np.split(table, [1, 1 + clients.size], axis=1)
        columns = {"round": pa.array(rounds[:, 0]), "group": _lists(groups)}
        if (concepts >= 0).any():
            columns["concept"] = _lists(concepts)
        parquet = pa.table(columns)
        noted: dict[Any, Any] = {RUN_ID: run_id}
        if clients.size < num_clients:
            noted[SAMPLED] = json.dumps(clients.tolist())
        parquet = parquet.replace_schema_metadata(noted)
        with atomic_write(run_dir / ASSIGNMENTS_FILE) as temporary:
            pyarrow.parquet.write_table(parquet, temporary, compression="zstd")
    path.unlink(missing_ok=True)


def _lists(values: np.ndarray) -> pa.Array:
    """Returns the rows of values [E, R] as lists of small integers."""
    dtype = np.min_scalar_type(-1 - int(values.max(initial=0)))  # signed, for -1
    offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
    flat = pa.array(values.astype(dtype).reshape(-1))
    return pa.LargeListArray.from_arrays(offsets, flat)


# reading


def read_assignments(run_dir: str | Path, run_id: str | None = None) -> Assignments | None:
    """Reads assignments.parquet; None where a run has kept no groups. Raises InputError
    for a file that no run wrote, or another one than `run_id`.
    """
    path = Path(run_dir) / ASSIGNMENTS_FILE
    if not path.is_file():
        return None
    found, metadata = read_columns(path, COLUMNS, run_id)
    groups, concepts = found["group"].astype(np.int32), found.get("concept")
    size = groups.shape[1]
    try:
        sampled = json.loads(metadata.get(SAMPLED, b"null"))
        clients = np.array(sampled if isinstance(sampled, list) else range(size), np.int64)
    except (ValueError, TypeError, OverflowError, RecursionError):
        clients = np.zeros(0)
    if clients.shape != (size,) or (np.diff(clients) <= 0).any() or clients[0] < 0:
        raise InputError(f"{path}: cannot be read: its clients are not those of its groups")
    if concepts is not None and concepts.shape != groups.shape:
        raise InputError(f"{path}: cannot be read: its columns do not fit together")
    concepts = None if concepts is None else concepts.astype(np.int32)
    return Assignments(found["round"].astype(np.int32), clients, groups, concepts)
