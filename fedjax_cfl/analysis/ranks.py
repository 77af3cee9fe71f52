"""Ranks of methods over settings: means with bootstrap intervals, and what tests say of them.
`fedjax-cfl rank CELLS.csv` writes them of any table of scores.

A setting is a data set with its drift; the scores of its seeds are averaged before they are
ranked. Of the best the rank is 1; methods that score the same share the mean of their ranks.
A cell is the scores of one method in one setting, a line of the CSV.
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from fedjax_cfl.analysis import statistics, tables
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_markdown
from fedjax_cfl.runs.results import write_columns, write_text
from fedjax_cfl.runs.run_dir import check_writable, common_folder

INTERVAL = 0.9  # level of the intervals of mean ranks
LEVEL = 0.05  # of the critical difference
FORM = "expected a cells.csv of cflbench, or columns setting, method, score (or scores, of seeds)"


class Scores(NamedTuple):
    """The methods that are ranked, in which settings, and their scores."""

    settings: list[str]
    methods: list[str]
    of_seeds: list[np.ndarray]  # of each setting [seeds, methods]
    missed: list[str]  # methods that did not run in all of these, and settings begun

    @property
    def means(self) -> np.ndarray:
        """Mean scores over seeds [settings, methods]."""
        return np.stack([each.mean(0) for each in self.of_seeds])


# cells


def read_cells(path: Path, where: str = "") -> list[dict[str, Any]]:
    """Returns the lines of a CSV file of cells: `score`, NaN where a run was not finite, `sd`,
    `seeds` and the `scores` of seeds, [] where it has none; other columns as texts. `where` begins
    messages. Raises InputError for a file that is none, numbers that are not finite or do not fit
    one another, and a cell that stands there twice.
    """
    where = where or str(path)
    try:
        if not path.is_file():  # a device may never end
            raise ValueError("no such file")
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        reason = " ".join(str(error).split())
        raise InputError(f"{where}: cannot be read ({reason}); {FORM}") from None
    for names in (["setting"], ["method"], ["score", "scores"]):
        if not {*names} & {*table}:
            raise InputError(f"{where}: has no column {' or '.join(names)}, {FORM}")
    repeated, cells = table.duplicated(["setting", "method"]), []
    for number, line in enumerate(table.to_dict("records")):
        try:
            cells.append(check_cell(line))
            if repeated[number]:
                raise ValueError(f"{line['setting']}, {line['method']} is there already")
        except ValueError as error:
            raise InputError(f"{where}, line {number + 2}: {error}") from None
    return cells


def read_number(name: str, text: str, low: float = -math.inf) -> float:
    """Returns a finite number >= `low`. Raises ValueError for what is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= low):
        least = "" if low == -math.inf else f" >= {low:g}"
        raise ValueError(f"{name} {text!r}: must be a finite number{least}")
    return value


def check_cell(line: dict[Any, str]) -> dict[str, Any]:
    """Returns a line of a file of cells, of which score, sd, seeds and scores are numbers. Raises
    ValueError where they are none or do not fit one another.
    """
    texts = line.get("scores", "").split()
    scores = [math.nan if text == "nan" else read_number("scores", text) for text in texts]
    count = line.get("seeds") or str(len(scores) or ("" if "seeds" in line else 1))
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"seeds {count!r}: must be a whole number >= 1")
    seeds = int(count)
    if len(scores) not in (0, seeds):
        raise ValueError(f"scores {line['scores']}: as many as seeds, {seeds}, or none")
    score = read_number("score", line["score"]) if line.get("score") else math.nan
    sd = read_number("sd", line["sd"], 0.0) if line.get("sd") else None
    if scores:
        mean, of_seeds = float(np.mean(scores)), pd.Series(scores).std(skipna=False)
        for name, stated, value in (("score", score, mean), ("sd", sd, of_seeds)):
            if line.get(name) and not math.isclose(stated or 0.0, value, abs_tol=1e-6):
                raise ValueError(f"{name} {line[name]}: of scores {line['scores']} it is {value:g}")
        score = mean
    return line | {"score": score, "sd": sd, "seeds": seeds, "scores": scores}


def collect_scores(cells: Sequence[dict[str, Any]], own: Sequence[str] = ()) -> Scores:
    """Returns the scores of the methods that ran in all settings, over the seeds that all of them
    have, the first ones; in a setting where one has no scores of seeds, the means of all. A run
    that is not finite in the end has the score 0. A setting with less than half as many methods as
    another has been begun, and does not count yet; where methods `own` have run in some, the others
    do not count.
    """
    placed = {(cell["setting"], cell["method"]): cell for cell in cells}
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    counts = Counter(cell["setting"] for cell in cells)
    settings = [name for name, count in counts.items() if 2 * count >= max(counts.values())]
    own = [method for method in own if method in methods]
    settings = [s for s in settings if all((s, method) in placed for method in own)] or settings
    kept = [m for m in methods if all((setting, m) in placed for setting in settings)]
    of_seeds = []
    for setting in settings if kept else ():
        here = [placed[setting, method] for method in kept]
        seeds = min(len(cell["scores"]) for cell in here)
        found = np.array([cell["scores"][:seeds] or [cell["score"]] for cell in here]).T
        of_seeds.append(np.nan_to_num(found, nan=0.0))
    missed = [name for name in (*methods, *counts) if name not in (*kept, *settings)]
    return Scores(settings, kept, of_seeds, missed)


def rank_settings(means: np.ndarray) -> np.ndarray:
    """Returns the ranks [N, k] of k methods in N settings, by their mean scores [N, k]."""
    return pd.DataFrame(-means).rank(axis=1).to_numpy()


def rank_methods(scores: Sequence[np.ndarray]) -> pd.DataFrame:
    """Returns of each method its `mean_rank` over settings, its interval `low` to `high` of level
    `INTERVAL` from a hierarchical bootstrap (Davison and Hinkley 1997, section 3.8), where settings
    are drawn, then seeds within each, of all methods the same, and `share_first`, the share of the
    resamples in which no method has a smaller one. `scores` of each setting are [seeds, methods],
    the higher the better.

    Of one setting and one seed there is nothing to be drawn: the interval is its ranks. Of few
    settings it is too narrow.
    """
    rng = np.random.default_rng(0)
    count = len(scores)
    chosen = rng.integers(count, size=(statistics.RESAMPLES, count))
    drawn = np.zeros((statistics.RESAMPLES, scores[0].shape[1]))
    for place in range(count):
        for setting, own in enumerate(scores):
            here = chosen[:, place] == setting
            picked = rng.integers(len(own), size=(here.sum(), len(own)))
            drawn[here] += rank_settings(own[picked].mean(1)) / count
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    first = (drawn <= drawn.min(1, keepdims=True)).mean(0)
    mean = rank_settings(np.stack([each.mean(0) for each in scores])).mean(0)
    return pd.DataFrame({"mean_rank": mean, "low": low, "high": high, "share_first": first})


def friedman(means: np.ndarray) -> float | None:
    """Returns Friedman's chance of ranks [N, k] that differ as much if all methods were alike;
    None for fewer than three methods or two settings.
    """
    settings, methods = means.shape
    if settings < 2 or methods < 3:
        return None
    away = rank_settings(means) - (methods + 1) / 2
    if not away.any():
        return 1.0
    # the spread of mean ranks in units of that of the ranks within settings, which ties make less
    spread = settings**2 * (away.mean(0) ** 2).sum() * (methods - 1) / (away**2).sum()
    return float(special.chdtrc(methods - 1, spread))


def critical_difference(methods: int, settings: int) -> float:
    """Returns by how much mean ranks of two of `methods` must differ over `settings` to be told
    apart at `LEVEL` (Nemenyi; Demsar 2006, section 3.2.2).
    """
    largest = np.linspace(-9, 9, 3601)  # of as many normal numbers as methods
    density = methods * np.exp(-(largest**2) / 2) / np.sqrt(2 * np.pi)
    low, high = 0.0, 18.0  # their range is below it with the chance 1 - LEVEL
    for _ in range(50):
        middle = (low + high) / 2
        others = special.ndtr(largest) - special.ndtr(largest - middle)
        within = np.trapezoid(density * others ** (methods - 1), largest)
        low, high = (middle, high) if within < 1 - LEVEL else (low, middle)
    return float(low * np.sqrt(methods * (methods + 1) / (12 * settings)))


def compare_with(means: np.ndarray, baseline: int) -> np.ndarray:
    """Returns the chance [k] of Wilcoxon's signed-rank test, exact, of each method's differences
    from the method `baseline` over settings, corrected by Holm (1979); NaN for itself.

    `means` [N, k]. Of N settings no chance is below 2 / 2^N before the correction.
    """
    gaps = [statistics.subtract(own, means[:, baseline]) for own in means.T]
    # the ranks of differences by their size, with their signs; those of 0 do not count
    signed = [np.sign(g) * (pd.Series(np.abs(g)).rank() - (g == 0).sum()) for g in gaps]
    chances = np.array([statistics.find_chance(each) for each in signed])
    chances[baseline] = np.nan
    return statistics.correct_holm(chances)


def list_differences(
    cells: Sequence[dict[str, Any]], against: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the lines of differences.csv: the scores of each cell minus those of methods
    `against` and of the best in its setting, seed by seed. `low` to `high` is the bootstrap
    interval of `bootstrap_mean`, `p` the chance of `find_chance`: of three seeds never below 0.25.
    Where one of the two has no scores of seeds there is the mean alone.
    """
    lines = []
    for setting in dict.fromkeys(cell["setting"] for cell in cells):
        here = {cell["method"]: cell for cell in cells if cell["setting"] == setting}
        best = max(here, key=lambda method: np.nan_to_num(here[method]["score"], nan=0.0))
        named = [name for name in dict.fromkeys([*against, best]) if name in here]
        for method, minus in itertools.product(here, named):
            if minus == method:
                continue
            cell, other = here[method], here[minus]
            shared = min(len(cell["scores"]), len(other["scores"]))
            sides = [np.nan_to_num(each["scores"][:shared], nan=0.0) for each in (cell, other)]
            gaps = statistics.subtract(*sides)
            mean, low, high, _ = statistics.bootstrap_mean(
                gaps if shared else [cell["score"] - other["score"]]
            )
            line = {"setting": setting, "method": method, "minus": minus, "best": minus == best}
            line |= {"seeds": shared, "mean": mean, "low": low, "high": high}
            lines.append(line | {"p": statistics.find_chance(gaps)})
    return lines


def list_ranks(scores: Scores, ranked: pd.DataFrame, baseline: str | None) -> list[dict[str, Any]]:
    """Returns the lines of ranks.csv, the best first; `ranked` is that of `rank_methods`."""
    means, methods = scores.means, scores.methods
    table = pd.DataFrame({"method": methods}).join(ranked).assign(mean_score=means.mean(0))
    place = methods.index(baseline) if baseline in methods else None
    theirs = np.nan if place is None else means[:, [place]]
    table["minus_baseline"] = (means - theirs).mean(0)
    table["minus_best"] = (means - means.max(1, keepdims=True)).mean(0)
    table["p_wilcoxon_holm"] = np.nan if place is None else compare_with(means, place)
    return tables.list_records(table.sort_values("mean_rank", kind="stable"))


def format_ranks(
    title: str, scores: Scores, rows: list[dict[str, Any]], baseline: str | None
) -> str:
    """Returns ranks.md."""
    count, settings = len(scores.methods), len(scores.settings)
    several = settings > 1  # of one setting tests say nothing
    over = f"{settings} settings" if several else "one setting"
    alone = sum(len(each) == 1 for each in scores.of_seeds)
    drawn = "settings and seeds"
    drawn += f" (in {alone} of them each method has one score, its mean)" if alone else ""
    lines = [
        f"# {title}: mean ranks\n",
        f"Over {over} ({', '.join(scores.settings)}), of {count} methods; brackets:"
        f" {INTERVAL:.0%} of a bootstrap over {drawn}. First: in so many of its"
        f" resamples. Against {baseline}: mean difference in points"
        + (", and Wilcoxon's chance after Holm's correction." if several else ".")
        + " Against the best: of these methods, in each setting.",
    ]
    if (chance := friedman(scores.means)) is not None:
        lines.append(f"Friedman's test of equal ranks: p = {chance:.2g}.")
    if several:
        apart = f"{critical_difference(count, settings):.2f}"
        lines.append(f"Mean ranks less than {apart} apart do not differ at {LEVEL:.0%} (Nemenyi).")
    if scores.missed:
        lines.append(f"Not ranked, for they are not complete: {', '.join(scores.missed)}.")
    headings = ["method", "mean rank", "first", f"against {baseline}", *(["p"] if several else [])]
    headings.append("against the best")
    table = []
    for row in rows:
        gap, p = row["minus_baseline"], row["p_wilcoxon_holm"]
        shown = [
            row["method"],
            f"{row['mean_rank']:.1f} [{row['low']:.1f}, {row['high']:.1f}]",
            f"{row['share_first']:.0%}",
            "-" if gap is None else f"{100 * gap:+.1f}",
            *(["-" if p is None else f"{p:.2g}"] if several else []),
            f"{100 * row['minus_best']:+.1f}",
        ]
        table.append([escape_markdown(text) for text in shown])
    return "\n".join([*lines, "", tables.format_markdown(headings, *table)])


def write_ranks(
    cells: Sequence[dict[str, Any]],
    out: Path,
    title: str,
    baseline: str | None = None,
    own: Sequence[str] = (),
) -> tuple[Scores, pd.DataFrame] | None:
    """Writes ranks.csv and ranks.md of cells into the folder `out`; returns what they are made of,
    None, and writes nothing, where fewer than two methods ran in the same settings.
    """
    scores = collect_scores(cells, own)
    if len(scores.methods) < 2:
        return None
    ranked = rank_methods(scores.of_seeds)
    rows = list_ranks(scores, ranked, baseline)
    write_columns(out / "ranks.csv", rows)
    write_text(out / "ranks.md", format_ranks(title, scores, rows, baseline))
    return scores, ranked


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl rank CELLS.csv... [--out DIR] [--baseline METHOD] [--against METHOD...]`."""
    parser = argparse.ArgumentParser(
        prog="fedjax-cfl rank",
        description="Rank methods over settings: mean ranks with intervals, tests, differences.",
    )
    parser.add_argument(
        "cells",
        nargs="+",
        type=Path,
        metavar="CELLS.csv",
        help="columns setting, method, score, the higher the better, or scores, those of seeds with"
        " spaces between them; one that is empty or nan counts as 0; of a cell in several files"
        " the first counts",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the folder of the files")
    parser.add_argument("--baseline", metavar="METHOD", help="test all methods against this one")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="of differences.csv: differences from these, beside those from the best",
    )
    options = parse_arguments(parser, argv)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in options.cells:
        for cell in read_cells(path):
            found.setdefault((cell["setting"], cell["method"]), cell)
    cells = list(found.values())
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    for flag, names in (("--baseline", [options.baseline]), ("--against", options.against)):
        if unknown := [name for name in names if name not in (None, *methods)]:
            raise InputError(f"{flag} {unknown[0]}: no such method; {', '.join(methods)}")
    out = options.out or common_folder([path.parent for path in options.cells])
    check_writable(out, f"--out={out}")
    out.mkdir(parents=True, exist_ok=True)
    names = ", ".join(path.name for path in options.cells)
    if write_ranks(cells, out, names, options.baseline) is None:
        raise InputError(f"{names}: no two methods that have the same settings")
    write_columns(out / "differences.csv", list_differences(cells, options.against))
    print((out / "ranks.md").read_text(encoding="utf-8"))
    print(f"wrote ranks.csv, ranks.md and differences.csv in {out}")
    return 0
