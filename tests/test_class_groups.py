"""The data of FLUX's and CLoVE's tables: who has which classes and labels, by brute force; the
published numbers, and rows that are the mean of others.
"""

import json

import numpy as np
import pytest
from conftest import one_line
from papers import cells, report

import fedjax_cfl as cfl
from fedjax_cfl.cli.settings import resolve_settings
from fedjax_cfl.data import concept, graded
from fedjax_cfl.data.partition import class_groups

CLASSES = 10
POOL = cfl.Pool(
    np.zeros((70_000, 1), np.float32), np.tile(np.arange(CLASSES), 7000).astype(np.int32), CLASSES
)
# of every level 2, 5, 8 of the specification: known association
FASHION = {
    "FedAvg": (73.3, 66.1, 54.1), "IFCA": (75.8, 72.8, 65.2), "FeSEM": (75.9, 71.5, 66.2),
    "CFL": (73.8, 66.6, 54.6), "FedDrift": (78.4, 80.6, 82.6), "FedEM": (69.5, 52.0, 41.8),
    "FedRC": (69.3, 51.7, 36.5), "pFedMe": (79.7, 82.4, 84.6), "APFL": (81.1, 81.5, 83.8),
    "FLUX": (79.7, 79.2, 80.0), "FLUX-prior": (80.5, 81.9, 84.2),
}  # fmt: skip
MNIST = {
    "FedAvg": (89.4, 80.9, 69.4), "IFCA": (92.5, 83.6, 76.0), "FeSEM": (91.2, 87.4, 83.2),
    "CFL": (89.7, 81.4, 69.5), "FedDrift": (94.8, 89.0, 89.6), "FedEM": (73.8, 35.8, 31.1),
    "FedRC": (73.8, 35.6, 26.1), "pFedMe": (95.0, 95.6, 96.1), "APFL": (95.6, 95.5, 95.4),
    "FLUX": (95.3, 93.4, 88.4), "FLUX-prior": (95.8, 95.7, 95.9),
}  # fmt: skip


def deal(**given):
    held = class_groups(POOL, seed=3, **{"test_fraction": 0.2} | given)
    assert len(set(held.sample)) == len(held.sample)  # no sample twice
    own = [np.bincount(POOL.y[held.sample[held.owner == k]], minlength=10) for k in range(25)]
    return held, np.array(own)


def compose(row):
    """Returns the settings of a row of CLoVE's table."""
    given = cells.load_table("clove_table")["rows"][row]["overrides"]
    return resolve_settings(["experiment=clove_table", *given, "algorithm=clove"])


def make_partition(config, **other):
    given = {n: v for n, v in config["partition"].items() if not n.startswith("_")} | other
    return class_groups(POOL, **given)


SETTINGS = [  # groups, clients, samples of each
    ("203", 5, 25, 625),
    ("201", 5, 25, 625),
    ("202", 5, 25, 625),
    ("501", 10, 50, 625),
    ("301", 4, 40, 625),
    ("111", 4, 20, 1250),
]


@pytest.mark.parametrize("row, groups, clients, size", SETTINGS)
def test_clients_have_the_classes_of_clove_s_settings(row, groups, clients, size):
    config = compose(f"MNIST-exp{row}")
    held = make_partition(config)
    assert len(set(held.sample)) == len(held.sample) == clients * size
    assert config["dataset"]["groups"] == groups and config["clients_per_round"] == clients
    counts = np.zeros((clients, 10), int)
    for sample, k in zip(held.sample, held.owner, strict=True):
        counts[k, POOL.y[sample]] += 1
    assert (counts.sum(1) == size).all()
    assert (np.bincount(held.owner[held.test]) == size // 5).all()
    sets = [frozenset(np.flatnonzero(own).tolist()) for own in counts]
    by_group = [sets[g] for g in range(groups)]
    for k in range(clients):
        assert held.concept[k] == k % len(config["partition"]["classes"])
    if row == "203":
        assert by_group == [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}]
    if row == "201":
        assert all(len(one & other) == 2 + 2 * (one == other) for one in sets for other in sets)
        assert len(set(sets)) == 5
    if row == "202":
        everything = set(range(10))
        assert by_group == [everything - {left} for left in (9, 0, 1, 2)] + [everything]
    if row == "501":
        main = counts[np.arange(clients), np.arange(clients) % 10] / size
        assert np.abs(main - 0.666).max() < 0.06
        assert abs(main.mean() - 0.666) < 0.01 and counts.min() > 5
    if row in ("301", "111"):
        assert all(len(own) == 10 for own in sets) and not held.concept.any()


def test_labels_are_exchanged_as_in_clove():
    given = compose("MNIST-exp111")["concept"]
    owner = np.repeat(np.arange(20), CLASSES)
    y = np.tile(np.arange(CLASSES), 20)
    _, seen, groups = concept.exchange_pairs(
        y, y, owner, 20, CLASSES, pairs=given["pairs"], even=given["even"]
    )
    assert np.bincount(groups).tolist() == [5, 5, 5, 5]
    swapped = [{(0, 3), (8, 9)}, {(1, 4), (6, 9)}, {(1, 2), (3, 6)}, {(3, 5), (4, 7)}]
    for k, label, now in zip(owner, y, seen, strict=True):
        pair = next((pair for pair in swapped[groups[k]] if label in pair), (label, label))
        assert now == sum(pair) - label
    # as ever: two classes, by the last digit of the client's number
    _, _, old = concept.exchange_pairs(y, y, owner, 20, CLASSES)
    assert old.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2] * 2


def test_shares_of_a_class_are_drawn_until_every_group_has_enough():
    sets = [[0, 1], [0, 1], [0, 2]]
    _, even = deal(clients=3, classes=sets, samples_per_client=3000)
    _, drawn = deal(clients=3, classes=sets, samples_per_client=3000, alpha=0.5)
    # a third of class 0, half of class 1
    assert abs(even[0, 0] - 1200) < 60 and abs(drawn[0, 0] - 1200) > 120
    # so many that only even shares serve all of them: 7000 samples a class
    held, _ = deal(clients=5, classes=[[0, 1]] * 5, samples_per_client=2800, alpha=0.1)
    assert len(held.sample) == 14_000


def test_what_the_data_cannot_serve_is_refused():
    given = {"clients": 4, "samples_per_client": 10, "classes": [[0], [1]]}
    one_line("a client would have 3500", deal, **given | {"samples_per_client": 4000})
    one_line("partition.classes=10", deal, **given | {"classes": [[0], [10]]})
    for classes in ([], [[]], [0, 1], [[-1]], [[0.5]]):
        one_line("partition.classes", deal, **given | {"classes": classes})
    one_line("a client would have", graded.class_subsets, POOL, clients=10, samples_per_client=8000)


def test_clients_of_subsets_have_so_many_samples():
    held = graded.class_subsets(POOL, clients=10, level=8, samples_per_client=375)
    assert (np.bincount(held.owner) == 375).all() and len(set(held.sample)) == 3750
    for k in range(10):
        assert len(set(POOL.y[held.sample[held.owner == k]])) == 3


def test_more_patterns_than_clients_are_drawn():
    x = np.random.RandomState(0).randint(1, 200, (10, 6, 6)).astype(np.uint8)
    drawn = []
    for seed in range(30):
        seen, _, which = graded.graded(
            x, np.arange(10), np.arange(10), 10, 10, shift="x", level=8, seed=seed
        )
        drawn += which.tolist()
        for k in range(10):
            wanted = graded.turn(x[k : k + 1], 72.0 * (which[k] % 5))[0]
            plain = graded.COLOURS[which[k] // 5]
            np.testing.assert_array_equal(seen[k, ..., (plain + 1) % 3], wanted)
            assert (seen[k, ..., plain] == 255).all()
    assert set(drawn) == set(range(15)) and len(set(drawn[:10])) < 10


@pytest.mark.parametrize("data, numbers", [("Fashion", FASHION), ("MNIST", MNIST)])
def test_published_numbers_of_flux(data, numbers):
    rows = cells.load_table("flux_table")["rows"]
    for place, level in enumerate((2, 5, 8)):
        row = rows[f"{data}-L{level}"]
        assert row["published"] == {name: values[place] for name, values in numbers.items()}
        shifts = [rows[name]["overrides"] for name in row["runs"]]
        assert [f"partition.level={level}" in own for own in shifts] == [False, True, False, False]
        assert [f"concept.level={level}" in own for own in shifts] == [True, False, True, True]


def test_a_row_is_the_mean_of_rows_over_the_seeds_that_all_have(tmp_path):
    table = {
        "title": "t", "measure": "macro_accuracy", "scale": 100, "columns": {"A": [], "B": []},
        "rows": {"mean": {"runs": ["one", "two"], "published": {"A": 50.0}},
                 "one": {"overrides": []}, "two": {"overrides": []}},
    }  # fmt: skip
    found = {}
    for row, column, values in [
        ("one", "A", (0.2, 0.4, 0.9)), ("two", "A", (0.6, 0.5)), ("one", "B", (0.7,)),
    ]:  # fmt: skip
        for seed, value in enumerate(values):
            folder = tmp_path / row / column / f"seed{seed}"
            folder.mkdir(parents=True)
            line = {"round": 1, "accuracy": value, "macro_accuracy": value}
            (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            found.setdefault((row, column), []).append(folder)
    records = {(r["row"], r["column"]): r for r in report.collect_records(table, found)}
    assert records["mean", "A"]["mean"] == pytest.approx(42.5)  # of 40 and 45
    assert records["mean", "A"]["sd"] == pytest.approx(12.5**0.5)
    assert records["mean", "A"]["runs"] == 2
    assert records["one", "A"]["mean"] == pytest.approx(50) and records["one", "A"]["runs"] == 3
    assert records["mean", "B"]["runs"] == 0  # the other row has not run
    text = report.format_cell(table, records["mean", "A"])
    assert text == "42.5 ± 3.5 (50.0)"
    chosen = list(cells.make_cells("t", table, tmp_path, ["mean"], ["A"], [0], []))
    assert [cell.row for cell in chosen] == ["one", "two"]
