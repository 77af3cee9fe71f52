"""The measures of a run that published tables show, beyond those of its summary."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedjax_cfl.runs.results import rounds_to, summarize_rows, tail_macro_score, to_plain
from fedjax_cfl.scores import score_of

Rows = list[dict[str, Any]]  # of metrics.jsonl


def compute_measures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what `summarize_rows` does and further measures that published tables show: null
    where a target is not reached or no test counts.

    `units` are models sent down and up in all, `migrations` clients that changed their
    group after a shift, `median_accuracy` is over the evaluations that count,
    `rounds_to_85` the first of them with an accuracy of at least 0.85. Means over clients
    are averaged over the last 5 % of the evaluations, or over all; mean client distances and
    numbers of groups over all.
    """
    rows = to_plain(rows)
    scored = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    numbers = summarize_rows(rows)
    return {
        **numbers,
        "last_accuracy": numbers["final_accuracy"],
        "median_accuracy": float(np.median(scored)) if scored else None,
        "rounds_to_85": rounds_to(rows, 0.85),
        "units": (numbers["units_down"] or 0) + (numbers["units_up"] or 0),
        "migrations": sum(row.get("migrated_clients") or 0 for row in rows),
        "reclusterings": sum(row.get("reclusterings") or 0 for row in rows),
        "tail_macro_accuracy": tail_macro_score(rows),
        **{
            f"average_{name}": average(row.get(name) for row in rows)
            for name in ("macro_accuracy", "mean_client_distance", "groups")
        },
    }


def average(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are there, None where none is."""
    kept = [value for value in values if value is not None]
    return float(np.mean(kept)) if kept else None


def scored_rounds(rows: Rows) -> dict[int, float]:
    """Returns the score of every evaluation that counts, by its round."""
    name = score_of(rows).name
    return {row["round"]: row[name] for row in rows if row.get(name) is not None}


def shared_rounds(runs: Iterable[Rows]) -> set[int]:
    """Returns the rounds whose evaluation counts in every run; runs of which none
    counts are left out.
    """
    scored = [rounds for rounds in map(scored_rounds, runs) if rounds]
    return set.intersection(*map(set, scored)) if scored else set()


def best_over(rows: Rows, rounds: set[int]) -> float | None:
    """Returns the best score among these rounds, None if none of them counts."""
    scored = scored_rounds(rows)
    found = [scored[number] for number in rounds if number in scored]
    return score_of(rows).pick_best(found) if found else None
