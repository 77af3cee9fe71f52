"""The trials of `fedjax-cfl tune`, read from the folder that it wrote, and the choice of one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedjax_cfl.analysis.runs import read_run
from fedjax_cfl.analysis.tables import list_records
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.results import INDEX_FILE
from fedjax_cfl.scores import ACCURACY, Score, score_of

CHOSEN_FILE, TRIALS, LAST_RUNS = "chosen.json", "validation", "test"
# of two scores so near the one with less traffic is taken: an accuracy, or a share of an RMSE
TIE = 0.002
LAST = 0.1  # of a run's tests, whose mean is its score


class Trial(NamedTuple):
    """One combination of the values tried, over its seeds."""

    settings: dict[str, str]
    scores: list[float]  # of each seed, accuracy or RMSE
    units: list[float]  # models sent
    kind: Score = ACCURACY
    nonfinite: int = 0  # updates of clients that were not finite, of all seeds

    @property
    def mean(self) -> float:
        """The mean score; the worst of all where a run was not finite."""
        found = float(np.mean(self.scores))
        worst = -np.inf if self.kind.higher else np.inf
        return found if np.isfinite(found) else worst


def list_runs(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields the run directories of a sweep, also of sweeps of grids, each with the settings
    that vary.
    """
    index = pd.read_csv(folder / INDEX_FILE, dtype=str, keep_default_na=False)
    for row in list_records(index):
        path = folder / row.pop("run")
        inner = list_runs(path) if (path / INDEX_FILE).is_file() else [(path, {})]
        for run_dir, settings in inner:
            yield run_dir, row | settings


def read_trials(folder: Path) -> list[Trial]:
    """Returns the runs of a sweep, those together that differ in nothing but the seed. Settings
    have their names without the + of those that the configuration has not.
    """
    found: dict[tuple, Trial] = {}
    for run_dir, settings in list_runs(folder):
        settings = {name.lstrip("+"): value for name, value in settings.items()}
        settings.pop("seed", None)
        run = read_run(run_dir)
        empty = Trial(settings, [], [], score_of(run["rows"]))
        trial = found.setdefault(tuple(settings.items()), empty)
        met = f"validation_clients_macro_{trial.kind.name}"  # of clients held out, where there are
        value = run[met] if met in run else score(run["rows"])
        trial.scores.append(float("nan") if value is None else value)
        trial.units.append(run["units"] or 0.0)
        lost = trial.nonfinite + run["nonfinite_clients"]
        found[tuple(settings.items())] = trial._replace(nonfinite=lost)
    return list(found.values())


def score(rows: list[dict[str, Any]]) -> float:
    """Returns the mean score over clients, each counted once, of the last tenth of the tests, or in
    the round that a run has chosen; NaN where there is none.
    """
    name = f"macro_{score_of(rows).name}"
    chosen = rows[-1].get("chosen_round") if rows else None
    if chosen is not None:
        rows = [row for row in rows if row["round"] == chosen]
    tests = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(tests[-max(1, round(LAST * len(tests))) :])) if tests else float("nan")


def choose(trials: list[Trial]) -> Trial:
    """Returns the best trial: of those within `TIE` of the best mean the one that sends least,
    then the first. One with updates that were not finite is taken only where all have some: its
    models are those of the clients that were left. Raises InputError where no mean is finite, and
    for trials of several tasks.
    """
    kind = trials[0].kind
    if any(trial.kind is not kind for trial in trials):
        raise InputError("task: trials are compared by one score; give one value")
    sound = [trial for trial in trials if not trial.nonfinite]
    trials = sound if any(np.isfinite(trial.mean) for trial in sound) else trials
    top = kind.pick_best(trial.mean for trial in trials)
    if not np.isfinite(top):
        raise InputError(f"tune: no trial has a finite {kind.words}; try a smaller local.lr")
    least = top - TIE if kind.higher else top * (1 + TIE)
    near = [trial for trial in trials if not kind.is_better(least, trial.mean)]
    return min(near, key=lambda trial: np.mean(trial.units))


def describe(trial: Trial) -> dict[str, Any]:
    """Returns a trial as a row of trials.csv."""
    spread = float(np.std(trial.scores, ddof=1)) if len(trial.scores) > 1 else None
    own = {f"validation_{trial.kind.name}": trial.mean, "sd": spread, "seeds": len(trial.scores)}
    sent = {"units": float(np.mean(trial.units)), "nonfinite_clients": trial.nonfinite}
    return trial.settings | own | sent
