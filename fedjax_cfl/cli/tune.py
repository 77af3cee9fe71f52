"""Chooses settings on validation samples and tests the chosen ones once.

Trials train every combination of the values given, on two seeds, and are scored on samples that
were set apart from each client's training (`evaluate.validation`), of all clients or, with
`evaluate.validation_clients`, of clients that took no part: no trial reads a test sample.
The combination with the best mean is then trained on other seeds and tested. Nobody trains on
the samples set apart, in the last runs neither, so that clients keep their sizes.
"""

import argparse
import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cfl.analysis.tables import MEASURES, fit_digits, format_number, print_table
from fedjax_cfl.analysis.trials import (
    CHOSEN_FILE,
    LAST_RUNS,
    TIE,
    TRIALS,
    Trial,
    choose,
    describe,
    read_trials,
)
from fedjax_cfl.errors import InputError, RunError, SaidBefore, parse_arguments
from fedjax_cfl.formatting import escape_markup
from fedjax_cfl.runs.regular_files import read_regular, refuse_damage
from fedjax_cfl.runs.results import write_columns, write_json, write_text
from fedjax_cfl.runs.run_dir import make_dir
from fedjax_cfl.scores import ACCURACY
from fedjax_cfl.validation import Seed, check_value

TRIAL_SEEDS, SEEDS = (1000, 1001), (0, 1, 2)
OWN = ("evaluate.validation", "evaluate.part", "seed", "seeds", "run_dir", "hydra.sweep.dir")


def tune(
    overrides: list[str],
    out: str | Path,
    share: float = 0.2,
    trial_seeds: tuple[int, ...] = TRIAL_SEEDS,
    seeds: tuple[int, ...] = SEEDS,
    quiet: bool = False,
) -> dict[str, Any]:
    """Runs trials, then the chosen combination; prints and writes trials.csv and chosen.json, which
    is returned. A second call goes on where the first stopped.

    Args: `overrides` as for a sweep, KEY=V1,V2; `out` is a folder; `share` of each client's
    training samples is set apart; `trial_seeds` are those of the trials, `seeds` those of the last
    runs; `quiet`: what runs print goes to files beside theirs. Raises InputError for settings that
    are this function's own, for seeds that are not allowed, and where no trial is finite.
    """
    check_seeds("--trial-seeds", trial_seeds)
    check_seeds("--seeds", seeds)
    out, names = Path(out), [text.lstrip("+~").partition("=")[0] for text in overrides]
    for name in names:
        if name in OWN:
            raise InputError(f"{name}: is set by tune itself; see fedjax-cfl tune --help")

    trials_of = ",".join(map(str, trial_seeds))
    check_folder(out, [*overrides, f"--share={share}", f"--trial-seeds={trials_of}"])
    more = [f"evaluate.validation={share}"] + ["curves=false"] * ("curves" not in names)
    trials = run_part(out / TRIALS, [*overrides, *more], trial_seeds, quiet)
    best = choose(trials)
    # a setting that was given as +KEY is none of the configuration, and is given as +KEY again
    keys = dict(zip(names, (text.partition("=")[0] for text in overrides), strict=True))
    fixed = [text for text, name in zip(overrides, names, strict=True) if name not in best.settings]
    fixed += [f"{keys[name]}={value}" for name, value in best.settings.items()]
    (final,) = run_part(out / LAST_RUNS, [*fixed, *more], seeds, quiet)
    chosen = {
        "given": overrides,
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
    write_json(out / CHOSEN_FILE, chosen)
    show(trials, best, final)
    print(f"wrote trials.csv and chosen.json in {out}")
    return chosen


def check_folder(out: Path, asked: list[str]) -> None:
    """Notes in begun.txt what trials are asked for, all but the seeds of the last runs. Raises
    InputError where there are trials of anything else: runs would go on with more rounds.
    """
    path = make_dir(out) / "begun.txt"
    if (out / TRIALS).exists() and path.exists():
        with refuse_damage(path):
            before = read_regular(path).decode().splitlines()
        if before != asked:
            raise InputError(f"{out}: was begun with {' '.join(before)}; use another --out")
    write_text(path, "\n".join(asked) + "\n")


def run_part(
    folder: Path, overrides: list[str], seeds: tuple[int, ...], quiet: bool
) -> list[Trial]:
    """Runs a sweep in a folder, whose name is what it is scored on, and reads it; `quiet`: what it
    prints goes to a file beside the folder. Raises RunError where not all runs have ended, and
    SaidBefore where one was refused: its line has been printed.
    """
    from fedjax_cfl.cli.main import run_arguments  # it imports the verbs

    overrides = [*overrides, f"evaluate.part={folder.name}", f"hydra.sweep.dir={folder}"]
    with contextlib.ExitStack() as files:
        if quiet:
            folder.parent.mkdir(parents=True, exist_ok=True)
            log = files.enter_context(folder.with_suffix(".log").open("a", encoding="utf-8"))
            files.enter_context(contextlib.redirect_stdout(log))
        status = run_arguments(["-m", *overrides, f"seed={','.join(map(str, seeds))}"])
    if status == 2:
        raise SaidBefore(f"{folder}: a run was refused; a line above says why")
    if status:
        raise RunError(f"{folder}: not all runs have ended; the same command goes on")
    return read_trials(folder)


def split_method(method: str) -> list[str]:
    """Returns the settings of a method with its layers: flexcfl+ditto, or ifca+scaffold+ditto; or
    of a function of the user's own, mine.sticky_ifca, whose m is dataset.groups. Raises InputError
    for one that cannot be imported.
    """
    algorithm, *layers = method.split("+")
    chosen = [f"algorithm={algorithm}"]
    if "." in algorithm:
        from fedjax_cfl.cli.settings import resolve_target  # it imports JAX

        takes = inspect.signature(resolve_target("algorithm", algorithm)).parameters
        chosen = ["algorithm=fedavg", f"algorithm._target_={algorithm}"]
        chosen += ["algorithm.m=${dataset.groups}"] if "m" in takes else []
    personal = layers[0] if len(layers) == 1 else f"[{','.join(layers)}]"
    more = [f"personal={personal}", f"algorithm.name={method}"] if layers else []
    return [*chosen, *more]


def tune_methods(
    methods: Sequence[str], overrides: list[str], out: str | Path, **options: Any
) -> dict[str, dict[str, Any]]:
    """Tunes each method by itself, in a folder of its name in `out`; returns what `tune` does of
    each. The others are those of `tune`.
    """
    return {
        method: tune([*split_method(method), *overrides], Path(out) / method, **options)
        for method in methods
    }


def check_seeds(name: str, seeds: tuple[int, ...]) -> None:
    """Raises InputError for seeds that no run has, or that are named twice: the last runs come
    only after all trials.
    """
    for seed in seeds:
        check_value(name, seed, Seed)
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{name} {','.join(map(str, seeds))}: names a seed twice")


def show(trials: list[Trial], best: Trial, final: Trial) -> None:
    """Prints the trials, the chosen one first, and what that is worth on test samples."""
    kind = best.kind
    column = fit_digits(MEASURES[f"macro_{kind.name}"], [trial.mean for trial in trials])
    sign = -1 if kind.higher else 1
    lines = []
    for trial in sorted(trials, key=lambda t: (t is not best, t.nonfinite > 0, sign * t.mean)):
        values = map(escape_markup, trial.settings.values() or ["all as given"])
        mean = format_number(trial.mean, column) + "%" * kind.percent
        lines.append([*values, mean, f"{np.mean(trial.units):,.0f}", f"{trial.nonfinite:,}"])
    header = [*(best.settings or ["settings"]), "validation", "models sent", "not finite"]
    title = f"{kind.words}, mean over clients, the chosen one first"
    print_table(title, header, *lines, where="in trials.csv")
    if spoilt := sum(trial.nonfinite > 0 for trial in trials):
        print(
            f"{spoilt} of {len(trials)} trials had updates of clients that were not finite: they"
            " come last"
        )
    near = f"{100 * TIE:g} {'points' if kind.percent else '%'}"
    print(f"chosen: of those within {near} of the best the one that sends fewest models")
    for name, value in best.settings.items():
        print_edge(name, value, [trial.settings.get(name, "") for trial in trials])
    sd = f" ± {kind.format(float(np.std(final.scores, ddof=1)))}" if len(final.scores) > 1 else ""
    over = f"{len(final.scores)} seeds, mean over clients and the last tenth of tests"
    print(f"test: {kind.format(final.mean)}{sd} over {over}")


def print_edge(name: str, chosen: str, tried: list[str]) -> None:
    """Says that of at least three numbers tried the first or the last was chosen."""
    try:
        values = sorted({float(value) for value in tried})
    except ValueError:
        return
    if len(values) > 2 and (number := float(chosen)) in (values[0], values[-1]):
        end, more = ("smallest", "smaller") if number == values[0] else ("largest", "larger")
        print(f"{name}={chosen} is the {end} that was tried; a {more} one may be better")


def read_seeds(text: str) -> tuple[int, ...]:
    """Returns the numbers of "0,1,2"."""
    return tuple(int(part) for part in text.split(","))


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl tune [--out DIR] [--share S] [--seeds N ...] KEY=V1,V2 ...`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl tune", description=__doc__)
    parser.add_argument("settings", nargs="+", metavar="KEY=V1,V2", help="as for a sweep")
    parser.add_argument("--out", default="tune", metavar="DIR", help="default: tune")
    parser.add_argument("--share", type=float, default=0.2, help="set apart; default: 0.2")
    parser.add_argument("--methods", metavar="A,B+C", help="tune each by itself, in its own folder")
    parser.add_argument("--trial-seeds", type=read_seeds, default=TRIAL_SEEDS, metavar="N,N")
    parser.add_argument("--seeds", type=read_seeds, default=SEEDS, metavar="N,N")
    given = parse_arguments(parser, argv)
    if not 0 < given.share < 1:
        raise InputError(f"--share {given.share}: must be above 0 and below 1")
    options = {"share": given.share, "trial_seeds": given.trial_seeds, "seeds": given.seeds}
    if given.methods:
        tune_methods(given.methods.split(","), given.settings, given.out, **options)
    else:
        tune(given.settings, given.out, **options)
    return 0
