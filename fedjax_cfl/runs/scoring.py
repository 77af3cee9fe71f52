"""Which evaluations count: a best is a maximum, and grows with the number of tests it
is taken over.
"""

import math
from collections.abc import Iterable
from typing import Any

from fedjax_cfl.scores import score_of

Rows = list[dict[str, Any]]  # of metrics.jsonl


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


def chance_all_met(clients: int, cohort: int, rounds: int) -> float:
    """Returns the chance that cohorts drawn at random have included every client after
    `rounds`, with clients taken as independent (about right for many).
    """
    missed = max(0.0, 1 - cohort / clients) ** rounds  # one client, in all rounds
    return (1 - missed) ** clients


def describe_met_rule(clients: int, cohort: int, rounds: int) -> str:
    """Returns a line about discard=met: when the accuracies of a run will count."""
    robin = math.ceil(clients / cohort)
    half = robin
    while chance_all_met(clients, cohort, half) < 0.5:
        half += max(1, half // 100)
    return (
        "discard=met: accuracies count once every client has taken part. Cohorts drawn at random"
        f" (preset=paper) do so within {rounds} rounds in about"
        f" {chance_all_met(clients, cohort, rounds):.2g} of all runs, and in half of them by round"
        f" {half}; with round robin it is round {robin}. discard=rounds or discard=none count"
        " sooner"
    )
