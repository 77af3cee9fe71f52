"""The experiments of the FeSEM paper and what they need: rows that share runs,
CIFAR-10, CelebA, the map of local models.
"""

import json
import os

import jax
import numpy as np
import pytest
from conftest import jit_as_users_do, with_execution
from matplotlib.image import imread
from papers import cells as paper_cells
from papers import fesem_fig3, figures, report
from papers.cells import load_table, row_columns
from papers.measures import compute_measures
from papers.report import collect_records
from PIL import Image

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fesem.start import ClientModels
from fedjax_cfl.data import partition
from fedjax_cfl.data.datasets import download
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR
from fedjax_cfl.data.datasets.images import CIFAR, CIFAR_PART, cifar10
from fedjax_cfl.data.datasets.leaf_sets import celeba
from fedjax_cfl.errors import InputError
from fedjax_cfl.models import convolution, layers
from fedjax_cfl.runs.checkpoint import save
from fedjax_cfl.runs.results import METRICS_FILE

real = pytest.mark.skipif(
    not os.environ.get(DATA_ENV_VAR), reason=f"real data: {DATA_ENV_VAR} is not set"
)
SHARED = {
    "title": "T",
    "scale": 100,
    "columns": {"Avg": ["algorithm=fedavg"], "SEM": ["algorithm=fesem"]},
    "rows": {
        "A": {
            "overrides": ["dataset=a"],
            "columns": ["Avg", "SEM"],
            "measure": "final_accuracy",
            "published": {"SEM": 90.3},
        },
        "A-F1": {
            "title": "A: micro-F1",
            "runs": "A",
            "measure": "weighted_macro_f1",
            "published": {"SEM": 70.6},
        },
        "A-index": {"runs": "A", "measure": "ari"},
        "A-MB": {"runs": "A", "measure": "megabytes"},
        "B": {"overrides": ["dataset=b"]},
    },
}
LAST = {
    "accuracy": 0.5,
    "weighted_macro_f1": 0.25,
    "ari": 0.125,
    "bytes_down": 3_000_000,
    "bytes_up": 1_500_000,
    "wall_s": 2.0,
}


def finished(folder, *, rounds=2, **numbers):
    """Writes the files of a finished run."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("dataset: {rounds: 4}")
    rows = [{"round": r, **LAST, **numbers} for r in range(1, rounds + 1)]
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"overrides": []}))
    return folder


# rows that share runs


def test_rows_that_share_runs_have_one_cell_together(tmp_path):
    cells = list(
        paper_cells.make_cells("fake", SHARED, tmp_path, ["A-F1", "A", "A-MB"], None, [0], [])
    )
    assert [(cell.row, cell.column) for cell in cells] == [("A", "Avg"), ("A", "SEM")]
    assert cells[1].folder == tmp_path / "A" / "SEM" / "seed0" and "dataset=a" in cells[1].overrides
    assert [
        cell.row
        for cell in paper_cells.make_cells("fake", SHARED, tmp_path, ["A-F1"], ["SEM"], [0], [])
    ] == ["A"]


def test_rows_that_share_runs_show_their_own_measure(tmp_path):
    folder = finished(tmp_path / "A" / "SEM" / "seed0")
    records = collect_records(SHARED, {("A", "SEM"): [folder]})
    found = {(record["row"], record["column"]): record for record in records}
    values = {row: found[row, "SEM"]["mean"] for row in ("A", "A-F1", "A-index", "A-MB")}
    assert values == pytest.approx({"A": 50.0, "A-F1": 25.0, "A-index": 0.125, "A-MB": 4.5})
    assert found["A-F1", "SEM"]["published"] == 70.6 and found["A-F1", "Avg"]["runs"] == 0
    assert report.format_cell(SHARED, found["A-F1", "SEM"]) == "25.0 (70.6)"
    assert report.format_cell(SHARED, found["A-index", "SEM"]) == "0.125"
    assert (
        report.format_finished_cell(SHARED, "A", [folder])
        == "final_accuracy 50.0, weighted_macro_f1 25.0, ari 0.125, megabytes 4.5"
    )
    assert report.format_finished_cell(SHARED, "B", [folder]) == "50.0"
    report.write(SHARED, records, tmp_path, "command")
    text = (tmp_path / "table.md").read_text()
    assert "| A: micro-F1 | 25.0 (70.6) |" in text and "| B |" not in text
    assert text.count("2 of 4 rounds") == 1  # said of the runs, not of each measure
    figures.plot(SHARED, records, tmp_path / "plot.png")
    assert imread(tmp_path / "plot.png").std() > 0.01


def test_figures_draw_shared_runs_once(tmp_path):
    found = {("A", "SEM"): [finished(tmp_path / "seed0")]}
    assert list(figures.read_cells(SHARED, found)) == ["A"]
    assert report.recorded_rows(SHARED, collect_records(SHARED, found)) == [
        "A",
        "A-F1",
        "A-index",
        "A-MB",
    ]


@pytest.mark.parametrize(
    "name,row,column,value",
    [
        ("fesem_table1", "FEMNIST", "FeSEM-4", 90.3),
        ("fesem_table1", "FEMNIST-macro-F1", "FedAvg", 45.4),
        ("fesem_table1", "CelebA-micro-F1", "FedAvg", 78.0),
        ("fesem_table1", "CelebA-macro-acc", "FeSEM-MA-3", 85.1),
        ("fesem_table3", "MNIST-micro-F1", "FeSEM-MA-3", 94.2),
        ("fesem_table3", "CIFAR-10", "FeSEM-3", 59.3),
        ("fesem_fig2", "FEMNIST", "FeSEM-2", 84.8),
    ],
)
def test_published_numbers(name, row, column, value):
    assert load_table(name)["rows"][row]["published"][column] == value


@pytest.mark.parametrize("name", ["fesem_table1", "fesem_table3", "planted_clusters"])
def test_shown_measures_exist(name):
    node = load_table(name)
    known = {*compute_measures([]), "megabytes", "seconds"}
    for row in node["rows"]:
        assert report.cell_measure(node, row, row_columns(node, row)[0]) in known


# CIFAR-10


def records(count, seed):
    """Returns images [n, 32, 32, 3] and labels [n], and the bytes of a file of the
    binary version that holds them.
    """
    rng = np.random.default_rng(seed)
    x, y = (
        rng.integers(0, 256, (count, 32, 32, 3), np.uint8),
        rng.integers(0, 10, count).astype(np.uint8),
    )
    return (
        x,
        y,
        b"".join(
            bytes([label]) + image.transpose(2, 0, 1).tobytes()
            for image, label in zip(x, y, strict=True)
        ),
    )


def test_cifar10_binary_version(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    parts = [records(3 + i, seed=i) for i in range(6)]
    (tmp_path / CIFAR[0]).parent.mkdir(parents=True)
    for path, (_, _, content) in zip(CIFAR, parts, strict=True):
        (tmp_path / path).write_bytes(content)
    pool = cifar10()
    np.testing.assert_array_equal(pool.x, np.concatenate([x for x, _, _ in parts]))
    np.testing.assert_array_equal(pool.y, np.concatenate([y for _, y, _ in parts]))
    assert pool.test.tolist() == [False] * (len(pool.y) - 8) + [True] * 8
    (tmp_path / CIFAR[5]).write_bytes(parts[5][2][:-1])
    with pytest.raises(
        InputError,
        match=(r"test_batch.bin: size of the data is 24583 bytes, expected records of 3073 bytes"),
    ):
        cifar10()


def test_part_of_cifar10(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    with pytest.raises(
        InputError,
        match=r"cifar10_clients00-21.npz; put it into .* a folder named in FEDJAX_CFL_DATA",
    ):
        cifar10()
    (tmp_path / "cifar10").mkdir()
    x, y, _ = records(5, seed=0)
    np.savez(tmp_path / CIFAR_PART, images=x, labels=y)
    pool = cifar10()
    assert pool.x.shape == (5, 32, 32, 3) and pool.test is None and pool.num_classes == 10
    np.savez(tmp_path / CIFAR_PART, images=x[:, :28, :28, 0], labels=y)
    with pytest.raises(InputError, match=r"expected \[N, 32, 32, 3\] uint8"):
        cifar10()


@real
def test_real_cifar10():
    pool = cifar10()
    assert (
        pool.x.shape[1:] == (32, 32, 3)
        and pool.x.dtype == np.uint8
        and len(np.unique(pool.y)) == 10
    )
    if pool.test is None:  # the part
        assert np.bincount(pool.y).tolist() == [
            729,
            845,
            1097,
            2041,
            595,
            972,
            1925,
            1742,
            832,
            1464,
        ]
    held = partition.dirichlet(pool, clients=100, alpha=0.5, min_samples=10, test_fraction=0.2)
    assert held.owner.max() == 99


# CelebA


@pytest.fixture
def faces(tmp_path, monkeypatch):
    """Four celebrities of 178x218 images, whose brightness says who smiles; one of them
    has a single image.
    """
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    images = tmp_path / "celeba" / "data" / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    rng, number = np.random.default_rng(0), 0
    for part, counts in {"train": {"12": 4, "7": 3, "900": 1}, "test": {"12": 1, "31": 2}}.items():
        data = {}
        for user, count in counts.items():
            names, labels = (
                [f"{number + i:06d}.jpg" for i in range(count)],
                [i % 2 for i in range(count)],
            )
            for name, label in zip(names, labels, strict=True):
                pixels = rng.integers(0, 40, (218, 178, 3)) + 200 * label
                Image.fromarray(pixels.astype(np.uint8)).save(images / name)
            data[user], number = {"x": names, "y": labels}, number + count
        shard = {"users": list(counts), "num_samples": list(counts.values()), "user_data": data}
        (tmp_path / "celeba" / "data" / part).mkdir()
        (tmp_path / "celeba" / "data" / part / f"all_data_{part}.json").write_text(
            json.dumps(shard)
        )
    return tmp_path / "celeba" / "data"


def test_celeba(faces):
    pool = celeba()
    assert (
        pool.x.shape == (10, 84, 84, 3)
        and pool.x.dtype == np.uint8
        and pool.test is None
        and pool.num_classes == 2
    )
    assert np.bincount(pool.client).tolist() == [5, 2, 3]  # "12", "31", "7"; "900" has one image
    np.testing.assert_array_equal(pool.x.mean(axis=(1, 2, 3)) > 128, pool.y == 1)
    kept = celeba(keep_split=True)
    assert kept.test.sum() == 3 and np.bincount(
        partition.by_user(pool, test_fraction=0.2).owner
    ).tolist() == [5, 2, 3]
    assert len(np.unique(celeba(users=2).client)) == 2


@pytest.mark.nightly
def test_celeba_cnn_learns_smiles(faces):
    """The paper's model on images of CelebA's shape."""
    pool = celeba()
    data = cfl.federate(pool, partition.by_user(pool, test_fraction=0.2))
    task, local = (
        cfl.as_task(cfl.models.CelebaCNN(2), (84, 84, 3), 2),
        cfl.Local(lr=0.003, epochs=1, batch_size=4, execution=cfl.make_execution(width=1)),
    )
    algorithm, key = (
        cfl.algorithms.fedavg(
            task,
            with_execution(local, mesh=cfl.make_mesh(1)),
            cfl.select.full_participation(),
        ),
        jax.random.key(0),
    )
    loss = jax.jit(
        lambda state: task.loss(
            jax.tree.map(lambda leaf: leaf[0], state.groups), data.x, data.y
        ).mean()
    )
    state, step = jax.jit(algorithm.init)(key, data), jax.jit(algorithm.round)
    before = loss(state)
    for _ in range(3):
        state, info = step(key, state, data)
        assert int(info.fault_counts.nonfinite) == 0
    assert loss(state) < 0.9 * before


@pytest.mark.nightly
def test_pooling_after_a_norm_has_the_same_gradient_compiled():
    """Pooling must not ask which input equals the maximum: a compiler may compute the
    input anew for that, and round another way.
    """
    norm, x = (
        layers.BatchStatNorm(),
        np.random.default_rng(0).normal(size=(4, 21, 21, 3)).astype(np.float32),
    )
    params = {
        "params": {"scale": np.float32([1.1, 0.9, 1.3]), "bias": np.float32([0.1, -0.2, 0.3])}
    }
    gradient = jax.grad(
        lambda x: jax.nn.relu(convolution.max_pool(norm.apply(params, x), "same")).mean()
    )
    with jax.disable_jit():
        expected = gradient(x)
    for compiled in (jax.jit, jit_as_users_do):
        np.testing.assert_allclose(compiled(gradient)(x), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    "field,value,says",
    [
        ("x", "../raw/secret.jpg", "expected the name of an image file"),
        ("x", 5, "entry 1 of x is 5, expected the name of an image file"),
        ("x", "999999.jpg", "999999.jpg: file cannot be read"),
        ("y", 2, "entry 1 of y"),
        ("y", True, "entry 1 of y"),
    ],
)
def test_bad_celeba_entries(faces, field, value, says):
    path = faces / "train" / "all_data_train.json"
    shard = json.loads(path.read_text())
    shard["user_data"]["12"][field][1] = value
    path.write_text(json.dumps(shard))
    with pytest.raises(InputError, match=says) as caught:
        celeba()
    assert "\n" not in str(caught.value)


def test_bad_celeba_files(faces):
    image = faces / "raw" / "img_align_celeba" / "000001.jpg"
    for content in (b"", b"GIF89a", image.read_bytes()[:200]):
        image.write_bytes(content)
        with pytest.raises(InputError, match=r"000001.jpg: image cannot be read"):
            celeba()
    image.unlink()
    os.mkfifo(image)  # reading it would never end
    with pytest.raises(InputError, match=r"000001.jpg: file cannot be read \(not a regular"):
        celeba()
    (faces / "raw").rename(faces / "raw2")
    with pytest.raises(
        InputError,
        match=r"celeba/data/raw/img_align_celeba; put it into .* a folder named in FEDJAX_CFL_DATA",
    ):
        celeba()
    with pytest.raises(InputError, match=r"dataset.source.users=0"):
        celeba(users=0)


# the map of local models


def test_projection_is_pca():
    rng = np.random.default_rng(0)
    models, centers = rng.normal(size=(20, 30)) * np.linspace(3, 0.1, 30), rng.normal(size=(3, 30))
    points, placed, explained = fesem_fig3.find_components(
        [(models[:, :11], centers[:, :11]), (models[:, 11:], centers[:, 11:])]
    )
    apart = models - models.mean(axis=0)
    _, values, directions = np.linalg.svd(apart, full_matrices=False)
    np.testing.assert_allclose(np.abs(points), np.abs(apart @ directions[:2].T), atol=1e-8)
    np.testing.assert_allclose(
        np.abs(placed), np.abs((centers - models.mean(axis=0)) @ directions[:2].T), atol=1e-8
    )
    np.testing.assert_allclose(explained, values[:2] ** 2 / (values**2).sum())


def test_map_is_drawn_from_the_last_checkpoint(tmp_path, toy, linear, local):
    algorithm = cfl.algorithms.fesem(linear, local, cfl.select.full_participation(), m=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), toy)
    assert isinstance(state.rows["models"], ClientModels)
    folder = finished(tmp_path / "run")
    save(folder / "checkpoints", 3, (state, {"owner": toy.owner}), {}, {})
    shown = fesem_fig3.read_map(folder)
    known = np.asarray(state.rows["models"].known)
    assert len(shown.points) == known.sum() < len(known) and shown.sizes.sum() == known.sum()
    assert 0 < shown.explained[1] <= shown.explained[0] <= 1
    np.testing.assert_array_equal(shown.group, np.asarray(state.assignment)[known])
    fesem_fig3.draw_figures(None, None, SHARED, {("A", "SEM"): [folder]}, tmp_path / "figure.png")
    assert imread(tmp_path / "figure.png").std() > 0.01
    with pytest.raises(InputError, match="no checkpoint with stored local models"):
        fesem_fig3.read_map(tmp_path)
