"""What benchmarks/results prints is what the CSV beside it says, to the digits printed.

`fedjax-cfl paper` writes table.csv and a table.md; the README of a folder shows its numbers
in fewer digits, arranged by hand. `PRINTED` says which cell is which number.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from papers import cells, report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_BY_PAPER = ("accelerator", "host_rows", "tpu_compile")  # measured by programs of their own
# mean, deviation, "2 of 3 seeds", "after 35" rounds; a ' marks another machine
NUMBER = re.compile(r"(-?[\d,.]+)(?: ± ([\d.]+))?(?:, (\d) of \d seeds)?(?: after (\d+))?'?")
BETWEEN = re.compile(r" / |; | and ")  # several numbers in one cell
NONE = ("", "-")  # was not run
OF_PAIRS = "of pairs"  # the deviation of a difference, which the CSV does not have
Place = tuple[str, str, list[str], str]  # label, heading, addresses, cell


@dataclass(frozen=True)
class Printed:
    """How the cells of a printed table are named in the CSV.

    A cell's address is "ROW, COLUMN". A label that is not listed names the row itself, up to
    its first comma, or is the row's title in the paper's table; a heading that is not listed
    names the column. `A / B` are two numbers in one cell, `A or B` is the one that was run,
    `A - B` the difference of two means, `@` the last label above without `@`, and `(A)` A's
    published number. What has `{}` is filled from the other side of the table.
    """

    # None: numbers that are not in the CSV
    rows: dict[str, str | None] = field(default_factory=dict)
    # a list: the heading occurs again
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    across: bool = False  # printed rows are the CSV's columns
    published_of: tuple[str, ...] = ()  # in place of LeNet, which was not published


# In the order of the README; a text says why a table is not compared.
PRINTED: dict[str, Sequence[Printed | str]] = {
    "fedgroup_fig5": [
        Printed(
            columns={
                "Pearson, directions of the founders": "pearson",
                "of all clients": "pearson_all",
            }
        )
    ],
    "fedgroup_table3": [Printed()],
    "fesem_fig2": [],
    "fesem_fig3": [],
    "fesem_table1": [
        Printed(
            columns={
                "50 rounds": (
                    four := "FEMNIST / FEMNIST-micro-F1 / FEMNIST-macro-acc / FEMNIST-macro-F1"
                ),
                "100 rounds": four,
                "published": " / ".join(f"({row})" for row in four.split(" / ")),
            },
            across=True,
        )
    ],
    "fesem_table3": [
        Printed(
            columns={
                "MNIST: micro-acc": "MNIST",
                "micro-F1": ["MNIST-micro-F1", "CIFAR-10-micro-F1"],
                "CIFAR-10, stand-in: micro-acc": "CIFAR-10",
            },
            across=True,
        )
    ],
    "fielding_ablation": [
        Printed(
            rows={
                "burst: Fashion-MNIST for FMoW": "burst-tail / burst",
                "burst: clusterings": "burst-clusterings",
                "gradual: MNIST for Cityscapes": "gradual-tail / gradual",
                "gradual: clusterings": "gradual-clusterings",
                "bucket: MNIST for Open Images": "bucket-tail / bucket",
                "bucket: clusterings": "bucket-clusterings",
                "by-time: Elec2, real times": "by-time-tail / by-time",
                "by-time: clusterings": "by-time-clusterings",
            }
        ),
        "sentences; see SAID",
        Printed(
            rows={
                "in the end / over all rounds": "burst-tail / burst",
                "clusterings": "burst-clusterings",
            },
            columns={
                "0": "Always-global",
                "1/6": "Tau-1/6",
                "1/3": "Fielding",
                "1/2": "Tau-1/2",
                "2/3": "Tau-2/3",
                "never": "Individual",
            },
        ),
    ],
    "fielding_concept": [
        Printed(
            rows={
                "swap-MNIST": "swap-MNIST / swap-MNIST-average",
                "swap-Fashion": "swap-Fashion / swap-Fashion-average",
                "rotate-MNIST": "rotate-MNIST / rotate-MNIST-average",
                "moves; clusterings after the first (MNIST)": (
                    "swap-MNIST-moves / swap-MNIST-clusterings"
                ),
                "megabytes (MNIST)": "swap-MNIST-MB",
            }
        )
    ],
    "fielding_fig1": [
        Printed(
            rows={"letters: FEMNIST, 62 labels as in FMoW": "letters"},
            columns={"Global, one group": "Global"},
        )
    ],
    "fielding_main": [
        Printed(
            rows={
                "by-time: Elec2, real times": "by-time",
                "by-date: Sent140, real dates": "by-date",
                "points above Global": "@-gain",
            }
        )
    ],
    "fielding_robustness": [
        Printed(
            rows={"client distance": "@-distance"},
            columns={
                "nobody malicious": "Fielding",
                **{f"{share} %": f"Malicious-{share}" for share in (10, 20, 30, 40)},
            },
        ),
        *(
            Printed(
                rows={
                    "Global": f"{trace}, Global{{}}",
                    "Fielding": f"{trace}, Fielding{{}}",
                    f"points above Global of the same seed{published}": (
                        f"{trace}, Fielding{{}} - Global{{}}"
                    ),
                    "distance of all clients": f"{trace}-distance, Global{{}}",
                    "distance within Fielding's groups": f"{trace}-distance, Fielding{{}}",
                },
                columns={
                    "none": "",
                    "half": "-shared-half",
                    "one": "-shared-one",
                    "two": "-shared-two",
                },
            )
            for trace, published in (("burst", " (published 3.2 to 4.4)"), ("gradual", ""))
        ),
        Printed(rows={"accuracy": "static", "points above Global": "static-gain"}),
        Printed(
            rows={
                "Oort": "oort, Oort",
                "nearest to the centers": "nearest, Nearest",
                "FedYogi": "yogi, FedYogi",
                "q-FedAvg": "fair, q-FedAvg",
            },
            columns={
                "global model": "{}, {}",
                "Fielding": "{}, Fielding-{}",
                "points": "{}-gain, Fielding-{}",
                "times faster to the same accuracy": "{}-speedup, Fielding-{}",
            },
        ),
    ],
    "fielding_server": [
        Printed(
            rows={"moves, k-means and silhouettes for K = 2 to 10, 5,078 x 100": "clustering"},
            columns={"first call, with compiling": "first call"},
        )
    ],
    "flexcfl_fig3": [
        Printed(
            rows={
                "a: MCLR": "a-MNIST-MCLR",
                "b: MLP": "b-MNIST-MLP",
                "c: CNN": "c-MNIST-CNN",
                **{f"mean discrepancy, {model}": None for model in ("MCLR", "MLP", "CNN")},
                **{
                    f"training loss, last 50 rounds, {model}": None
                    for model in ("MCLR", "MLP", "CNN")
                },
            },
            columns={"FlexCFL, eta_g = 0.1": "FlexCFL-eta0.1"},
        ),
        Printed(
            rows={"best accuracy": "d-MNIST-MLP-eta", "mean and sd of the last 50 rounds": None},
            columns={
                "0": "FlexCFL",
                **{eta: f"FlexCFL-eta{eta}" for eta in ("0.01", "0.1", "0.5", "1")},
            },
        ),
    ],
    "flexcfl_fig5": [Printed(rows={"mean and sd of the last 50 rounds": None})],
    "flexcfl_fig6": [Printed()],
    "flexcfl_table1": [Printed()],
    "flexcfl_table3": [
        Printed(columns={"FlexCFL, eta_g = 0.1": "FlexCFL-eta0.1"}),
        Printed(rows={"MNIST-MCLR, after": None, "MNIST-MLP, after": None}),
    ],
    "flexcfl_table4": [Printed(), "sentences"],
    "flux_table": [
        Printed(
            columns={
                "mean of the four": "Fashion-L8",
                "turned and coloured": "Fashion-L8-x",
                "few classes": "Fashion-L8-y",
                "renamed": "Fashion-L8-y_given_x",
                "some classes turned": "Fashion-L8-x_given_y",
            },
            across=True,
        )
    ],
    "clove_table": [
        Printed(
            columns={
                "exp203: accuracy": "MNIST-exp203",
                "exp301: accuracy": "MNIST-exp301",
                "exp111: accuracy": "MNIST-exp111",
                "index": ["MNIST-exp203-ari", "MNIST-exp301-ari", "MNIST-exp111-ari"],
            },
            across=True,
        )
    ],
    "md_icfl_figs": [],
    "md_icfl_search": [
        *["shorter runs, one by one"] * 3,
        Printed(
            rows={
                "as it is": "keep",
                "empty groups get a noisy copy": "copy",
                "groups of drawn size": "drawn",
            },
            columns={
                f"{measure}, {of}": f"{measure}{at}"
                for measure in ("index", "accuracy")
                for of, at in (("mean", ""), *((f"seed {seed}", f" {seed}") for seed in range(3)))
            },
        ),
        "costs",
    ],
    **{
        f"md_icfl_table{number}": [
            Printed(
                columns={"accuracy": "LeNet", "index": "LeNet-ari"},
                across=True,
                published_of=("ResNet18", "MobileNetV2"),
            ),
            *(["the paper's networks, three rounds"] if number == 3 else []),
        ]
        for number in (1, 2, 3)
    },
    **{
        f"md_icfl_table{number}": [
            Printed(
                rows={
                    "ClusteredFL": "ClusteredFL or ClusteredFL-half",
                    "ClusteredFL with thresholds that follow the updates": (
                        "ClusteredFL-auto or ClusteredFL-half-auto"
                    ),
                    "MD-ICFL-1 with M = 10": "MD-ICFL-1-M10",
                },
                columns={"R = 1.0": "R1.0", "R = 0.5": "R0.5", "index": ["R1.0-ari", "R0.5-ari"]},
                across=True,
            ),
            *(["shorter runs, one by one"] if number == 4 else []),
        ]
        for number in (4, 5)
    },
    "md_icfl_table6": [
        Printed(
            rows={"its index": "@-ari"},
            columns={"K = 1": "K1", **{str(k): f"K{k}" for k in range(2, 7)}},
        )
    ],
    "planted_clusters": [],  # its table stands in a guide
    "cflbench": [],  # its tables are files that the command writes
    "planted_methods": [
        Printed(
            columns={
                "rotate: accuracy": "rotate",
                "permute: accuracy": "permute",
                "shift: accuracy": "shift",
                "skew: accuracy": "skew",
                "worst tenth": [
                    "rotate-worst10",
                    "permute-worst10",
                    "shift-worst10",
                    "skew-worst10",
                ],
                "index": ["rotate-ari", "permute-ari", "shift-ari"],
                "MB": "rotate-MB",
            },
            across=True,
        )
    ],
}
# Pages that repeat a folder's table: the page, a label of the table, the folder, the names.
REPEATED: list[tuple[str, str, str, Printed]] = [
    *(
        (
            page,
            "MCLR",
            "flexcfl_table3",
            Printed(
                rows={"MCLR": "MNIST-MCLR", "MLP": "MNIST-MLP"},
                columns={"FlexCFL, eta_g = 0.1": "FlexCFL-eta0.1"},
            ),
        )
        for page in ("README.md", "docs/reference/results.md")
    ),
    (
        "docs/guides/which_method.md",
        "HypoCluster",
        "planted_clusters",
        Printed(
            columns={
                "digits, rotate": "digits-rotate / digits-rotate-ari",
                "digits, permute": "digits-permute / digits-permute-ari",
                "MNIST, rotate": "MNIST-rotate / MNIST-rotate-ari",
                "MNIST, permute": "MNIST-permute / MNIST-permute-ari",
                "MB": ["digits-rotate-MB", "MNIST-rotate-MB"],
                "s": "MNIST-rotate-seconds / MNIST-permute-seconds",
            },
            across=True,
        ),
    ),
]
# TKM's megabytes in the guide have, computed, a first model that was not counted when it ran.
COMPUTED = {("planted_clusters", f"{data}-rotate-MB, TKM") for data in ("digits", "MNIST")}
# What sentences say of the numbers: the page ("" is the folder's README), the folder, the
# sentence, and what belongs into its {}; `v(row, column)` is a mean.
Value = Callable[[str, str], float]
SAID: list[tuple[str, str, str, Callable[[Value], list[float]]]] = [
    (
        "",
        "fesem_fig2",
        "FeSEM-2 {} (84.8), FeSEM-3 {} (87.0), FeSEM-4 {} (90.3)",
        lambda v: [v("FEMNIST", f"FeSEM-{m}") for m in (2, 3, 4)],
    ),
    ("", "fesem_fig3", "best accuracy {} %", lambda v: [v("MNIST-planted", "FeSEM-4")]),
    *(
        (
            "",
            "fielding_ablation",
            f"| {ordering} | {{}} ± {{}} | {{}} ± {{}} | {{}} ± {{}} |",
            lambda v, column=column: [
                number
                for row in ("burst-gain", "gradual-gain", "bucket-gain")
                for number in (-v(row, column), v(f"sd of {row}", column))
            ],
        )
        for ordering, column in (
            ("Fielding above static groups", "Static"),
            ("Fielding above individual moves", "Individual"),
            ("all drifted clients above only the selected (1.5 to 4)", "Selected"),
        )
    ),
    *(
        (
            page,
            "fielding_concept",
            sentence,
            lambda v, end=end: [
                v(row + end, "Gradient") - v(row + end, "Labels")
                for row in ("swap-MNIST", "swap-Fashion")
            ],
        )
        for page, sentence, end in (
            ("", "in every seed of both: {} ± 3.2 and {} ± 3.7 points above labels", "-average"),
            ("", "({} ± 4.4), and in one of three of Fashion-MNIST ({} ± 8.7:", ""),
            ("docs/reference/results.md", "gradients {} and {} points above labels in the end", ""),
        )
    ),
    *(
        (
            page,
            "fielding_fig1",
            sentence,
            lambda v: [100 - 100 * v("letters", "Fielding") / v("letters", "Global")],
        )
        for page, sentence in (
            ("", "The reduction is {} %"),
            ("docs/reference/results.md", "groups of Fielding are {} % closer than all clients"),
        )
    ),
    (
        "",
        "fielding_main",
        "It sends {}, {} and {} % more than Fielding (burst, gradual, bucket)",
        lambda v: [
            100 * v(f"{row}-MB", "FlexCFL") / v(f"{row}-MB", "Fielding") - 100
            for row in ("burst", "gradual", "bucket")
        ],
    ),
    (
        "",
        "fielding_main",
        "FedDrift ({}) and FlexCFL ({}) are above Fielding ({})",
        lambda v: [v("bucket", name) for name in ("FedDrift", "FlexCFL", "Fielding")],
    ),
    (
        "",
        "fielding_main",
        "with what clients infer and train before a round: FlexCFL {}, {} and {} (burst",
        lambda v: [v(f"{row}-speedup", "FlexCFL") for row in ("burst", "bucket", "by-time")],
    ),
    *(
        (
            page,
            "fielding_robustness",
            sentence,
            lambda v: [v(row, "Fielding") - v(row, "Malicious-40") for row in ("burst", "gradual")],
        )
        for page, sentence in (
            ("", "accuracy falls by {} and {} points over 40 %"),
            ("docs/reference/results.md", "40 % malicious clients cost {} and {} points"),
        )
    ),
    (
        "",
        "flexcfl_fig5",
        "by {} points from 0 to 10",
        lambda v: [v("FEMNIST-MLP", "eta10") - v("FEMNIST-MLP", "eta0.0")],
    ),
    (
        "",
        "flexcfl_fig5",
        "all five lie within {} points",
        lambda v: [v("MNIST-MLP", "eta1") - v("MNIST-MLP", "eta10")],
    ),
    (
        "docs/reference/results.md",
        "flexcfl_fig5",
        "eta_g = 5 adds {} points on FEMNIST",
        lambda v: [v("FEMNIST-MLP", "eta5") - v("FEMNIST-MLP", "eta0.0")],
    ),
    *(
        (
            page,
            "md_icfl_table4",
            sentence,
            lambda v: [v("R1.0", "FedFomo") - 94.6, v("R0.5", "FedFomo") - 94.56],
        )
        for page, sentence in (
            ("", "FedFomo is {} and {} points above the paper"),
            ("docs/reference/results.md", "FedFomo {} and {} above"),
        )
    ),
    (
        "",
        "md_icfl_table5",
        "ClusteredFL ({}) is between MD-ICFL-2 ({}) and MD-ICFL-1 ({})",
        lambda v: [v("R0.5", name) for name in ("ClusteredFL-half", "MD-ICFL-2", "MD-ICFL-1")],
    ),
    (
        "",
        "md_icfl_table5",
        "IFCA is first in both, {} to {} points above MD-ICFL",
        lambda v: [
            choose(
                v(row, "IFCA") - v(row, name)
                for row in ("R0.5", "R1.0")
                for name in ("MD-ICFL-1", "MD-ICFL-2")
            )
            for choose in (min, max)
        ],
    ),
]


def read_records(folder: str) -> dict[tuple[str, str], dict[str, str]]:
    """Returns the records of a folder's CSV; one with a column for each measure is read as if
    each measure were a record.
    """
    found = {}
    for path in sorted((RESULTS / folder).glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as handle:
            for line in csv.DictReader(handle):
                if "mean" in line:
                    assert set(line) <= set(report.FIELDS)
                    found[line["row"], line["column"]] = line
                else:
                    names = [name for name in line if name not in ("row", "seed")]
                    found |= {(line["row"], name): {"mean": line[name]} for name in names}
    return found


def read_tables(text: str) -> list[list[list[str]]]:
    """Returns the tables of a page: their lines, headings first, cell by cell."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    split = [
        [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        for block in blocks
    ]
    return [[lines[0], *lines[2:]] for lines in split]


def row_names(folder: str) -> dict[str, str]:
    """Returns the rows of a paper's table by their title; none for what is no paper's table."""
    if not (cells.TABLES / f"{folder}.yaml").exists():
        return {}
    table = cells.load_table(folder)
    return {report.row_title(table, row): row for row in table["rows"]}


def place_cells(folder: str, table: list[list[str]], printed: Printed) -> Iterator[Place]:
    """Yields (label, heading, addresses, cell) of a printed table."""
    titles, above = row_names(folder), ""
    headings, times = table[0][1:], dict.fromkeys(table[0], 0)
    columns = []
    for heading in headings:
        name = printed.columns.get(heading, heading)
        columns.append(name if isinstance(name, str) else name[times[heading]])
        times[heading] += 1
    for label, *texts in table[1:]:
        row = printed.rows.get(label, titles.get(label, label.partition(",")[0]))
        if row is None:
            continue
        above, row = (above if "@" in row else row), row.replace("@", above)
        assert len(texts) == len(columns), label
        for heading, column, text in zip(headings, columns, texts, strict=True):
            if "{}" in row:
                addresses = [row.replace("{}", column)]
            elif "{}" in column:
                addresses = [column.format(*row.split(", "))]
            elif printed.across:
                addresses = [f"{one}, {row}" for one in column.split(" / ")]
            else:
                addresses = [f"{one}, {column}" for one in row.split(" / ")]
            yield label, heading, addresses, text


def find_record(records: dict, address: str) -> dict[str, str]:
    """Returns the record at an address, an empty one if there is none."""
    row, names = address.split(", ")
    if " - " in names:
        one, other = (float(records[row, name]["mean"]) for name in names.split(" - "))
        return {"mean": str(one - other), "sd": OF_PAIRS}
    if row.startswith("("):
        return {"mean": records.get((row[1:-1], names), {}).get("published", "")}
    some = [records[row, name] for name in names.split(" or ") if (row, name) in records]
    return next((one for one in some if one["mean"]), some[0] if some else {"mean": ""})


def is_rounded(text: str, value: float) -> bool:
    """Returns whether `text` is `value` to the digits it has; a tie may go either way."""
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-6


def compare_number(records: dict, label: str, address: str, text: str) -> list[str]:
    """Returns what is wrong with one number of a cell."""
    record, match = find_record(records, address), NUMBER.fullmatch(text)
    if not match or not record["mean"]:
        return [f"{address} is {record['mean'] or 'not there'}"]
    mean, sd, seeds, after = match.groups()
    wrong = []
    if not is_rounded(mean, float(record["mean"])):
        wrong.append(f"the mean of {address} is {record['mean']}")
    if sd and record["sd"] != OF_PAIRS:
        if not record["sd"] or not is_rounded(sd, float(record["sd"])):
            wrong.append(f"the sd of {address} is {record['sd'] or 'not there'}")
    row = address.split(", ")[0]
    ran = max(
        [int(one.get("seeds") or 1) for (own, _), one in records.items() if own == row] or [1]
    )
    if int(seeds or ran) != int(record.get("seeds") or ran):
        wrong.append(f"{address} has {record['seeds']} of {ran} seeds")
    if rounds := re.search(r"(\d+) of (\d+) rounds", label):
        if (record["rounds"], record["of_rounds"]) != (after or rounds[1], rounds[2]):
            wrong.append(f"{address} has {record['rounds']} of {record['of_rounds']} rounds")
    return wrong


def compare_cell(records: dict, printed: Printed, place: Place) -> list[str]:
    """Returns what is wrong with one cell, of what `place_cells` yields."""
    label, heading, addresses, cell = place
    match = re.fullmatch(r"(.*?) ?(?:\(([\d., ]+)\))?", cell)
    body, brackets = match.groups() if match else (cell, None)
    wrong = []
    if brackets:
        others = [one.replace("LeNet", name) for one in addresses for name in printed.published_of]
        found = [find_record(records, one).get("published") for one in others or addresses]
        if [float(text) for text in brackets.split(", ")] != [float(one or "nan") for one in found]:
            wrong.append(f"published is {found}")
    texts = [] if body in NONE else BETWEEN.split(body)
    if body in NONE:
        there = [one for one in addresses if find_record(records, one)["mean"]]
        wrong += [f"{one} was run" for one in there]
    elif len(texts) != len(addresses):
        wrong.append(f"expected {len(addresses)} numbers")
    else:
        for address, text in zip(addresses, texts, strict=True):
            wrong += compare_number(records, label, address, text)
    return [f"{label} | {heading} | {cell}: {one}" for one in wrong]


def listed_tables() -> Iterator[tuple[str, str, list[list[str]], Printed]]:
    """Yields (page, folder, printed table, its names) of all that are compared."""
    for folder, tables in PRINTED.items():
        page = RESULTS / folder / "README.md"
        there = read_tables(page.read_text(encoding="utf-8"))
        assert len(there) == len(tables), f"{page}: list its tables in PRINTED"
        for table, printed in zip(there, tables, strict=True):
            if isinstance(printed, Printed):
                yield f"{folder}/README.md", folder, table, printed
    for page, label, folder, printed in REPEATED:
        there = read_tables((ROOT / page).read_text(encoding="utf-8"))
        (table,) = [t for t in there if label in [line[0] for line in t]]
        yield page, folder, table, printed


def compared_cells() -> Iterator[tuple[str, dict, Printed, Place]]:
    """Yields (page, records, names, place) of every cell that is compared."""
    for page, folder, table, printed in listed_tables():
        records = read_records(folder)
        for place in place_cells(folder, table, printed):
            _, heading, addresses, _ = place
            asked = re.fullmatch(r"(\d+) rounds", heading)  # of a run that may have gone on
            ran = find_record(records, addresses[0]).get("rounds")
            if (asked is None or asked[1] == ran) and (folder, addresses[0]) not in COMPUTED:
                yield page, records, printed, place


def test_every_folder_is_listed():
    """A new folder says how its table maps to its CSV."""
    assert {path.parent.name for path in RESULTS.glob("*/README.md")} == {*PRINTED, *NOT_BY_PAPER}


def test_printed_cells_are_those_of_the_csv():
    wrong = [
        f"{page}: {line}"
        for page, records, printed, place in compared_cells()
        for line in compare_cell(records, printed, place)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_changed_digit_is_noticed():
    """Of every number in every cell, one at a time: a tie in the last digit stays one apart."""
    tried, missed = 0, []
    for page, records, printed, (label, heading, addresses, cell) in compared_cells():
        known = cell
        if find_record(records, addresses[0]).get("sd") == OF_PAIRS:
            known = cell.partition(" ± ")[0]
        for end in (match.end() for match in re.finditer(r"[\d.]*\d", known)):
            changed = cell[: end - 1] + str((int(cell[end - 1]) + 5) % 10) + cell[end:]
            tried += 1
            if not compare_cell(records, printed, (label, heading, addresses, changed)):
                missed.append(f"{page}: {label} | {heading}: {changed}")
    assert tried > 1500 and not missed, f"{tried} tried\n" + "\n".join(missed)


@pytest.mark.parametrize("page, folder, sentence, expected", SAID, ids=range(len(SAID)))
def test_sentences_say_what_the_csv_has(page, folder, sentence, expected):
    records = read_records(folder)

    def value(row: str, column: str) -> float:
        name = row.removeprefix("sd of ")
        return float(records[name, column]["mean" if name == row else "sd"])

    path = ROOT / page if page else RESULTS / folder / "README.md"
    text = " ".join(path.read_text(encoding="utf-8").split())
    words = r"[^|]*?" if sentence.startswith("|") else ""  # that stand around it in a table
    pattern = re.escape(sentence).replace(r"\{\}", rf"{words}(-?\d+(?:\.\d+)?)")
    match = re.search(pattern.replace(r"\ \|", rf"{words}\ \|"), text)
    assert match, f"{path}: {sentence!r} is not there"
    numbers = expected(value)
    assert len(match.groups()) == len(numbers)
    for text, number in zip(match.groups(), numbers, strict=True):
        assert is_rounded(text, number), f"{path}: {sentence!r}: {text} is {number}"


def test_findings_of_data_that_move_say_what_the_cells_have():
    with (RESULTS / "cflbench" / "cells.csv").open(newline="", encoding="utf-8") as file:
        here = {c["method"]: c for c in csv.DictReader(file) if c["setting"] == "mnist-swaps"}
    page = (ROOT / "docs" / "guides" / "findings.md").read_text(encoding="utf-8")
    said = re.search(
        r"Fielding by gradients \(([\d.]+) below known groups\), FedDrift \(([\d.]+)\) and IFCA"
        r" with fine-tuning \(([\d.]+)\)",
        page,
    )
    assert said
    for text, name in zip(said.groups(), ("Fielding", "FedDrift", "IFCA+fine-tuning"), strict=True):
        gap = float(here["Known groups"]["score"]) - float(here[name]["score"])
        assert is_rounded(text, 100 * gap), f"{name} is {100 * gap}"
    sent = {name: float(cell["megabytes"]) for name, cell in here.items()}
    assert "a sixth more than FedAvg sends" in page
    assert round(1 / (sent["Fielding"] / sent["FedAvg"] - 1)) == 6
