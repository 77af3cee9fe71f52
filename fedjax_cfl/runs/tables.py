"""The tables of a finished run, checked against one another and against its rows."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.assignments import ASSIGNMENTS_FILE, Assignments, read_assignments
from fedjax_cfl.runs.results import CLIENTS_FILE, SUMMARY_FILE, read_clients


class Tables(NamedTuple):
    """What a run has in tables, None where its directory has no such file."""

    clients: dict[str, np.ndarray] | None  # of clients.parquet, a column [K] each
    assignments: Assignments | None  # groups at every evaluation


def read_tables(
    run_dir: Path, summary: dict[str, Any], rows: list[dict[str, Any]], clients: int | None = None
) -> Tables:
    """Returns the tables of a run with this summary and these rows of metrics.jsonl.

    `clients` is K, None: as the summary has it, where it does. Raises InputError for tables that
    no run wrote, or that are not of this run.
    """
    run_id = summary.get("run_id")
    if not isinstance(run_id, str | None):
        raise InputError(f"{run_dir / SUMMARY_FILE}: run_id is no text, expected what a run writes")
    clients = summary.get("clients") if clients is None else clients
    written = (run_dir / CLIENTS_FILE).exists()
    table = read_clients(run_dir, CLIENTS_FILE, run_id) if written else None
    found = read_assignments(run_dir, run_id)
    count = clients if table is None else len(table["client"])
    if clients is not None and count != clients:
        refuse(run_dir / CLIENTS_FILE, f"it has {count} rows, and the run {clients} clients")
    if found is not None:
        evaluated = [row["round"] for row in rows]
        ordered = (np.diff(found.rounds) > 0).all() and found.rounds[-1] in evaluated[-1:]
        if not ordered or not np.isin(found.rounds, evaluated).all():
            refuse(run_dir / ASSIGNMENTS_FILE, "its rounds are not those of metrics.jsonl")
        check_fits(run_dir / ASSIGNMENTS_FILE, found.clients, count)
    return Tables(table, found)


def check_fits(path: Path, places: np.ndarray, clients: int | None) -> None:
    """Raises InputError for rows of clients.parquet that it does not have, or twice."""
    if clients is not None and places.max() >= clients:
        refuse(path, f"it has client number {places.max()} of a run of {clients} clients")
    if np.unique(places).size < places.size:
        refuse(path, "it has a client twice")


def refuse(path: Path, reason: str) -> None:
    """Raises InputError for a file that is not of the run in whose directory it lies."""
    raise InputError(
        f"{path}: is of another run than the files beside it ({reason}); put back the file that"
        " this run has written"
    )
