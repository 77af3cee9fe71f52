"""One HTML page of finished runs, alone or side by side, that needs no network: results, what they
cost, paired differences, and of each run its settings, curves, who moved where, and a table of
every client that sorts and filters.
"""

import argparse
import base64
import datetime
import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from fedjax_cfl.analysis import compare, flows, pivot, plot, plot_costs, sets, statistics, tables
from fedjax_cfl.analysis.plot_groups import draw_alluvial, draw_final_groups
from fedjax_cfl.analysis.runs import DATA, list_settings
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_text
from fedjax_cfl.runs.assignments import Assignments, read_assignments, sample_clients
from fedjax_cfl.runs.display import follow, title
from fedjax_cfl.runs.results import SUMMARY_FILE, read_clients, write_text
from fedjax_cfl.runs.run_dir import check_writable, common_folder
from fedjax_cfl.scores import SCORES

MAX_CLIENTS = 20_000  # in the tables of a page; of more, so many are drawn
MAX_PICTURED = 20  # runs with pictures of their own; of more, the first of each set
DPI, COLOURS = 110, 256  # of the pictures: PNG with a palette
MARK = '<meta name="generator" content="fedjax-cfl report">'
ABSOLUTE = re.compile(r"(?<![\w.~/])(?:~|[A-Za-z]:)?/(?:[^/\s,'\"\[\]=]+/)+")


class ReportData(NamedTuple):
    """What a page shows."""

    runs: pd.DataFrame  # a row per run, see `sets`
    described: list[dict[str, Any]]  # of each run, see `describe_run`
    figures: dict[str, Figure]  # costs, and of each run those of `draw_run`, with its name before


def report(
    paths: Iterable[str | Path], out: str | Path | None = None, pictures: str | Path | None = None
) -> Path:
    """Writes one page about the finished runs at or below `paths` to `out`, None: report.html in
    the folder that they have in common, and the pictures in it as PNG, SVG and PDF files where
    `pictures` is a folder; returns its path.

    Raises InputError for files that no run wrote, or a page or pictures that cannot be written.
    """
    paths = list(paths)
    out = Path(out or common_folder(paths) / "report.html")
    write_report(make_report(paths, out, pictures), out, pictures)
    return out


def check_out(out: Path) -> None:
    """Raises InputError for a file that a page cannot be written to, or that is no such page."""
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: cannot be written, there is no such folder")
    if out.is_dir():
        raise InputError(f"{out}: is a folder, expected a file to write")
    if out.exists() and out.is_file():
        with out.open("rb") as handle:
            ours = MARK.encode() in handle.read(4096)
        if not ours:
            raise InputError(f"{out}: exists and is no page of `report`; choose another file")


def make_report(
    paths: Iterable[str | Path], out: str | Path | None = None, pictures: str | Path | None = None
) -> ReportData:
    """Returns what a page about the finished runs at or below `paths` shows. Raises InputError
    where it cannot be written to `out`, or pictures to the folder `pictures`.
    """
    if out is not None:
        check_out(Path(out))
    if pictures is not None:
        check_writable(Path(pictures), f"pictures={pictures}")
    runs = hide_paths(sets.read_sets(paths))
    first = ~runs["label"].duplicated()
    pictured = runs["run_dir"].notna() if len(runs) <= MAX_PICTURED else first
    pictured &= runs.groupby(first).cumcount().lt(MAX_PICTURED)
    # what can be wrong with files is found before anything is drawn
    each, names = tables.list_records(runs), name_runs(runs)
    named = follow(list(zip(each, names, name_files(names), strict=True)), "reading clients")
    shown = [describe_run(run, MAX_CLIENTS // len(runs), *name) for run, *name in named]
    figures = {"costs": plot_costs.draw_costs(runs)}
    for number, run in enumerate(follow(each, "drawing runs")):
        if pictured[number]:
            stem = shown[number]["file"]
            figures |= {f"{stem}-{name}": figure for name, figure in draw_run(run).items()}
    return ReportData(runs, shown, figures)


def name_runs(runs: pd.DataFrame) -> list[str]:
    """Returns a heading for every run that no other run has."""
    if len(runs) == 1:
        (run,) = tables.list_records(runs)
        return [title({name: value for name, value in run.items() if value != ""})]
    names = runs["label"] + ", seed " + runs["seed"].map(str)
    places = ["/".join(Path(folder).parts[-2:]) for folder in runs["run_dir"]]
    return list(names.where(~names.duplicated(keep=False), names + ", " + places))


def name_files(names: list[str]) -> list[str]:
    """Returns what the pictures of runs of these names begin with: each its own."""
    short = pd.Series(names).str.replace(r"[^A-Za-z0-9_.=+-]+", "-", regex=True)
    short = short.str.strip("-.").str[:90]
    return list(short.where(~short.duplicated(), short + "-" + short.index.map(str)))


def write_report(
    found: ReportData, out: str | Path | None, pictures: str | Path | None = None
) -> Path | None:
    """Writes the page, if `out` is a file, and the pictures, if `pictures` is a folder; returns the
    path of the page.
    """
    written = out
    try:
        if out is not None:
            drawn = follow(list(found.figures.items()), "writing pictures")
            text = render(found, {name: to_png(figure) for name, figure in drawn})
            verb, count = "replaced" if Path(out).exists() else "wrote", len(found.runs)
            write_text(out, text)
            size = len(text.encode()) / 1e6
            print(f"{verb} {out}: {count} run{'s' * (count > 1)}, {size:.1f} MB")
        if pictures is not None:
            written = folder = Path(pictures)
            folder.mkdir(parents=True, exist_ok=True)
            before = {path.name for path in folder.iterdir()}
            drawn = follow(list(found.figures.items()), "writing pictures")
            files = [f.name for n, figure in drawn for f in plot.save_pictures(figure, folder / n)]
            kept = len(before.intersection(files))
            replaced = f" ({kept} files replaced)" if kept else ""
            print(f"wrote {len(found.figures)} pictures as PNG, SVG and PDF in {folder}{replaced}")
    except OSError as error:
        raise InputError(f"{written}: cannot be written ({error.strerror})") from None
    return None if out is None else Path(out)


# a run


def hide_path(value: Any) -> str:
    """Returns a text without the folders of absolute paths in it: a page may go to readers who must
    not know whose it is.
    """
    return escape_text(ABSOLUTE.sub(".../", str(value)))


def hide_paths(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs with names of sets, which pictures show, too, that have no folders of
    absolute paths; names that differ in nothing else get numbers.
    """
    names = pd.unique(runs[["label", "method"]].to_numpy().ravel())
    short = pd.Series([ABSOLUTE.sub(".../", name) for name in names], names)
    numbers = pd.Series([f" ({place + 1})" for place in range(len(names))], names)
    shown = short + numbers.where(short.duplicated(keep=False), "")
    return runs.assign(label=runs["label"].map(shown), method=runs["method"].map(shown))


def describe_run(run: dict[str, Any], most: int, heading: str, file: str) -> dict[str, Any]:
    """Returns what the page says of a run in words and tables, of `most` clients at most; `file` is
    what the names of its pictures begin with.
    """
    own = run["run_dir"], run.get("run_id")
    table, found = read_clients(*own), read_assignments(*own)
    settings = list_settings(run["run_dir"])
    numbers = {
        measure.heading: tables.format_number(run[name], measure)
        for name, measure in tables.MEASURES.items()
        if pd.notna(run.get(name))
    }
    return {
        "title": hide_path(heading),
        "file": file,
        "set": run["label"],
        "folder": escape_text("/".join(run["run_dir"].parts[-2:])),
        "overrides": [hide_path(line) for line in run["asked"]],
        "settings": {escape_text(name): hide_path(value) for name, value in settings.items()},
        "numbers": numbers | {"rounds": f"{run['rounds']:,}"},
        "clients": table and list_clients(table, found, most),
    }


def list_clients(
    table: dict[str, np.ndarray], found: Assignments | None, most: int
) -> dict[str, Any]:
    """Returns the table of clients as plain columns: those of clients.parquet that hold something,
    the most frequent label and how often the client changed its group.
    """
    columns = {name: values for name, values in table.items() if values.ndim == 1}
    if "labels" in table:
        labels = table["labels"]
        columns["most_frequent_label"] = np.where(labels.sum(1) > 0, labels.argmax(1), -1)
    if found is not None and found.clients.size == len(table["client"]):
        followed = flows.match_groups(found.groups)
        columns["moves"] = ((followed[1:] != followed[:-1]) & (followed[:-1] >= 0)).sum(0)
    unknown = [n for n in ("concept", "most_frequent_label") if np.all(columns.get(n, 0) == -1)]
    frame = pd.DataFrame(columns).drop(columns=unknown)
    shown = frame.iloc[sample_clients(len(frame), most, 0)].replace([np.inf, -np.inf], np.nan)
    shown["client"] = shown["client"].map(escape_text)
    words = {"concept": "true group"}
    names = [words.get(name, name.replace("_", " ")) for name in map(str, shown)]
    rows = [list(row.values()) for row in tables.list_records(shown.round(4))]
    return {"names": names, "rows": rows, "all": len(frame)}


def draw_run(run: dict[str, Any]) -> dict[str, Figure]:
    """Returns the pictures of a run by their names, without those with nothing to draw."""
    own = run["run_dir"], run.get("run_id")
    table, found = read_clients(*own), read_assignments(*own)
    figures = {"curves": plot.draw_curves(run["rows"], "", table), "alluvial": None, "groups": None}
    if found is not None:
        labels = (table or {}).get("labels")
        labels = None if labels is None else labels[found.clients]
        figures["alluvial"] = draw_alluvial(found, run["rows"], labels, "")
    if table is not None:
        figures["groups"] = draw_final_groups(table, "")
    return {name: figure for name, figure in figures.items() if figure is not None}


def to_png(figure: Figure) -> bytes:
    """Returns a figure as a PNG of few colours, a third of the size."""
    canvas, small = FigureCanvasAgg(figure), io.BytesIO()
    figure.set_dpi(DPI)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # also colours of few pixels, which a colour bar has; kmeans brings those of many back
    picture = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1)
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()


# the page


def render(found: ReportData, images: dict[str, bytes]) -> str:
    """Returns the page. What comes from files is escaped, and the page's own script is the
    only one that its policy lets run.
    """
    loader, runs = jinja2.PackageLoader("fedjax_cfl", "analysis"), found.runs
    room = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    script, style = (loader.get_source(room, name)[0] for name in ("report.js", "report.css"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {name: {*runs[name]} - {""} for name in DATA}
    matrix, grid = make_matrix(runs), None
    if matrix is not None:  # numbers of ours, and names that are escaped
        lines = pivot.lay_out(matrix, lambda text: str(escape(text)), "<b>{}</b>")
        grid = [[Markup(text) for text in line] for line in lines]
    return room.get_template("report.html").render(
        script=Markup(script),
        style=Markup(style),
        allowed=f"sha256-{allowed}",
        facts=list_facts(runs),
        command=hide_path(join_overrides([each for each in runs.get("asked", []) if each == each])),
        spread=compare.SPREAD,
        scored=[score for score in SCORES if score in [*runs["score"]]],
        matrix=grid,
        matrix_note="" if matrix is None else pivot.describe(matrix),
        results=compare.format_sets(runs, sets.list_measures(runs)),
        sets=[
            (hide_path(label), count)
            for label, count in runs["label"].value_counts(sort=False).items()
        ],
        chosen=bool(runs["chosen_round"].notna().any()),
        paired=[tables.MEASURES[name].heading for name in sets.keep_known(statistics.PAIRED, runs)],
        # what all runs have in common of their data
        shared={name: hide_path(*found) for name, found in values.items() if len(found) == 1},
        differences=_list_differences(runs),
        alpha=statistics.ALPHA,
        runs=found.described,
        mark=Markup(MARK),
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
    )


def make_matrix(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Returns the final scores of methods by data sets, see `pivot.fill_cells`, None: of one data
    set, or where a method has several sets of runs on one.
    """
    named = runs[["label", "method", "data"]].drop_duplicates("label").itertuples(index=False)
    places = {label: (hide_path(method), data) for label, method, data in named}
    alone = runs["data"].nunique() < 2 or len({*places.values()}) < len(places)
    return None if alone else pivot.fill_cells(runs, places, "final")


def list_facts(runs: pd.DataFrame) -> dict[str, str]:
    """Returns with what and when runs ran and how to repeat them, as far as they say it."""
    versions = [each for each in runs.get("versions", []) if isinstance(each, dict)]
    names = {"fedjax-cfl": "fedjax-cfl", "jax": "JAX", "python": "Python"}
    found = {words: [each.get(name) for each in versions] for name, words in names.items()}
    found["hardware"] = list(runs.get("devices", []))
    files = [Path(run_dir) / SUMMARY_FILE for run_dir in runs.get("run_dir", [])]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    days = [datetime.date.fromtimestamp(time).isoformat() for time in times]
    facts = {n: ", ".join(pd.Series(each).dropna().map(str).unique()) for n, each in found.items()}
    facts["runs of"] = " to ".join(dict.fromkeys([min(days), max(days)])) if days else ""
    facts["page of"] = datetime.date.today().isoformat()
    return {name: escape_text(value) for name, value in facts.items() if value}


def join_overrides(asked: list[list[str]]) -> str:
    """Returns the command of a sweep over all values of runs, "" where it would run others, too."""
    values: dict[str, dict[str, None]] = {}
    for name, _, value in (line.partition("=") for lines in asked for line in lines):
        if name != "run_dir":
            values.setdefault(name, {})[value] = None
    product = int(np.prod([len(each) for each in values.values()]))
    if not values or product != len({tuple(lines) for lines in asked}):
        return ""
    settings = [f"{name}={','.join(each)}" for name, each in values.items()]
    return " ".join(["fedjax-cfl", *(["-m"] if product > 1 else []), *settings])


def _list_differences(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a line per pair of sets of runs."""
    lines, found = [], statistics.list_differences(runs)
    shown = {
        name: tables.fit_digits(tables.MEASURES[name], found["mean"][found["measure"] == name])
        for name in sets.keep_known(statistics.PAIRED, runs)
    }
    for (one, other), members in found.groupby(["set", "minus"], sort=False):
        rows = {row["measure"]: row for row in members.to_dict("records")}
        cells = [format_difference(rows.get(name), measure) for name, measure in shown.items()]
        seeds = members["seeds"].max()
        lines.append({"label": one, "minus": other, "seeds": seeds, "cells": cells})
    return lines


def format_difference(row: dict[Any, Any] | None, measure: tables.Measure) -> dict[str, Any]:
    """Returns the texts of a difference of a measure, a row of `list_differences`, the mean first,
    and whether the exact test says that it is one.
    """
    if row is None:
        return {"texts": ["-"], "differs": False}
    seeds = row["seeds"]
    texts = [tables.format_mean((row["mean"], row["sd"], seeds), seeds, measure, sign="+")]
    if seeds > 1:
        bounds = [tables.format_number(row[side], measure, "+") for side in ("low", "high")]
        texts += [" to ".join(bounds), f"{row['ahead']} better, {row['behind']} worse"]
        texts.append(f"p {row['p']:.2g}, Holm {row['p_holm']:.2g}")
    return {"texts": texts, "differs": bool(row["p_holm"] < statistics.ALPHA)}


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl report RUN_DIR... [-o report.html] [--pictures DIR]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl report", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, or a folder to search for runs"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="default: report.html in the folder of all these runs"
    )
    parser.add_argument(
        "--pictures", metavar="DIR", help="write the pictures as PNG, SVG and PDF files"
    )
    options = vars(parse_arguments(parser, argv))
    report(options.pop("runs"), **options)
    return 0
