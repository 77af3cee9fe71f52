"""Who was in which group at every evaluation: written, read back, followed and drawn."""

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from conftest import call

import fedjax_cfl as cfl
from fedjax_cfl.analysis import flows, plot_groups
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import assignments
from fedjax_cfl.runs.assignments import Assignments, read_assignments

LINE = (
    "dataset.clients=12 clients_per_round=4 rounds=4 local.epochs=1 model=mclr algorithm=ifca"
    " algorithm.m=2 dataset.groups=2 partition=iid concept=rotate discard=none"
    " eval_auxiliary=false"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run."""
    folder = tmp_path_factory.mktemp("assignments")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(patch, f"{LINE} run_dir=run", devices=1) == 0
    return folder / "run"


def test_the_last_evaluation_is_the_table_of_clients(folder):
    run = cfl.load_run(folder)
    found = run.assignments
    assert found is not None and found.concepts is not None
    assert found.rounds.tolist() == [row["round"] for row in run.rows] == [1, 2, 3, 4]
    np.testing.assert_array_equal(found.groups[-1], run.table["group"])
    np.testing.assert_array_equal(found.concepts, np.tile(run.table["concept"], (4, 1)))
    for row, groups in zip(run.rows, found.groups, strict=True):
        sizes = [int((groups == group).sum()) for group in range(2)]
        assert sizes == row["group_sizes"] and (groups < 0).sum() == 12 - sum(sizes)
    assert (found.groups[0] < 0).any() and not (folder / assignments.PART).exists()
    kinds = pyarrow.parquet.read_schema(folder / assignments.ASSIGNMENTS_FILE)
    assert str(kinds.field("group").type.value_type) == "int8"


def test_labels_of_the_clients_are_counted(folder):
    table = cfl.load_run(folder).table
    assert table["labels"].shape == (12, 10)
    np.testing.assert_array_equal(table["labels"].sum(1), table["train_samples"])


def test_damage_is_one_line(folder, tmp_path):
    path = tmp_path / assignments.ASSIGNMENTS_FILE
    whole = (folder / path.name).read_bytes()
    for bad in (whole[:-9], b"garbage", whole.replace(b"group", b"grope")):
        path.write_bytes(bad)
        with pytest.raises(InputError, match="cannot be read"):
            read_assignments(tmp_path)


FIVE = assignments.sample_clients(12, 5, seed=3)


def append(folder: Path, kept: np.ndarray, round: int, *both: np.ndarray) -> None:
    with (folder / assignments.PART).open("a") as part:
        part.write(assignments.format_grouping(round, *(each[kept] for each in both)))


def write(folder: Path, kept: np.ndarray, rounds: range, clients: int = 12) -> None:
    """Appends made-up groups."""
    for t in rounds:
        rng = np.random.default_rng(t)
        append(folder, kept, t, *rng.integers(-1, 3, (2, clients)).astype(np.int32))


def test_a_sample_says_whose_groups_it_has(tmp_path):
    found = []
    for name, most in (("all", 12), ("few", 5), ("none", 0)):
        (tmp_path / name).mkdir()
        kept = assignments.sample_clients(12, most, seed=3)
        write(tmp_path / name, kept, range(1, 4))
        assignments.finish_assignments(tmp_path / name, kept, 12)
        found.append(read_assignments(tmp_path / name))
    everybody, few, none = found
    assert none is None and everybody.clients.tolist() == list(range(12))
    assert few.groups.shape == (3, 5) and np.all(np.diff(few.clients) > 0)
    np.testing.assert_array_equal(few.groups, everybody.groups[:, few.clients])
    np.testing.assert_array_equal(few.concepts, everybody.concepts[:, few.clients])


def test_a_sample_is_drawn_by_the_seed():
    one, same, other = (assignments.sample_clients(1000, 20, seed) for seed in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist() and len(set(one.tolist())) == 20


@pytest.mark.parametrize("largest", [127, 128, 32_768])
def test_group_numbers_of_any_size_come_back(largest, tmp_path):
    clients = np.arange(3)
    groups = np.array([-1, 0, largest], np.int32)
    append(tmp_path, clients, 1, groups, groups[::-1])
    assignments.finish_assignments(tmp_path, clients, 3)
    found = read_assignments(tmp_path)
    assert found.groups.tolist() == [groups.tolist()]
    assert found.concepts.tolist() == [groups[::-1].tolist()]


# followed


def test_groups_keep_their_number_when_the_method_renumbers_them():
    groups = np.array([[0, 0, 0, 1, 1, -1], [1, 1, 0, 0, 0, 0], [2, 2, 0, 0, 1, 1]])
    expected = [[0, 0, 0, 1, 1, -1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2]]
    np.testing.assert_array_equal(flows.match_groups(groups[::-1]), expected[::-1])
    np.testing.assert_allclose(flows.count_moves(np.array(expected)), [0, 1 / 5, 2 / 6])


def test_a_group_without_old_members_is_new():
    groups = np.array([[0, 0, 1, 1], [-1, -1, 0, 0], [3, 3, -1, -1]])
    expected = [[0, 0, 1, 1], [-1, -1, 1, 1], [3, 3, -1, -1]]
    np.testing.assert_array_equal(flows.match_groups(groups[::-1]), expected[::-1])


def test_a_new_group_takes_no_number_that_another_has():
    """From the last evaluation back: group 0 of the one before is new, and 0 and 2 are taken."""
    groups = np.array([[0, 0, 2, 2, -1, -1], [1, 1, 2, 2, 0, 0]])
    expected = [[0, 0, 2, 2, -1, -1], [0, 0, 2, 2, 3, 3]]
    np.testing.assert_array_equal(flows.match_groups(groups[::-1]), expected[::-1])


def test_flows_count_every_client_once():
    rng = np.random.default_rng(0)
    before, after, kind = rng.integers(-1, 4, (3, 500))
    found = flows.count_flows(before, after, kind)
    assert found.clients.sum() == 500
    first = (before == found.source[0]) & (after == found.target[0]) & (kind == found.kind[0])
    assert first.sum() == found.clients[0]


@pytest.mark.parametrize(
    ("groups", "some"),
    [
        ([[0, 0, 0, 0]], False),
        ([[0, 1, 2, 3, 4, 5]], False),
        ([[-1, -1, -1, -1]], False),
        ([[0, 0, 0, 0], [0, 0, 1, 1]], True),
        ([[0, 0, 1]], True),
    ],
    ids=["one model", "a model each", "nobody met", "split later", "three clients"],
)
def test_what_has_groups(groups, some):
    assert flows.has_groups(np.array(groups)) is some


def test_clients_are_coloured_by_what_is_known():
    groups = np.array([[0, 0, 1, 1]])
    truth = np.array([[3, 3, 9, -1]])
    found = Assignments(np.array([1]), np.arange(4), groups, truth)
    labels = np.array([[5, 0], [0, 5], [5, 0], [5, 0]])
    told = flows.choose_classes(found, groups, labels)
    assert told.names == ["true group 3", "true group 9"]
    assert told.numbers.tolist() == [[0, 0, 1, -1]]
    half = found._replace(concepts=np.array([[3, 9, -1, -1]]))
    assert flows.choose_classes(half, groups, labels).names == ["true group 3", "true group 9"]
    less = found._replace(concepts=np.array([[3, -1, -1, -1]]))
    assert flows.choose_classes(less, groups, labels).names == ["label 0", "label 1"]
    assert flows.choose_classes(half, groups, labels, most=2).names[-1] == "true group 9"
    unknown = found._replace(concepts=None)
    assert flows.choose_classes(unknown, groups, labels).names == ["label 0", "label 1"]
    assert flows.choose_classes(unknown, groups, None).names == ["group 0", "group 1"]
    many = flows.choose_classes(found._replace(concepts=np.arange(4)[None]), groups, None, most=2)
    assert many.names[-1] == flows.OTHER and many.numbers.tolist() == [[0, 1, 2, 2]]
    often = found._replace(concepts=np.array([[1, 2, 5, 5]]))
    assert flows.choose_classes(often, groups, None, most=1).names[0] == "true group 5"
    alike = np.array([[5, 0]] * 4)  # labels that tell nobody apart
    assert flows.choose_classes(unknown, groups, alike).names == ["group 0", "group 1"]


def test_snapshots_are_the_nearest_to_even_ones():
    assert flows.choose_snapshots(6, 4).tolist() == [0, 2, 3, 5]
    assert flows.choose_snapshots(3, 4).tolist() == [0, 1, 2]


# drawn


def made_up(clients: int, evaluations: int) -> tuple[Assignments, list[dict]]:
    rng = np.random.default_rng(1)
    truth = rng.integers(3, size=clients)
    groups = np.where(rng.random((evaluations, clients)) < 0.1, (truth + 1) % 3, truth)
    rounds = np.arange(1, evaluations + 1)
    rows = [
        {"round": int(t), "accuracy": 0.5, "ari": 0.3, "shifted_clients": int(t == 3)}
        for t in rounds
    ]
    return Assignments(rounds, np.arange(clients), groups, np.tile(truth, (evaluations, 1))), rows


@pytest.mark.parametrize(("clients", "evaluations"), [(50, 10), (20_000, 100)])
def test_an_alluvial_plot_of_any_size_has_few_parts(clients, evaluations):
    found, rows = made_up(clients, evaluations)
    figure = plot_groups.draw_alluvial(found, rows, None, "title")
    above = figure.axes[0]
    columns = min(evaluations, plot_groups.SNAPSHOTS)
    bands = sum(len(each.get_paths()) for each in above.collections)
    assert 0 < bands <= (columns - 1) * 3 * 3 * 3 + 1
    (drift,) = [line for line in above.lines if line.get_marker() == "v" and line.get_xdata().size]
    assert drift.get_xdata().tolist() == [3]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["true group 0", "true group 1", "true group 2", "clients' data changed"]


def test_what_a_method_has_not_is_not_drawn():
    found, rows = made_up(30, 5)
    alone = found._replace(groups=np.zeros_like(found.groups))
    assert plot_groups.draw_alluvial(alone, rows, None, "") is None
    table = {"group": np.zeros(4, int), "concept": np.array([0, 0, 1, 1]), "client": np.arange(4)}
    assert plot_groups.draw_final_groups(table, "") is None
    split = table | {"group": np.array([0, 0, 1, 1]), "concept": np.full(4, -1)}
    assert plot_groups.draw_final_groups(split, "") is None, "neither truth nor labels are known"


def test_the_heat_map_counts_pairs_in_the_order_of_the_truth():
    group, truth = np.array([4, 4, 4, 2, 2, 7, -1]), np.array([0, 0, 1, 1, 1, 5, 0])
    figure = plot_groups.draw_final_groups({"group": group, "concept": truth}, "")
    words = {
        text.get_position(): text.get_text() for text in figure.axes[0].texts if text.get_text()
    }
    assert words == {(0, 0): "2", (1, 0): "1", (1, 1): "2", (2, 2): "1"}
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["4", "2", "7"]


def test_likeness_of_labels():
    alike = plot_groups.measure_similarity(np.array([[2, 2], [8, 8], [4, 0], [0, 4]]))
    np.testing.assert_allclose(alike[0], [1, 1, 0.5, 0.5])
    assert alike[2, 3] == 0 and np.array_equal(alike, alike.T)
