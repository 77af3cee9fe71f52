"""conf/experiment: every published table composes, is whole and has the papers' numbers."""

import numpy as np
import pytest
from conftest import others_nightly
from papers import cells
from scipy.stats import wasserstein_distance

from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import resolve_settings
from fedjax_cfl.clustering.migrate import counts_as_samples

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
TABLES = sorted(path.stem for path in cells.TABLES.glob("*.yaml"))


@pytest.mark.parametrize("name", others_nightly(EXPERIMENTS, EXPERIMENTS[1::12]))
def test_experiments_compose(name):
    """The experiment as it is, and every override of its rows and columns at least once."""
    node, seen, asked = cells.load_table(name), set(), [[]]
    rows = [entry for entry in node["rows"].values() if "runs" not in entry]
    columns = list(node.get("columns", {})) or [""]
    for i in range(max(len(rows), len(columns))):
        row, column = rows[i % len(rows)], columns[i % len(columns)]
        if "columns" in row:  # those that it has
            column = row["columns"][i % len(row["columns"])]
        own, values = cells.split_column(node, column)
        overrides = [*row["overrides"], *own, *(text.partition(",")[0] for text in values)]
        if not seen.issuperset(overrides):
            asked.append(overrides)
            seen.update(overrides)
    for overrides in asked:
        config = resolve_settings([f"experiment={name}", *overrides])
        # a run carries settings, and no published numbers
        assert not config.get("paper") and node["title"] not in str(config)


def test_every_experiment_has_its_table():
    assert EXPERIMENTS == TABLES
    assert {cells.load_table(name).get("experiment", name) for name in TABLES} <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_whole(name):
    """Rows name known columns, values are numbers, and the head of the experiment says
    command, time and what to expect.
    """
    node = cells.load_table(name)
    for entry in node["rows"].values():
        if "runs" in entry:  # of a row that has its own
            assert set(entry) <= {"runs", "measure", "title", "published"} and all(
                "overrides" in node["rows"][row] for row in np.atleast_1d(entry["runs"])
            )
        known = [*node.get("columns", {}), *node.get("measures", {})]
        assert set(entry.get("published", {})) | set(entry.get("columns", [])) <= set(known)
        assert all(isinstance(value, int | float) for value in entry.get("published", {}).values())
    head = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert f"fedjax-cfl paper {name}" in head and "# Time: " in head and "# Expect " in head


@pytest.mark.parametrize(
    "name,row,column,value",
    [
        ("flexcfl_table1", "1-class", "discrepancy variance", 0.11),
        ("flexcfl_table1", "10-classes", "rounds to 85 %", 4),
        ("flexcfl_table3", "MNIST-MLP", "FeSEM", 89.8),
        ("flexcfl_table3", "FEMNIST-MLP", "RCC", 93.9),
        ("flexcfl_table3", "Synthetic-MCLR", "RAC", None),
        ("flexcfl_table3", "Sent140-LSTM", "FlexCFL-eta0.1", 77.7),
        ("flexcfl_table4", "MNIST-MCLR-swap-all", "IFCA", 64.5),
        ("flexcfl_table4", "MNIST-MLP-ref-incremental", "FedGroup", 95.6),
        ("flexcfl_table4", "Synthetic-MCLR-swap-part", "IFCA", 96.8),
        ("flexcfl_table4", "Sent140-GRU-incremental", "FlexCFL-eta5", 71.8),
        ("flexcfl_fig6", "b-FEMNIST-MLP-swap-part", "FlexCFL-eta5", 81.5),
        ("fedgroup_table3", "MNIST-MCLR", "FGP-EDC", 96.1),
        ("fedgroup_table3", "Sent140-LSTM", "FGP-MADC", 75.4),
    ],
)
def test_published_numbers(name, row, column, value):
    assert cells.load_table(name)["rows"][row]["published"].get(column) == value


@pytest.mark.parametrize("name", ["flexcfl_table3", "flexcfl_table4"])
def test_fashion_mnist_has_its_official_split(name):
    rows = [e for r, e in cells.load_table(name)["rows"].items() if r.startswith("FashionMNIST")]
    assert rows
    for entry in rows:
        config = resolve_settings([f"experiment={name}", *entry["overrides"]])
        assert config["dataset"]["source"]["split"] == "official"
        assert config["partition"]["_target_"].endswith(".ditto")  # which needs it


def test_the_papers_preset_detects_by_eq_9():
    """tau = 0.2 n / C is in samples: only counts taken as samples have that unit."""
    config = resolve_settings(["preset=paper", "algorithm=flexcfl"])
    assert "counts_as_samples" in str(config["algorithm"]["detector"])
    counts, reference = np.array([[9, 0, 3], [6, 3, 3]]), np.array([[6, 3, 3], [6, 3, 3]])
    size = counts.sum(axis=1)
    distance = [
        wasserstein_distance(now, then) for now, then in zip(counts, reference, strict=True)
    ]
    found = np.asarray(counts_as_samples(counts, reference, size))
    assert found.tolist() == (np.array(distance) > 0.2 * size / 3).tolist() == [True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["md_icfl_table4", "md_icfl_table5"])
def test_no_method_of_md_icfl_meets_clients_in_their_order(name):
    """Clients are numbered group by group, so that a round robin would begin with few groups."""
    table = cells.load_table(name)
    for row, entry in table["rows"].items():
        for column in entry.get("columns", ()) if "runs" not in entry else ():
            given = [f"experiment={name}", *entry["overrides"], *table["columns"][column]]
            target = resolve_settings(given)["algorithm"]["select"]["_target_"]
            assert target.endswith((".uniform", ".full_participation")), (row, column)
