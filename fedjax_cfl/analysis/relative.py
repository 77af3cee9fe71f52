"""A run beside the baseline's run of the same seed (Fielding, https://arxiv.org/abs/2411.01580,
section 3): how much more accurate it is in the end, and how much sooner it is as accurate.

Accuracies are means over clients. The target is the baseline's accuracy in the end; it is
reached once every later test reaches it, too. Tests before all clients had a model are left out:
those that a clustered method has assigned first may be the easy ones.
"""

from pathlib import Path
from typing import Any

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.results import most_clients, settled_clients, tail_macro_score
from fedjax_cfl.scores import SCORES, score_of

RELATIVE = (*(score.gain for score in SCORES), "speedup")  # measures that need a baseline

Rows = list[dict[str, Any]]  # of metrics.jsonl


def time_to_keep(rows: Rows, target: float) -> float | None:
    """Returns the simulated seconds, without a clock the rounds, after which every test is of
    all clients and has an accuracy of at least `target`, or an RMSE of at most that; None if the
    last one has not.
    """
    reached, everybody, score = None, most_clients(rows), score_of(rows)
    for row in reversed(rows):
        whole, value = settled_clients(row) == everybody, row.get(f"macro_{score.name}")
        if not whole or value is None or score.is_better(target, value):
            break
        reached = row.get("sim_time_s") or row["round"]
    return reached


def compare_to_baseline(rows: Rows, baseline: Rows) -> dict[str, float | None]:
    """Returns the measures `RELATIVE` of a run: by how much its score is better, a difference of
    fractions or of RMSE, and the baseline's time to its own final score divided by the run's.

    The speed-up is None if the run does not reach it.
    """
    score = score_of(rows)
    gain = score.gain
    if rows is baseline:
        return {gain: 0.0, "speedup": 1.0}
    own, target = tail_macro_score(rows), tail_macro_score(baseline)
    if own is None or target is None or score_of(baseline) is not score:
        return {gain: None, "speedup": None}
    ours, theirs = time_to_keep(rows, target), time_to_keep(baseline, target)
    # the baseline's last tests may be below their own mean: then its time is the whole run
    theirs = theirs or baseline[-1].get("sim_time_s") or baseline[-1]["round"]
    better = own - target if score.higher else target - own
    return {gain: better, "speedup": theirs / ours if ours else None}


def measure_beside(
    numbers: dict[Path, dict], cells: list[Path], baseline: list[Path]
) -> list[dict]:
    """Returns the measures of the `cells`, folders of runs, whose seed the baseline has run,
    too: their `numbers`, and those that are relative to it.
    """
    base = {folder.name: numbers[folder]["rows"] for folder in baseline}
    return [
        numbers[folder] | compare_to_baseline(numbers[folder]["rows"], base[folder.name])
        for folder in cells
        if folder.name in base
    ]


def pair_key(run: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what two runs must share to be compared seed by seed: the seed and the data."""
    return run.get("seed"), run.get("data_id")


def add_baseline(sets: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns sets of runs (see `compare.merge_seeds`) whose runs have the measures `RELATIVE`
    beside the run of their seed, on the same data, in the set called `name`, by its label or
    algorithm; without such a run they have none of them.

    Raises InputError unless there is one such set, with one run for each seed and data.
    """
    chosen = [one for one in sets if name in (one["label"], one["algorithm"])]
    if len(chosen) != 1:
        labels = ", ".join(one["label"] for one in sets)
        raise InputError(f"--baseline {name}: must name one of the sets of runs: {labels}")
    members = [run for run in chosen[0]["members"] if run["rows"]]
    base = {pair_key(run): run["rows"] for run in members}
    if len(base) < len(members):
        seeds = " ".join(str(run.get("seed")) for run in members)
        raise InputError(
            f"--baseline {name}: holds a seed more than once (seeds {seeds}); name its folders, one"
            " for each seed"
        )

    def beside(run: dict[str, Any]) -> dict[str, Any]:
        rows = base.get(pair_key(run))
        return run | compare_to_baseline(run["rows"], rows) if rows else run

    return [one | {"members": [beside(run) for run in one["members"]]} for one in sets]
