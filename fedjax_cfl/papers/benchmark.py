"""What a table of methods by settings says as a whole: cells.csv with all that was measured,
differences.csv, ranks.csv, ranks.md and figure.png.

A setting is a row of the table that has runs of its own, its score the measure of that row. A cell
is a line of cells.csv, of runs in this folder or read from the cells.csv of others.
"""

import csv
import itertools
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from fedjax_cfl.analysis import ranks, trials
from fedjax_cfl.analysis.plot import (
    escape_plot_lines,
    format_percent_axis,
    new_figure,
    save_figure,
    style_axes,
)
from fedjax_cfl.analysis.statistics import bootstrap_mean, find_chance
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import escape_markdown, escape_plot
from fedjax_cfl.papers.cells import read_named, row_columns
from fedjax_cfl.papers.report import cell_measure, read_measures, row_title
from fedjax_cfl.runs.results import to_plain, write_columns, write_text

# of cells.csv: its columns, and where a run has them
MEASURED = {
    "worst10": "worst10_accuracy",
    "finetuned": "finetuned_accuracy",
    "new_clients": "new_clients_accuracy",
    "ari": "ari",
    "megabytes": "megabytes",
    "local_steps": "local_steps",
    "train_s": "train_s",
    "sim_time_s": "sim_time_s",
}
NUMBERS = ("score", "sd", *MEASURED, "best_minus_median")
COLUMNS = ("setting", "method", "seeds", "rounds", "measure", "score", "sd", *MEASURED)
COLUMNS += ("chosen", "trials", "best_minus_median", "scores")
LINE = 0.24  # inches a method takes in a picture
# points from a method's dot to its name, from the best place to the last
NAME_PLACES = ((4, -8), (-4, 3), (4, 3), (-4, -8), (4, -16), (-4, 11), (4, 11), (-4, -16))
Cells = dict[tuple[str, str], dict[str, Any]]  # by setting and method


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


def write(
    table: dict, found: dict[tuple[str, str], list[Path]], path: Path, others: Cells | None = None
) -> None:
    """Writes cells.csv, differences.csv, ranks.csv, ranks.md and the figure `path`, all in its
    folder, from the runs of each (row, column), seeds in order, and of other cells as `read_cells`
    returns them.
    """
    known = (others or {}) | {place: describe_cell(table, *place, found[place]) for place in found}
    places = ((row, column) for row in table["rows"] for column in row_columns(table, row))
    cells = [known[place] for place in places if place in known]
    texts = [cell | {"scores": " ".join(map(repr, cell["scores"]))} for cell in cells]
    listed = [{name: cell.get(name) for name in COLUMNS} for cell in texts]
    write_columns(path.with_name("cells.csv"), listed)
    if differences := list_differences(cells, table.get("against", ())):
        write_columns(path.with_name("differences.csv"), differences)
    # `ranked: false`: a setting that not all methods can have
    ranking = [cell for cell in cells if table["rows"][cell["setting"]].get("ranked", True)]
    scores = collect_scores(ranking, table.get("own", ()))
    if len(scores.methods) < 2:
        return
    ranked = ranks.rank_methods(scores.of_seeds)
    base = table.get("baseline")
    rows = list_ranks(scores, ranked, base)
    write_columns(path.with_name("ranks.csv"), rows)
    write_text(path.with_name("ranks.md"), format_ranks(table, scores, rows, base))
    draw(table, scores, ranked, cells, path)


def read_cells(table: dict, paths: Sequence[Path]) -> Cells:
    """Returns the cells of cells.csv files, the first where several have one. Raises InputError
    for what is no cell of this table.
    """
    cells: Cells = {}
    for path in paths:
        reader = csv.DictReader(read_named("--cells", path).splitlines(), restval="")
        try:
            lines, columns = list(reader), reader.fieldnames or ()
        except csv.Error as error:
            raise InputError(f"--cells {path}: cannot be read ({error})") from None
        if missing := [name for name in COLUMNS if name not in columns]:
            raise InputError(f"--cells {path}: has no column {missing[0]}, expected a cells.csv")
        for number, line in enumerate(lines, 2):
            try:
                cell = _read_cell(table, line)
            except ValueError as error:
                raise InputError(f"--cells {path}, line {number}: {error}") from None
            cells.setdefault((cell["setting"], cell["method"]), cell)
    return cells


def _read_cell(table: dict, line: dict[str, str]) -> dict[str, Any]:
    """Returns a line of cells.csv as `describe_cell` does; `scores` may be empty."""

    def read(name: str, kind: Callable[[str], Any]) -> Any:
        try:
            return kind(line[name])
        except ValueError:
            raise ValueError(f"{name} {line[name]!r}: not a number that cflbench writes") from None

    row, column = line["setting"], line["method"]
    if row not in table["rows"] or column not in row_columns(table, row):
        raise ValueError(f"{row}, {column}: no cell of the table, nor of --methods")
    if line["measure"] != (shown := cell_measure(table, row, column)):
        raise ValueError(f"measure {line['measure']}: the table shows {shown}")
    cell = line | {name: read(name, float) if line[name] else None for name in NUMBERS}
    cell |= {name: read(name, int) for name in ("seeds", "rounds", "trials")}
    scores = read("scores", lambda text: [float(part) for part in text.split()])
    if len(scores) not in (0, cell["seeds"]):
        raise ValueError(f"scores {line['scores']}: as many as seeds, {cell['seeds']}, or none")
    mean = float("nan") if cell["score"] is None else cell["score"]
    return cell | {"score": mean, "scores": scores}


def describe_cell(table: dict, row: str, column: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Returns a line of cells.csv; `scores` are those of its seeds."""
    measure = cell_measure(table, row, column)
    runs = [read_measures(folder) for folder in folders]
    scores = [float("nan") if run[measure] is None else run[measure] for run in runs]
    cell: dict[str, Any] = {"setting": row, "method": column, "seeds": len(runs)}
    cell |= {"rounds": max(run["rounds"] for run in runs), "measure": measure}
    cell["score"] = statistics.fmean(scores)
    # not statistics.stdev, which fails on NaN
    cell["sd"] = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
    for name, field in MEASURED.items():
        values = [run[field] for run in runs if run.get(field) is not None]
        cell[name] = statistics.fmean(values) if values else None
    return cell | describe_choice(folders[0]) | {"scores": scores}


def describe_choice(run_dir: Path) -> dict[str, Any]:
    """Returns what was chosen for a run, of how many trials, and by how much the best of them was
    above the median; {} where nothing was.
    """
    for folder in run_dir.parents:
        if (chosen := trials.read_chosen(folder)) is None:
            continue
        with (folder / "trials.csv").open(newline="") as text:
            lines = list(csv.DictReader(text))
        score = next(name for name in lines[0] if name.startswith("validation_"))
        tried = [float(line[score]) for line in lines]
        settings = " ".join(f"{name}={value}" for name, value in chosen["chosen"].items())
        spread = max(tried) - statistics.median(tried)
        return {"chosen": settings, "trials": len(tried), "best_minus_median": spread}
    return {}


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
            pairs = zip(cell["scores"], other["scores"], strict=False)
            gaps = [float(np.subtract(*np.nan_to_num(pair, nan=0.0))) for pair in pairs]
            found = bootstrap_mean(gaps or [cell["score"] - other["score"]])
            line = {"setting": setting, "method": method, "minus": minus, "best": minus == best}
            line |= {"seeds": len(gaps), "mean": found.mean, "low": found.low, "high": found.high}
            lines.append(line | {"p": find_chance(gaps)})
    return lines


def list_ranks(scores: Scores, ranked: ranks.Ranks, baseline: str | None) -> list[dict[str, Any]]:
    """Returns the lines of ranks.csv, the best first."""
    means, methods = scores.means, scores.methods
    chances = gaps = np.full(len(methods), np.nan)
    if baseline in methods:
        place = methods.index(baseline)
        chances = ranks.compare_with(means, place)
        gaps = (means - means[:, [place]]).mean(0)
    lines = [
        {
            "method": method,
            "mean_rank": ranked.mean[j],
            "low": ranked.low[j],
            "high": ranked.high[j],
            "share_first": ranked.first[j],
            "mean_score": means[:, j].mean(),
            "minus_baseline": gaps[j],
            "minus_best": (means[:, j] - means.max(1)).mean(),
            "p_wilcoxon_holm": chances[j],
        }
        for j, method in enumerate(methods)
    ]
    return to_plain(sorted(lines, key=lambda line: line["mean_rank"]))


def format_ranks(
    table: dict, scores: Scores, rows: list[dict[str, Any]], baseline: str | None
) -> str:
    """Returns ranks.md."""
    count, settings = len(scores.methods), len(scores.settings)
    several = settings > 1  # of one setting tests say nothing
    over = f"{settings} settings" if several else "one setting"
    alone = sum(len(each) == 1 for each in scores.of_seeds)
    drawn = "settings and seeds"
    drawn += f" (in {alone} of them each method has one score, its mean)" if alone else ""
    lines = [f"# {table['title']}: mean ranks", ""]
    lines.append(
        f"Over {over} ({', '.join(scores.settings)}), of {count} methods; brackets:"
        f" {ranks.INTERVAL:.0%} of a bootstrap over {drawn}. First: in so many of its"
        f" resamples. Against {baseline}: mean difference in points"
        + (", and Wilcoxon's chance after Holm's correction." if several else ".")
        + " Against the best: of these methods, in each setting."
    )
    if (chance := ranks.friedman(scores.means)) is not None:
        lines.append(f"Friedman's test of equal ranks: p = {chance:.2g}.")
    if several:
        apart = ranks.critical_difference(count, settings)
        lines.append(
            f"Mean ranks less than {apart:.2f} apart are not told apart at {ranks.LEVEL:.0%}"
            " (Nemenyi)."
        )
    if scores.missed:
        lines.append(f"Not ranked, for they are not complete: {', '.join(scores.missed)}.")
    headings = ["method", "mean rank", "first", f"against {baseline}", *(["p"] if several else [])]
    headings.append("against the best")
    lines += ["", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
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
        lines.append("| " + " | ".join(map(escape_markdown, shown)) + " |")
    return "\n".join(lines) + "\n"


def draw(
    table: dict, scores: Scores, ranked: ranks.Ranks, cells: Sequence[dict[str, Any]], path: Path
) -> None:
    """Draws mean ranks, scores by method and setting, and scores against megabytes."""
    order = np.argsort(ranked.mean)
    count, settings = len(scores.methods), scores.settings
    fronts = -(-len(settings) // 2)
    width = 5.5 + 0.75 * len(settings) + 4.2 * min(2, len(settings))
    height = max(1.8 + LINE * count, 3.4 * fronts)
    figure = new_figure(width, height, table["title"])
    halves = [5.5 + 0.75 * len(settings), width - 5.5]
    (left, right), *_ = figure.subfigures(1, 2, width_ratios=halves, squeeze=False)
    shown, grid = left.subplots(1, 2, width_ratios=[3.2, 0.75 * len(settings) + 0.5])
    draw_ranks(shown, scores, ranked, order)
    draw_grid(grid, table, scores, order)
    panels = list(right.subplots(fronts, min(2, len(settings)), squeeze=False).flat)
    for axes in panels[len(settings) :]:
        axes.set_visible(False)
    best = [
        draw_front(axes, row_title(table, setting), [c for c in cells if c["setting"] == setting])
        for axes, setting in zip(panels, settings, strict=False)
    ]
    figure.draw_without_rendering()
    for axes, points in zip(panels, best, strict=False):
        name_points(axes, points)
    save_figure(figure, path)


def draw_ranks(axes: Axes, scores: Scores, ranked: ranks.Ranks, order: np.ndarray) -> None:
    """Draws mean ranks with their intervals, the best at the top, and the critical difference."""
    places = np.arange(len(order))
    spans = np.abs(np.stack([ranked.low, ranked.high]) - ranked.mean)[:, order]
    axes.errorbar(ranked.mean[order], places, xerr=spans, fmt="o", markersize=4, color="#0072B2")
    if said := len(scores.settings) > 1:
        apart = ranks.critical_difference(len(order), len(scores.settings))
        best = ranked.mean.min()
        axes.axvspan(best, min(best + apart, len(order)), color="0.92", zorder=0)
    style_axes(axes, "mean rank", "grey: not told from the best" if said else "", "")
    axes.set_yticks(places, [escape_plot(scores.methods[j]) for j in order], fontsize=9)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(left=0.5)


def draw_grid(axes: Axes, table: dict, scores: Scores, order: np.ndarray) -> None:
    """Draws scores in percent, coloured by how far they are below the best of their setting."""
    means = scores.means[:, order]
    axes.imshow((means.max(1, keepdims=True) - means).T, aspect="auto", cmap="Blues", vmax=0.6)
    for (setting, method), mean in np.ndenumerate(means):
        dark = means[setting].max() - mean > 0.35
        color = "white" if dark else "black"
        axes.text(
            setting, method, f"{100 * mean:.1f}", ha="center", va="center", color=color, fontsize=8
        )
    names = [escape_plot(row_title(table, name)) for name in scores.settings]
    style_axes(axes, "score (%)", "", "")
    axes.grid(False)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=9)
    axes.set_yticks([])


def draw_front(
    axes: Axes, title: str, cells: Sequence[dict[str, Any]]
) -> list[tuple[str, float, float]]:
    """Draws scores against megabytes sent; returns the methods that no other beats in both, each
    (name, megabytes, score).
    """
    sent = np.array([cell["megabytes"] for cell in cells], float)
    scores = np.array([cell["score"] for cell in cells], float)
    axes.plot(sent, scores, "o", markersize=3, color="0.7")
    front, best = [], -np.inf
    for j in sorted(range(len(cells)), key=lambda j: (sent[j], -scores[j])):
        if scores[j] > best:
            front, best = [*front, j], scores[j]
    axes.plot(sent[front], scores[front], "o", markersize=4, color="#D55E00")
    heading = escape_plot_lines(textwrap.fill(title, 30))
    style_axes(axes, heading, "megabytes, both ways", "score")
    format_percent_axis(axes)
    if sent.max() > 20:  # from none to many
        axes.set_xscale("symlog", linthresh=1)
    axes.margins(0.12)
    return [(cells[j]["method"], float(sent[j]), float(scores[j])) for j in front]


def name_points(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes names beside points (name, x, y) of a figure that has been laid out, each at the first
    place inside where it meets no name before it and no other point.
    """
    dots = [Bbox([dot, dot]).padded(4) for dot in axes.transData.transform([p[1:] for p in points])]
    taken: list[Bbox] = []
    for j, (name, x, y) in enumerate(points):
        for place in NAME_PLACES:
            text = axes.annotate(
                escape_plot(name),
                (x, y),
                place,
                textcoords="offset points",
                ha="left" if place[0] > 0 else "right",
                fontsize=7,
                in_layout=False,
            )
            box = text.get_window_extent().padded(3)  # pixels
            inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            met = any(map(box.overlaps, [*taken, *dots[:j], *dots[j + 1 :]]))
            if place == NAME_PLACES[-1] or (inside and not met):
                taken.append(box)
                break
            text.remove()
