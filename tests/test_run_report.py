"""The page that `fedjax-cfl report` writes: its parts, its numbers, and that nothing from a
file acts in it.
"""

import base64
import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import call, one_line
from matplotlib.text import Text
from PIL import Image
from scipy.stats import norm, permutation_test

from fedjax_cfl import library
from fedjax_cfl.analysis import flows, statistics
from fedjax_cfl.analysis.plot import colour_groups, draw_curves, make_palette
from fedjax_cfl.analysis.plot_costs import STEPS, TIME, draw_costs, last_costs
from fedjax_cfl.analysis.plot_groups import draw_alluvial
from fedjax_cfl.analysis.report import (
    DPI,
    ReportData,
    draw_run,
    format_difference,
    hide_path,
    join_overrides,
    list_clients,
    make_report,
    name_files,
    name_runs,
    render,
    report,
    to_png,
)
from fedjax_cfl.analysis.runs import read_run
from fedjax_cfl.analysis.sets import label_runs
from fedjax_cfl.analysis.tables import MEASURES
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import results
from fedjax_cfl.runs.assignments import Assignments, read_assignments

LINE = (
    "dataset.clients=12 clients_per_round=4 rounds=4 local.epochs=1 model=mclr algorithm=ifca"
    " algorithm.m=2 dataset.groups=2 partition=iid concept=rotate discard=none"
)
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two methods: a run, and a copy that says it is fedavg with one group."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(patch, f"{LINE} run_dir=ifca/0", devices=1) == 0
    run = Path(shutil.copytree(folder / "ifca" / "0", folder / "fedavg" / "0"))
    summary = results.read_summary(run) | {"algorithm": "fedavg"}
    results.write_json(run / "summary.json", summary)
    (run / "assignments.parquet").unlink()
    table = results.read_clients(run)
    results.write_parquet(run / "clients.parquet", table | {"group": np.zeros(12, int)})
    return folder


@pytest.fixture(scope="module")
def page(runs) -> str:
    return report([runs], runs / "report.html").read_text()


class Elements(HTMLParser):
    """Collects the start tags of a page, and the text of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", {}))


def test_a_page_has_all_parts(page):
    for heading in ("Results", "Accuracy and what it costs", "Paired differences", "Each run"):
        assert f">{heading}</h2>" in page
    links = set(re.findall('href="#([^"]+)"', page))
    assert {"results", "costs", "differences", "set-0", "set-1"} == links
    assert all(f' id="{link}"' in page for link in links)
    assert (
        re.search(r"hardware \d x cpu", page)
        and "fedjax-cfl dataset.clients=12 clients_per" in page
    )
    found = Elements(page)
    names = [attributes.get("alt", "")[:10] for tag, attributes in found.tags if tag == "img"]
    # one of costs, curves of two runs; who moved and the last groups where there are groups
    assert names.count("Accuracy, ") == 2 and names.count("Test accur") == 1
    assert names.count("Who moved ") == names.count("Found agai") == 1
    assert "algorithm._target_" in page


@pytest.mark.nightly
def test_pictures_of_a_page_are_written_beside_it(page, runs):
    report([runs], runs / "again.html", runs / "pictures")
    written = sorted(path.name for path in (runs / "pictures").iterdir())
    assert len(written) == 3 * page.count("<img ")
    assert {"costs.png", "costs.svg", "costs.pdf"} <= set(written)


def test_a_file_is_no_folder_for_pictures(tmp_path):
    """Found before any run is read."""
    page = tmp_path / "page.html"
    for pictures in ("/dev/null", "/dev/null/inside"):
        says = f"pictures={pictures}: /dev/null is not a folder that can be written to"
        one_line(says, report, [tmp_path], page, pictures)


def test_a_page_names_what_its_runs_share_and_explains_what_it_has(page):
    assert "<h1>2 runs in 2 sets on digits</h1>" in page
    assert "All have dataset digits, partition iid, model mclr." in page
    assert "corrected, it is" not in page and "One seed: no interval and no test." in page
    rows = [row | {"sim_time_s": 0.0} for row in ROWS]
    run = results.summarize_rows(rows) | {"rows": rows, "partition": "iid"}
    runs = label(
        run | {"algorithm": method, "dataset": data, "seed": seed}
        for method in ("a", "b")
        for data in ("digits", "mnist")
        for seed in (0, 1)
    )
    few = {"title": "", "folder": "", "numbers": {}, "overrides": [], "settings": {}}
    few |= {"file": "x", "set": ""}
    both = render(ReportData(runs, [few | {"clients": None}] * 8, {}), {})
    assert "in 4 sets</h1>" in both and "All have partition iid." in both
    assert "corrected, it is" in both and "One seed" not in both
    better = [
        run
        | {"algorithm": method, "dataset": data, "seed": seed, "data_id": data}
        | {"final_accuracy": (0.4 if method == "a" else 0.6) + seed / 100}
        for method in ("a", "b")
        for data in ("digits", "mnist")
        for seed in range(6)
    ]
    bold = render(ReportData(label(better), [few | {"clients": None}] * 24, {}), {})
    assert bold.count("<b>62.50 ± 1.87</b>") == 2 and "Bold: the best mean of its column" in bold
    first, second = both.index("Methods by data sets</h2>"), both.index("Results</h2>")
    assert first < second and "<td>50.00 ± 0.00</td>" in both[first:second]


def label(runs):
    """Returns runs with these fields as a page has them."""
    each = [{"seed": 0, "overrides": {}} | run for run in runs]
    return label_runs(pd.DataFrame(each, dtype=object))


@pytest.mark.nightly
def test_a_bar_shows_what_a_report_does_on_a_terminal_alone(runs, monkeypatch, capsys):
    def said():
        report([runs / "fedavg"], runs / "one.html")
        return capsys.readouterr().err

    assert said() == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert all(what in said() for what in ("reading runs", "drawing runs", "writing pictures"))


def test_nothing_is_fetched(page):
    for tag, attributes in Elements(page).tags:
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "data:").startswith(("data:", "#")), (tag, attributes)
    assert "@import" not in page and "url(" not in page


def test_only_its_own_script_may_run(page):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'")
    (allowed,) = re.findall(r"script-src 'sha256-([^']+)'", policy)
    found = Elements(page)
    own = [text for text in found.scripts if text.startswith('"use strict"')]
    assert base64.b64encode(hashlib.sha256(own[0].encode()).digest()).decode() == allowed
    kinds = [attributes.get("type") for tag, attributes in found.tags if tag == "script"]
    assert kinds.count(None) == 1 and set(kinds) == {None, "application/json"}


def test_every_client_is_in_its_table(page, runs):
    blocks = [json.loads(text) for text in Elements(page).scripts if text.startswith("{")]
    assert len(blocks) == 2
    for block in blocks:
        assert block["all"] == len(block["rows"]) == 12
        names = {"client", "group", "accuracy", "most frequent label", "true group"}
        assert names <= set(block["names"])
    assert ["moves" in block["names"] for block in blocks] == [False, True]
    table = results.read_clients(runs / "fedavg" / "0")
    column = blocks[0]["names"].index("accuracy")
    expected = [None if np.isnan(value) else round(float(value), 4) for value in table["accuracy"]]
    assert [row[column] for row in blocks[0]["rows"]] == pytest.approx(expected, abs=1e-4)


def test_texts_from_files_do_nothing(runs, tmp_path):
    """Names of runs, folders, settings and clients."""
    source, folder = runs / "ifca" / "0", tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    for name in ("metrics.jsonl", "assignments.parquet"):
        (folder / name).write_bytes((source / name).read_bytes())
    summary = json.loads((source / "summary.json").read_text())
    summary |= {"algorithm": EVIL, "dataset": "{{ 7 * 7 }}", "overrides": [f"x={EVIL}"]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / ".hydra").mkdir()
    settings = (source / ".hydra" / "config.yaml").read_text()
    (folder / ".hydra" / "config.yaml").write_text(f"{settings}\nevil: '{EVIL}'\n")
    table = results.read_clients(source)
    names = [f"</script>{EVIL}", *(f"c{k}" for k in range(11))]
    results.write_parquet(folder / "clients.parquet", table | {"client": np.array(names)})
    text = report([folder], tmp_path / "evil.html").read_text()
    assert EVIL not in text and "&lt;script&gt;alert(1)" in text and "{{ 7 * 7 }}" in text
    found = Elements(text)
    assert [attributes for tag, attributes in found.tags if "onerror" in attributes] == []
    assert json.loads(next(t for t in found.scripts if t.startswith("{")))["rows"][0][0] == names[0]


def test_a_page_says_nothing_of_whose_it_is(tmp_path):
    """A page for reviewers who must not know: no folders of absolute paths."""
    own = ["run_dir=/home/jane/a/b", "dataset.source.path='~/data/my.npz'", "local.lr=0.1"]
    shown = [hide_path(text) for text in own]
    assert shown == ["run_dir=.../b", "dataset.source.path='.../my.npz'", "local.lr=0.1"]
    kept = ["a/b/c", "../x/y", "https://arxiv.org/abs/1", "['x', 'a/b']", "1/2", "/", "x=/tmp"]
    assert [hide_path(text) for text in kept] == kept
    assert hide_path("['/a/b/c.npz', '/a/d']") == "['.../c.npz', '.../d']"
    row = json.dumps({"round": 1, "accuracy": 0.5, "bytes_up": 1, "bytes_down": 1}) + "\n"
    folder = tmp_path / "jane" / "one"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(row)
    summary = {"algorithm": "ifca", "dataset": "npz", "seed": 0}
    summary["overrides"] = [f"dataset.source.path={tmp_path}/jane/my.npz"]
    results.write_json(folder / "summary.json", summary)
    settings = f"run_dir: {tmp_path}/jane/one\nmodel: {{module: {{}}}}\n"
    (folder / ".hydra" / "config.yaml").write_text(settings)
    text = report([folder], tmp_path / "page.html").read_text()
    assert str(tmp_path) not in text and ".../my.npz" in text and ".../one" in text


def test_legends_say_nothing_of_whose_it_is(runs, tmp_path):
    """Lines of two files of one name in two folders are still two."""
    for place, name in enumerate(("a/my", "b/my", "c/other")):
        copy = Path(shutil.copytree(runs / "fedavg" / "0", tmp_path / str(place)))
        summary = results.read_summary(copy)
        summary["overrides"] = [f"dataset.source.path=/home/jane/{name}.npz"]
        results.write_json(copy / "summary.json", summary)
    found = make_report([tmp_path])
    labels = [
        "fedavg path=.../my.npz (1)",
        "fedavg path=.../my.npz (2)",
        "fedavg path=.../other.npz",
    ]
    assert [text.get_text() for text in found.figures["costs"].axes[0].texts] == labels
    assert list(found.runs["label"]) == labels


def test_what_one_run_does_not_have_is_missing_in_it_alone(runs, tmp_path, monkeypatch):
    """Such as run_id, of a run that an earlier version wrote."""
    for method in ("ifca", "fedavg"):
        shutil.copytree(runs / method / "0", tmp_path / method)
    summary = results.read_summary(tmp_path / "ifca")
    kept = ("algorithm", "dataset", "seed", "clients", "rounds", "overrides")
    results.write_json(tmp_path / "ifca" / "summary.json", {name: summary[name] for name in kept})
    monkeypatch.setattr("fedjax_cfl.analysis.report.draw_run", lambda run: {})
    found = make_report([tmp_path])
    assert len(found.runs) == 2 and all(run["clients"]["all"] == 12 for run in found.described)
    (one,) = make_report([tmp_path / "ifca"]).described
    assert one["title"] == "ifca, digits (seed 0)"


def test_headings_tell_runs_apart():
    places = [("m=2", 0, "0"), ("m=2", 1, "1"), ("m=3", 0, "2"), ("m=3", 0, "3")]
    runs = pd.DataFrame(
        {"label": f"ifca {m}", "seed": seed, "run_dir": Path("x", place)}
        for m, seed, place in places
    )
    assert name_runs(runs) == [
        "ifca m=2, seed 0",
        "ifca m=2, seed 1",
        "ifca m=3, seed 0, x/2",
        "ifca m=3, seed 0, x/3",
    ]


def test_nothing_is_replaced_silently(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedjax_cfl.analysis.report.to_png", lambda figure: b"")
    monkeypatch.setattr("fedjax_cfl.analysis.report.draw_run", lambda run: {})
    (tmp_path / "notes.html").write_text("<!DOCTYPE html> my own")
    for write in (report, library.report):
        with pytest.raises(InputError, match=r"notes.html: exists and is no page of `report`"):
            write([runs / "ifca"], tmp_path / "notes.html")
    report([runs / "ifca"], tmp_path / "page.html")
    report([runs / "ifca"], tmp_path / "page.html")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("wrote ") and said[1].startswith("replaced ")


def test_a_panel_for_each_data_set_and_a_style_for_each_method():
    runs = label(
        {"algorithm": method, "dataset": data, "rows": ROWS}
        for data in ("digits", "mnist")
        for method in ("a", "b")
    )
    figure = draw_costs(runs)
    # every cost is the same for both: rounds are enough
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    for axes, data in zip(figure.axes, ("digits", "mnist"), strict=True):
        assert axes.get_title("left") == f"Accuracy against round, {data}"
        assert {text.get_text() for text in axes.texts} == {"a", "b"}
    lines = [[(line.get_color(), line.get_ls()) for line in axes.lines] for axes in figure.axes]
    # the same in both panels, and not the same without colours
    assert lines[0] == lines[1] and len({dash for _, dash in lines[0]}) == 2
    names = [f"a method of a long name, number {n}" for n in range(3)]
    figure = draw_costs(label({"algorithm": name, "rows": ROWS} for name in names))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names


def test_a_group_has_one_colour_in_all_pictures():
    """That of the true group that most of its clients are of, each once."""
    table = {"group": np.array([0, 0, 0, 1, -1]), "concept": np.array([2, 2, 1, 2, 0])}
    palette = make_palette(3)
    assert colour_groups(3, table) == [palette[2], palette[1], palette[0]]
    assert colour_groups(3, None) == palette
    groups = np.array([[0, 0, 1, 1], [1, 1, 0, 0]])
    # the numbers at the end are those of the other files
    assert flows.match_groups(groups).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


def test_names_of_lines_stand_apart_at_their_ends():
    rows = [{"round": r, "group_accuracy": [0.9, 0.9, 0.91]} for r in range(1, 30)]
    rows[-1] |= {"group_accuracy": [0.9, None, 0.91]}
    for row in rows:
        row |= {"accuracy": 0.9, "macro_accuracy": 0.9, "worst10_accuracy": 0.2}
    figure = draw_curves(rows, "")
    first, _ = figure.axes
    assert first.get_legend() is None
    assert [text.get_text() for text in first.texts] == [
        "all clients = mean over clients",
        "worst 10 %",
    ]
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = sorted((Text.get_window_extent(t) for t in axes.texts), key=lambda box: box.y0)
        for one, other in itertools.pairwise(boxes):
            assert one.y1 <= other.y0 or one.x1 <= other.x0 or other.x1 <= one.x0


def test_ticks_of_who_moved_are_the_rounds_of_its_columns(runs):
    figure = draw_run(read_run(runs / "ifca" / "0"))["alluvial"]
    assert figure.axes[0].get_xticks().tolist() == [1, 2, 3, 4]
    assert figure.axes[0].get_yticks().size == 0


def test_what_a_regression_does_not_have_is_not_shown():
    """Such as a panel of shares, and true groups."""
    rows = [{"round": r, "rmse": 2.0} for r in (1, 2)]
    found = Assignments(np.array([1, 2]), np.arange(4), np.array([[0, 0, 1, 1]] * 2), None)
    assert len(draw_alluvial(found, rows, None, "").axes) == 1
    table = {"client": np.arange(4), "group": np.zeros(4, int), "concept": np.full(4, -1)}
    assert list_clients(table, None, 10)["names"] == ["client", "group"]


def test_pictures_are_named_after_their_runs_and_a_page_after_its_command():
    names = ["ifca m=3, seed 0", "ifca m=3; seed 0", "../$x"]
    assert name_files(names) == ["ifca-m=3-seed-0", "ifca-m=3-seed-0-1", "x"]
    every = [[f"algorithm={a}", "rounds=3", f"seed={n}"] for a in "ab" for n in (0, 1)]
    assert join_overrides(every) == "fedjax-cfl -m algorithm=a,b rounds=3 seed=0,1"
    assert join_overrides(every[:3]) == "" and join_overrides([]) == ""


ROWS = [
    {"round": r, "accuracy": 0.5, "bytes_up": 2, "bytes_down": 3, "local_steps": 4} for r in (1, 2)
]


@pytest.mark.nightly
def test_a_run_without_its_tables_is_shown_as_far_as_it_goes(runs, tmp_path):
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / name).write_bytes((runs / "ifca" / "0" / name).read_bytes())
    text = report([tmp_path], tmp_path / "short.html").read_text()
    assert "<h2>The run</h2>" in text and "Clients</h3>" not in text and "Who moved" not in text


@pytest.mark.nightly
def test_a_page_that_cannot_be_written(runs):
    with pytest.raises(InputError, match="cannot be written"):
        report([runs], runs / "no" / "such" / "report.html")


def test_pictures_are_small(page):
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    for image in map(base64.b64decode, images):
        assert Image.open(io.BytesIO(image)).mode == "P" and len(image) < 90_000
    assert len(images) == page.count("<img ") > 3


def test_pictures_keep_their_colours(runs):
    """Those of a figure of many: bands and their nodes, of every class."""
    run = read_run(runs / "ifca" / "0")
    table, found = results.read_clients(run["run_dir"]), read_assignments(run["run_dir"])
    figure = draw_alluvial(found, run["rows"], table["labels"], "")
    exact = io.BytesIO()
    figure.savefig(exact, dpi=DPI, format="png")
    drawn, kept = (
        np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
        for content in (exact.getvalue(), to_png(figure))
    )
    assert np.abs(drawn - kept).max(axis=-1).mean() < 0.5


def test_what_a_short_run_would_wait_for_is_not_imported(runs):
    """Of the default command pandas alone would be a twentieth."""
    code = "import sys; from fedjax_cfl.analysis.plot import plot_curves; plot_curves(sys.argv[1]);"
    code += "print({'pandas', 'scipy.stats', 'jax'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code, runs / "ifca" / "0"], capture_output=True)
    assert told.stdout == b"set()\n", told.stderr.decode()
    code = "import sys, fedjax_cfl.analysis.compare; print({'scipy.stats', 'jax'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert told.stdout == b"set()\n", told.stderr.decode()


# numbers


def test_an_interval_holds_the_mean_of_resamples():
    found = statistics.bootstrap_mean([1.0, None, 2.0, 3.0, 6.0])
    assert (found[0], found[3]) == (3.0, 4)
    # exact quantiles of the mean of 4 draws from {1, 2, 3, 6}
    means = np.stack(np.meshgrid(*[[1, 2, 3, 6]] * 4)).reshape(4, -1).mean(0)
    assert found[1:3] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.13)
    values = [0.0, 0.4, 1.3, 2.9, 6.1, 9.7]  # whose means lie closely enough to tell 2.5 from 5 %
    means = np.stack(np.meshgrid(*[values] * 6)).reshape(6, -1).mean(0)
    wanted = np.quantile(means, [0.025, 0.975])
    assert statistics.bootstrap_mean(values)[1:3] == pytest.approx(wanted, abs=0.1)
    assert statistics.bootstrap_mean([2.0])[1:3] == pytest.approx((np.nan, np.nan), nan_ok=True)
    assert statistics.bootstrap_mean([None])[3] == 0


def test_differences_are_of_the_same_seed():
    def group(method, numbers, data="digits"):
        own = {"algorithm": method, "dataset": data, "rows": []}
        return [own | {"seed": seed, "final_accuracy": value} for seed, value in numbers.items()]

    runs = group("low", {0: 0.1, 1: 0.5, 2: 0.3}) + group("high", {2: 0.4, 1: 0.6, 7: 0.9})
    runs += group("elsewhere", {0: 0.2}, data="mnist")
    (found,) = statistics.list_differences(label(runs), ["final_accuracy"]).to_dict("records")
    labels = found["set"], found["minus"], found["seeds"]
    assert labels == ("high digits", "low digits", 2)
    assert [found[name] for name in ("mean", "low", "high")] == pytest.approx([0.1] * 3)
    assert [found[name] for name in ("ahead", "behind", "p", "p_holm")] == [2, 0, 0.5, 0.5]
    twice = group("low", {1: 0.1}) + group("low", {1: 0.5}) + group("high", {1: 0.6})
    (found,) = statistics.list_differences(label(twice), ["final_accuracy"]).to_dict("records")
    assert (found["seeds"], found["mean"]) == (1, pytest.approx(0.1))  # the last one counts
    equal = label(group("low", {1: 0.5, 4: 0.3}) + group("high", {1: 0.5, 4: 0.3}))
    (found,) = statistics.list_differences(equal, ["final_accuracy"]).to_dict("records")
    assert [found[name] for name in ("seeds", "ahead", "behind", "p")] == [2, 0, 0, 1]


def test_what_floats_add_to_a_difference_is_none():
    """0.1 + 0.2 is no better than 0.3, and 0.3 - 0.2 as much as 0.2 - 0.1."""
    gaps = statistics.subtract([0.1 + 0.2, 0.3, 0.2], [0.3, 0.2, 0.1])
    assert gaps[0] == 0 and gaps[1] == gaps[2] == pytest.approx(0.1)
    assert statistics.find_chance(statistics.subtract([0.1 + 0.2, 0.7], [0.3, 0.7])) == 1
    assert statistics.find_chance([0.1, 0.2, -0.3]) == 1
    assert statistics.subtract([1e6 + 0.5], [1e6])[0] == 0.5


def test_the_chance_of_a_difference_is_that_of_scipy():
    rng = np.random.default_rng(0)
    for count in (3, 6, 9):
        values = rng.normal(0.5, 1.0, count)
        want = permutation_test(
            (values,), lambda v, axis: v.mean(axis), permutation_type="samples", n_resamples=np.inf
        )
        assert statistics.find_chance(values) == pytest.approx(want.pvalue)
    assert statistics.find_chance([0.1, 0.2, 0.3]) == 0.25 and np.isnan(statistics.find_chance([]))
    many = rng.normal(0.3, 1.0, 40)
    # of so many the mean is about normal
    want = 2 * norm.sf(abs(many.sum()) / np.sqrt((many**2).sum()))
    assert statistics.find_chance(many) == pytest.approx(want, abs=0.02)


def test_only_what_an_exact_test_says_after_correction_is_bold(page):
    row = {"mean": 0.02, "sd": 0.01, "low": 0.01, "high": 0.03, "seeds": 3, "ahead": 3, "behind": 0}
    assert format_difference(row | {"p": 0.25, "p_holm": 0.5}, MEASURES["final_accuracy"]) == {
        "texts": ["+2.00 ± 1.00", "+1.00 to +3.00", "3 better, 0 worse", "p 0.25, Holm 0.5"],
        "differs": False,
    }
    sure = row | {"p": 0.01, "p_holm": 0.04}
    assert format_difference(sure, MEASURES["final_accuracy"])["differs"]
    one = row | {"seeds": 1, "sd": np.nan, "p": np.nan, "p_holm": np.nan}
    assert format_difference(one, MEASURES["ari"]) == {"texts": ["+0.020"], "differs": False}
    # the two methods are the same runs here
    assert 'class="differs"' not in page
    # of six seeds that agree the test alone says 0.031, of three pairs corrected 0.094
    rows = [
        {"algorithm": name, "seed": seed, "final_accuracy": base + seed / 100, "rows": []}
        for name, base in (("a", 0.1), ("b", 0.3), ("c", 0.5))
        for seed in range(6)
    ]
    found = statistics.list_differences(label(rows), ["final_accuracy"])
    assert list(found["p"]) == [2 / 64] * 3 and list(found["p_holm"]) == [6 / 64] * 3
    assert [statistics.count_seeds(n) for n in (1, 2, 3, 9)] == [6, 7, 7, 9]


def test_simulated_time_counts_only_where_a_clock_runs():
    rows = [{"round": 1, "sim_time_s": 0.0, "local_steps": 0, "bytes_up": 2, "bytes_down": 3}]
    alone = pd.DataFrame({"rows": [rows, [{"round": 1}], []]})
    np.testing.assert_array_equal(last_costs(alone, TIME), np.nan)
    np.testing.assert_array_equal(last_costs(alone, STEPS), [0, np.nan, np.nan])
    rows = [row | {"accuracy": 0.5} for row in rows]
    timed = [[row | {"sim_time_s": s} for row in rows] for s in (7.0, 9.0)]
    runs = zip(("idle", "timed", "slow"), (rows, *timed), strict=True)
    figure = draw_costs(label({"algorithm": name, "rows": own} for name, own in runs))
    assert [len(axes.lines) for axes in figure.axes] == [3, 2]
    assert figure.axes[1].get_title("left") == "Accuracy against simulated s"
