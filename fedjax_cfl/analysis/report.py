"""One HTML page of finished runs, alone or side by side, that needs no network.

Settings, curves, means with bootstrap intervals over seeds and paired differences, who
moved where, and a table of every client that sorts and filters.
"""

import argparse
import base64
import hashlib
import io
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from fedjax_cfl.analysis import flows
from fedjax_cfl.analysis.compare import list_shown
from fedjax_cfl.analysis.plot import draw_curves, save_pictures
from fedjax_cfl.analysis.plot_costs import COSTS, add_costs, draw_costs
from fedjax_cfl.analysis.plot_found import draw_final_groups
from fedjax_cfl.analysis.plot_groups import draw_alluvial
from fedjax_cfl.analysis.runs import DATA, list_settings
from fedjax_cfl.analysis.sets import keep_known, read_sets, split_sets
from fedjax_cfl.analysis.statistics import LEVEL, PAIRED, bootstrap_mean, list_differences
from fedjax_cfl.analysis.tables import MEASURES, format_number, list_records
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_text
from fedjax_cfl.runs.assignments import Assignments, sample_clients
from fedjax_cfl.runs.display import follow, title
from fedjax_cfl.runs.results import to_plain, write_text
from fedjax_cfl.runs.run_dir import check_writable
from fedjax_cfl.runs.tables import Tables, read_tables
from fedjax_cfl.scores import SCORES, score_of

MAX_CLIENTS = 20_000  # in the tables of a page; of more, so many are drawn
MAX_PICTURED = 20  # runs with pictures of their own; of more, the first of each set
DPI, COLOURS = 110, 256  # of the pictures: PNG with a palette
# measures of a comparison that the page shows
SHOWN = (
    *(
        f"{part}_{score.name}"
        for score in SCORES
        for part in ("best", "shared_best", "final", "worst10")
    ),
    *(name for score in SCORES for name in score.measured[1:]),
    "ari",
    "chosen_round",
)
MEASURED = {name: MEASURES[name] for name in SHOWN}
MEASURED |= {name: (cost.heading, 1 / cost.scale, cost.digits) for name, cost in COSTS.items()}
MARK = '<meta name="generator" content="fedjax-cfl report">'
ABSOLUTE = re.compile(r"(?<![\w.~/])(?:~|[A-Za-z]:)?/(?:[^/\s,'\"\[\]=]+/)+")


class ReportData(NamedTuple):
    """What a page shows."""

    runs: pd.DataFrame  # a row per run, see `sets`, with what each has cost
    described: list[dict[str, Any]]  # of each run, see `describe_run`
    figures: dict[str, Figure]  # costs, and of run n: n-curves, n-alluvial, n-groups


def report(
    paths: Iterable[str | Path], out: str | Path = "report.html", pictures: str | Path | None = None
) -> Path:
    """Writes one page about the finished runs at or below `paths`, and the pictures in it
    as PNG, SVG and PDF files where `pictures` is a folder; returns its path.

    Raises InputError for files that no run wrote, or a page or pictures that cannot be written.
    """
    check_out(Path(out))
    if pictures is not None:
        check_writable(Path(pictures), f"pictures={pictures}")
    write_report(make_report(paths), out, pictures)
    return Path(out)


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


def make_report(paths: Iterable[str | Path]) -> ReportData:
    """Returns what a page about the finished runs at or below `paths` shows."""
    runs = add_costs(hide_paths(read_sets(paths)))
    first = ~runs["label"].duplicated()
    pictured = runs["run_dir"].notna() if len(runs) <= MAX_PICTURED else first
    pictured &= runs.groupby(first).cumcount().lt(MAX_PICTURED)
    # what can be wrong with files is found before anything is drawn
    each = list_records(runs)
    named = follow(list(zip(each, name_runs(runs), strict=True)), "reading clients")
    shown = [describe_run(run, MAX_CLIENTS // len(runs), name) for run, name in named]
    figures = {"costs": draw_costs(runs)}
    for number, run in enumerate(follow(each, "drawing runs")):
        if pictured[number]:
            drawn = {name: figure for name, figure in draw_run(run).items() if figure is not None}
            figures |= {f"{number}-{name}": figure for name, figure in drawn.items()}
    return ReportData(runs, shown, figures)


def name_runs(runs: pd.DataFrame) -> list[str]:
    """Returns a heading for every run that no other run has."""
    if len(runs) == 1:
        (run,) = list_records(runs)
        return [title({name: value for name, value in run.items() if value != ""})]
    names = runs["label"] + ", seed " + runs["seed"].map(str)
    places = ["/".join(Path(folder).parts[-2:]) for folder in runs["run_dir"]]
    return list(names.where(~names.duplicated(keep=False), names + ", " + places))


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
            images = {name: to_png(figure) for name, figure in drawn}
            text, before = render(found, images), Path(out).exists()
            write_text(out, text)
            size, runs = len(text.encode()) / 1e6, len(found.runs)
            verb = "replaced" if before else "wrote"
            print(f"{verb} {out}: {runs} run{'s' * (runs > 1)}, {size:.1f} MB")
        if pictures is not None:
            written = folder = Path(pictures)
            folder.mkdir(parents=True, exist_ok=True)
            before = {path.name for path in folder.iterdir()}
            files = [
                path.name
                for name, figure in follow(list(found.figures.items()), "writing pictures")
                for path in save_pictures(figure, folder / name)
            ]
            kept = len(before.intersection(files))
            replaced = f" ({kept} files replaced)" if kept else ""
            count = f"{len(found.figures)} pictures as PNG, SVG and PDF"
            print(f"wrote {count} in {folder}{replaced}")
    except OSError as error:
        raise InputError(f"{written}: cannot be written ({error.strerror})") from None
    return None if out is None else Path(out)


# a run


def read_run_tables(run: dict[str, Any]) -> Tables:
    """Returns the tables of a run as `read_run` has it."""
    return read_tables(run["run_dir"], run, run["rows"])


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


def describe_run(run: dict[str, Any], most: int, heading: str) -> dict[str, Any]:
    """Returns what the page says of a run in words and tables, of `most` clients at most."""
    tables = read_run_tables(run)
    settings = list_settings(run["run_dir"])
    return {
        "title": hide_path(heading),
        "folder": escape_text("/".join(run["run_dir"].parts[-2:])),
        "overrides": [hide_path(line) for line in run["asked"]],
        "settings": {escape_text(name): hide_path(value) for name, value in settings.items()},
        "numbers": format_numbers(run),
        "clients": None
        if tables.clients is None
        else list_clients(tables.clients, tables.assignments, most),
    }


def format_numbers(run: dict[str, Any]) -> dict[str, str]:
    """Returns the headline numbers of a run in words."""
    words = {}
    for name, (heading, factor, digits) in MEASURED.items():
        value = run.get(name)
        if pd.notna(value) and not name.startswith("shared_best"):
            words[heading] = format_number(value, factor, digits)
    return words | {"rounds": f"{run['rounds']:,}"}


def list_clients(
    table: dict[str, np.ndarray], found: Assignments | None, most: int
) -> dict[str, Any]:
    """Returns the table of clients as plain columns: those of clients.parquet, the most
    frequent label and how often the client changed its group.
    """
    chosen = sample_clients(len(table["client"]), most, 0)
    columns = {name: values for name, values in table.items() if values.ndim == 1}
    if "labels" in table:
        labels = table["labels"]
        columns["most_frequent_label"] = np.where(labels.sum(1) > 0, labels.argmax(1), -1)
    if found is not None and found.clients.size == len(table["client"]):
        followed = flows.match_groups(found.groups)
        columns["moves"] = ((followed[1:] != followed[:-1]) & (followed[:-1] >= 0)).sum(0)
    words = {name: name.replace("_", " ") for name in columns} | {"concept": "true group"}
    plain = {words[name]: to_plain(values[chosen]) for name, values in columns.items()}
    plain["client"] = [escape_text(name) for name in plain["client"]]
    return {
        "names": list(plain),
        "rows": [
            [round(value, 4) if isinstance(value, float) else value for value in row]
            for row in zip(*plain.values(), strict=True)
        ],
        "all": len(table["client"]),
    }


def draw_run(run: dict[str, Any]) -> dict[str, Figure | None]:
    """Returns the pictures of a run, None where there is nothing to draw."""
    table, found = read_run_tables(run)
    labels = None if table is None or found is None else table.get("labels")
    if found is not None and labels is not None:
        labels = labels[found.clients]
    return {
        "curves": draw_curves(run["rows"], ""),
        "alluvial": None if found is None else draw_alluvial(found, run["rows"], labels, ""),
        "groups": None if table is None else draw_final_groups(table, ""),
    }


def to_png(figure: Figure) -> bytes:
    """Returns a figure as a PNG of few colours, a third of the size."""
    held, small = io.BytesIO(), io.BytesIO()
    figure.savefig(held, dpi=DPI, format="png")
    picture = Image.open(held).convert("RGB")
    # also colours of few pixels, which a colour bar has; kmeans brings those of many back
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


# the page


def render(found: ReportData, images: dict[str, bytes]) -> str:
    """Returns the page. What comes from files is escaped, and the page's own script is the
    only one that its policy lets run.
    """
    room, runs = resources.files("fedjax_cfl.analysis"), found.runs
    script = (room / "report.js").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        (room / "report.html").read_text(encoding="utf-8")
    )
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown = [*list_shown(runs), *(name for name in COSTS if runs[name].notna().any())]
    names = [name for name in MEASURED if name in shown]
    differences = _list_differences(runs)
    return page.render(
        script=Markup(script),
        style=Markup((room / "report.css").read_text(encoding="utf-8")),
        allowed=f"sha256-{allowed}",
        level=f"{100 * LEVEL:.0f} %",
        headings=[MEASURED[name][0] for name in names],
        scored=[score for score in SCORES if score in map(score_of, runs["rows"])],
        groups=[_line(members, names) for _, members in split_sets(runs)],
        chosen=bool(runs["chosen_round"].notna().any()),
        paired=[MEASURED[name][0] for name in keep_known(PAIRED, runs)],
        shared=name_shared(runs),
        differences=differences,
        tested=any(cell["tests"] for line in differences for cell in line["cells"]),
        runs=found.described,
        mark=Markup(MARK),
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
    )


def name_shared(runs: pd.DataFrame) -> dict[str, str]:
    """Returns what all runs have in common of their data: name and value."""
    values = {name: {*runs[name]} - {""} for name in DATA}
    return {name: hide_path(*found) for name, found in values.items() if len(found) == 1}


def _line(members: pd.DataFrame, names: list[str]) -> dict[str, Any]:
    """Returns a set of runs as one line of the table."""
    cells = []
    for name in names:
        mean, low, high, count = bootstrap_mean(members[name])
        estimate = {"mean": mean, "low": low, "high": high, "seeds": count}
        cells.append(format_estimate(estimate, *MEASURED[name][1:]))
    seeds = " ".join(map(str, members["seed"]))
    label = hide_path(members["label"].iloc[0])
    return {"label": label, "seeds": seeds, "runs": len(members), "cells": cells}


def _list_differences(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a line per pair of sets of runs."""
    lines, nothing = [], {"seeds": 0}
    for (one, other), members in list_differences(runs).groupby(["set", "minus"], sort=False):
        rows: dict[Any, dict] = {row["measure"]: row for row in members.to_dict("records")}
        cells = [
            format_estimate(rows.get(name, nothing), *MEASURED[name][1:], sign="+")
            for name in keep_known(PAIRED, runs)
        ]
        seeds = members["seeds"].max()
        lines.append({"label": one, "minus": other, "seeds": seeds, "cells": cells})
    return lines


def format_estimate(
    estimate: dict[str, Any], factor: float, digits: int | None, sign: str = ""
) -> dict[str, Any]:
    """Returns the texts of a mean, of its interval and of the tests of a difference (a row of
    `list_differences`), and whether the interval, rounded as it is shown, excludes 0.
    """
    if not estimate["seeds"]:
        return {"mean": "-", "interval": "", "apart": False, "tests": []}
    mean, low, high = (
        format_number(estimate[name], factor, digits, sign) for name in ("mean", "low", "high")
    )
    rounded = [format_number(estimate[name], factor, digits) for name in ("low", "high")]
    bounds, several = [float(text.replace(",", "")) for text in rounded], estimate["seeds"] > 1
    return {
        "mean": mean,
        "interval": f"{low} to {high}" if several and bounds[0] < bounds[1] else "",
        "apart": several and (bounds[0] > 0 or bounds[1] < 0),
        "tests": format_tests(estimate) if several and "ahead" in estimate else [],
    }


def format_tests(tests: dict[str, Any]) -> list[str]:
    """Returns what exact tests say of differences, in two lines."""
    said = f"p {tests['p_mean']:.2g}, Wilcoxon {tests['p_wilcoxon']:.2g}, sign"
    return [
        f"{tests['ahead']} better, {tests['behind']} worse",
        f"{said} {tests['p_sign']:.2g}",
    ]


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl report RUN_DIR... [-o report.html] [--pictures DIR]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl report", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, or a folder to search for runs"
    )
    parser.add_argument("-o", "--out", metavar="FILE", default="report.html")
    parser.add_argument(
        "--pictures", metavar="DIR", help="write the pictures as PNG, SVG and PDF files"
    )
    options = parse_arguments(parser, argv)
    report(options.runs, options.out, options.pictures)
    return 0
