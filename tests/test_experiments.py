"""conf/experiment: every published table composes, is whole and has the papers' numbers."""

import hydra
import pytest

from fedjax_cfl.cli.overrides import CONF, check_overrides
from fedjax_cfl.papers import cells

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_compose(name):
    """The experiment as it is, and every override of its rows and columns at least once."""
    node, seen, asked = cells.load_table(CONF, name), set(), [[]]
    rows = [entry for entry in node["rows"].values() if "runs" not in entry]
    columns = list(node.get("columns", {}).values()) or [[]]
    for i in range(max(len(rows), len(columns))):
        overrides = [*rows[i % len(rows)]["overrides"], *columns[i % len(columns)]]
        if not seen.issuperset(overrides):
            asked.append(overrides)
            seen.update(overrides)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        for overrides in asked:
            settings = check_overrides([f"experiment={name}", *overrides])
            assert "paper" not in settings, "published numbers are no setting of a run"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_whole(name):
    """Rows name known columns, values are numbers, and the head of the file says
    command, time and what to expect.
    """
    node = cells.load_table(CONF, name)
    for entry in node["rows"].values():
        if "runs" in entry:  # of a row that has its own
            assert (
                set(entry) <= {"runs", "measure", "title", "published"}
                and "overrides" in node["rows"][entry["runs"]]
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
    assert cells.load_table(CONF, name)["rows"][row]["published"].get(column) == value
