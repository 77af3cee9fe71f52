"""assignments.parquet: who was in which group at every evaluation of a run.

While a run goes on, each evaluation is appended to assignments.jsonl, which becomes the Parquet
file when the run ends: a Parquet file cannot be appended to. A line has the round, the groups
`group` [R] and the true groups `concept` [R]; -1: none, or unknown.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_cfl.runs.regular_files import refuse_damage
from fedjax_cfl.runs.results import read_columns, write_parquet

ASSIGNMENTS_FILE, PART = "assignments.parquet", "assignments.jsonl"
SAMPLED = "clients"  # of the file's metadata: which clients it holds, where not all


class Assignments(NamedTuple):
    """Who was in which group at each of E evaluations, of R clients: all, or a sample."""

    rounds: np.ndarray  # [E] int32
    clients: np.ndarray  # [R] int64, rows of clients.parquet
    groups: np.ndarray  # [E, R] int32, -1: the client had no model yet
    concepts: np.ndarray | None  # [E, R] int32, true groups, -1 where unknown; None: all unknown


# writing


def sample_clients(num_clients: int, most: int, seed: int) -> np.ndarray:
    """Returns the numbers [R] of all clients, or of `most` drawn by the seed, in order."""
    if num_clients <= most:
        return np.arange(num_clients)
    rng = np.random.default_rng([seed, num_clients])
    return np.sort(rng.choice(num_clients, most, replace=False))


def format_grouping(round: int, group: np.ndarray, concept: np.ndarray) -> str:
    """Returns a line of assignments.jsonl, of groups and true groups [R] at an evaluation."""
    line = {"round": int(round), "group": group.tolist(), "concept": concept.tolist()}
    return json.dumps(line) + "\n"


def read_lines(run_dir: Path) -> list[str]:
    """Returns the lines of all evaluations of a run so far, of one that had finished made of its
    table.
    """
    path = run_dir / PART
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if (found := read_assignments(run_dir)) is None:
        return []
    concepts = np.full_like(found.groups, -1) if found.concepts is None else found.concepts
    return [*map(format_grouping, found.rounds, found.groups, concepts)]


def finish_assignments(
    run_dir: Path, clients: np.ndarray, num_clients: int, run_id: str = ""
) -> None:
    """Turns assignments.jsonl of a finished run into assignments.parquet, a row for each
    evaluation: round, group and, where any is known, concept, lists [R] of the smallest
    integers that hold them, of the `clients` [R] of all K = `num_clients`. `run_id` is noted in it.
    Raises ValueError where the file was removed, or has half a line.
    """
    path = run_dir / PART
    if not path.is_file():
        raise ValueError(f"{PART} was removed while the run went on")
    rows = [*map(json.loads, read_lines(run_dir))]
    if clients.size and rows:
        groups, concepts = (_shrink([row[name] for row in rows]) for name in ("group", "concept"))
        columns = {"round": np.array([row["round"] for row in rows], np.int32), "group": groups}
        if (concepts >= 0).any():
            columns["concept"] = concepts
        noted = {SAMPLED: json.dumps(clients.tolist())} if clients.size < num_clients else {}
        write_parquet(run_dir / ASSIGNMENTS_FILE, columns, run_id, **noted)
    path.unlink()


def _shrink(rows: list[list[int]]) -> np.ndarray:
    """Returns numbers [E, R] as the smallest integers that hold them, and -1."""
    values = np.array(rows)
    return values.astype(np.min_scalar_type(-1 - int(values.max(initial=0))))


# reading


def read_assignments(run_dir: str | Path, run_id: str | None = None) -> Assignments | None:
    """Reads assignments.parquet; None where a run has kept no groups. Raises InputError
    for a damaged file, or one of another run than `run_id`.
    """
    path = Path(run_dir) / ASSIGNMENTS_FILE
    if not path.is_file():
        return None
    found, metadata = read_columns(path, {"round": 1, "group": 2}, run_id)
    groups, concepts = found["group"].astype(np.int32), found.get("concept")
    with refuse_damage(path):
        sampled = json.loads(metadata.get(SAMPLED.encode(), b"null"))
        clients = np.array(range(groups.shape[1]) if sampled is None else sampled, np.int64)
    concepts = None if concepts is None else concepts.astype(np.int32)
    return Assignments(found["round"].astype(np.int32), clients, groups, concepts)
