"""Chooses settings on validation samples and tests the chosen ones once: `fedjax-cfl tune`.

Trials train every combination of the values given, on two seeds, and are scored on samples that
were set apart from each client's training (`evaluate.validation`): no trial reads a test sample.
The combination with the best mean is then trained on other seeds and tested. Nobody trains on
the samples set apart, in the last runs neither, so that clients keep their sizes.
"""

import argparse
import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_cfl.analysis.compare_inputs import read_run
from fedjax_cfl.analysis.compare_outputs import print_table
from fedjax_cfl.cli.sweep import INDEX_FILE
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_markup
from fedjax_cfl.runs.results import write_columns, write_json
from fedjax_cfl.scores import ACCURACY, Score, score_of

# of two scores so near the one with less traffic is taken: an accuracy, or a share of an RMSE
TIE = 0.002
LAST = 0.1  # of a run's tests, whose mean is its score
TRIAL_SEEDS, SEEDS = (1000, 1001), (0, 1, 2)
OWN = ("evaluate.validation", "evaluate.part", "seed", "seeds", "run_dir", "hydra.sweep.dir")


class Trial(NamedTuple):
    """One combination of the values tried, over its seeds."""

    settings: dict[str, str]
    scores: list[float]  # of each seed, accuracy or RMSE
    units: list[float]  # models sent
    kind: Score = ACCURACY

    @property
    def mean(self) -> float:
        """The mean score; the worst of all where a run was not finite."""
        found = float(np.mean(self.scores))
        worst = -np.inf if self.kind.higher else np.inf
        return found if np.isfinite(found) else worst


def tune(
    overrides: list[str],
    out: str | Path,
    share: float = 0.2,
    trial_seeds: tuple[int, ...] = TRIAL_SEEDS,
    seeds: tuple[int, ...] = SEEDS,
) -> dict[str, Any]:
    """Runs trials, then the chosen combination; prints and writes trials.csv and chosen.json, which
    is returned. A second call goes on where the first stopped.

    Args: `overrides` as for a sweep, KEY=V1,V2; `out` is a folder; `share` of each client's
    training samples is set apart; `trial_seeds` are those of the trials, `seeds` those of the last
    runs. Raises InputError for settings that are this function's own, and where no trial is finite.
    """
    from fedjax_cfl.cli.main import run_arguments  # it imports the verbs

    out, names = Path(out), [text.lstrip("+~").partition("=")[0] for text in overrides]
    for name in names:
        if name in OWN:
            raise InputError(f"{name}: is set by tune itself; see fedjax-cfl tune --help")

    def run(part: str, chosen: list[str], seeds: tuple[int, ...]) -> list[Trial]:
        folder = out / part
        own = [f"evaluate.validation={share}", f"evaluate.part={part}", f"hydra.sweep.dir={folder}"]
        run_arguments(["-m", *chosen, *own, f"seed={','.join(map(str, seeds))}"])
        return read_trials(folder)

    trials = run("validation", overrides, trial_seeds)
    best = choose(trials)
    fixed = [text for text, name in zip(overrides, names, strict=True) if name not in best.settings]
    fixed += [f"{name}={value}" for name, value in best.settings.items()]
    (final,) = run("test", fixed, seeds)
    chosen = {
        "chosen": best.settings,
        f"validation_{best.kind.name}": best.mean,
        "trials": len(trials),
        "validation_share": share,
        "trial_seeds": trial_seeds,
        "seeds": seeds,
        f"test_{best.kind.name}": final.mean,
        "test_accuracies" if best.kind is ACCURACY else f"test_{best.kind.name}s": final.scores,
        "overrides": fixed,
    }
    write_columns(out / "trials.csv", [describe(trial) for trial in trials])
    write_json(out / "chosen.json", chosen)
    show(trials, best, final)
    print(f"wrote trials.csv and chosen.json in {out}")
    return chosen


def read_trials(folder: Path) -> list[Trial]:
    """Returns the runs of a sweep, those together that differ in nothing but the seed."""
    with (folder / INDEX_FILE).open(newline="") as text:
        index = list(csv.DictReader(text))
    found: dict[tuple, Trial] = {}
    for row in index:
        settings = {name: value for name, value in row.items() if name not in ("run", "seed")}
        run = read_run(folder / row["run"], None)
        empty = Trial(settings, [], [], score_of(run["rows"]))
        trial = found.setdefault(tuple(settings.items()), empty)
        trial.scores.append(score(run["rows"]))
        trial.units.append(run["units"] or 0.0)
    return list(found.values())


def score(rows: list[dict[str, Any]]) -> float:
    """Returns the mean score over clients, each counted once, of the last tenth of the tests;
    NaN where there is none.
    """
    name = f"macro_{score_of(rows).name}"
    tests = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(tests[-max(1, round(LAST * len(tests))) :])) if tests else float("nan")


def choose(trials: list[Trial]) -> Trial:
    """Returns the best trial: of those within `TIE` of the best mean the one that sends least,
    then the first. Raises InputError where none is finite, and for trials of several tasks.
    """
    kind = trials[0].kind
    if any(trial.kind is not kind for trial in trials):
        raise InputError("task: trials are compared by one score; give one value")
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
    return trial.settings | own | {"units": float(np.mean(trial.units))}


def show(trials: list[Trial], best: Trial, final: Trial) -> None:
    """Prints the trials, the chosen one first, and what that is worth on test samples."""
    kind = best.kind
    sign = -1 if kind.higher else 1
    lines = [
        [
            *(trial.settings.values() or ["all as given"]),
            trial.kind.format(trial.mean),
            f"{np.mean(trial.units):,.0f}",
        ]
        for trial in sorted(trials, key=lambda trial: (trial is not best, sign * trial.mean))
    ]
    lines = [[escape_markup(text) for text in line] for line in lines]
    header = [*(best.settings or ["settings"]), "validation", "models sent"]
    print_table(f"{kind.words}, mean over clients, the chosen one first", header, *lines)
    sd = f" ± {kind.format(float(np.std(final.scores, ddof=1)))}" if len(final.scores) > 1 else ""
    print(f"test: {kind.format(final.mean)}{sd} over {len(final.scores)} seeds, mean over clients")


def read_seeds(text: str) -> tuple[int, ...]:
    """Returns the numbers of "0,1,2"."""
    return tuple(int(part) for part in text.split(","))


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl tune [--out DIR] [--share S] [--seeds N ...] KEY=V1,V2 ...`."""
    parser = argparse.ArgumentParser(
        prog="fedjax-cfl tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="+", metavar="KEY=V1,V2", help="as for a sweep")
    parser.add_argument("--out", default="tune", metavar="DIR", help="default: tune")
    parser.add_argument("--share", type=float, default=0.2, help="set apart; default: 0.2")
    parser.add_argument("--trial-seeds", type=read_seeds, default=TRIAL_SEEDS, metavar="N,N")
    parser.add_argument("--seeds", type=read_seeds, default=SEEDS, metavar="N,N")
    given = parse_arguments(parser, argv)
    if not 0 < given.share < 1:
        raise InputError(f"--share {given.share}: must be above 0 and below 1")
    tune(given.settings, given.out, given.share, given.trial_seeds, given.seeds)
    return 0
