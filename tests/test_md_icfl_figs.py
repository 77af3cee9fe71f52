"""The pictures of MD-ICFL: what is read from a finished run, measured and drawn."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.pyplot import imread
from papers import md_icfl_figs
from papers.cells import Cell
from sklearn.datasets import load_digits

import fedjax_cfl as cfl
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.checkpoint import save

KEY = jax.random.key(0)
CLIENTS, TURNS = 8, 2


@pytest.fixture(scope="module")
def data():
    """Eight clients of 100 digits; those of the second half are upside down."""
    images, y = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)[: 100 * CLIENTS]
    owner, half = np.repeat(np.arange(CLIENTS), 100).astype(np.int32), len(x) // 2
    x[half:] = x[half:, ::-1, ::-1]
    pool = cfl.Pool(x, y[: len(x)].astype(np.int32), 10)
    test = np.arange(len(x)) % 10 == 9
    concept = np.arange(CLIENTS, dtype=np.int32) // (CLIENTS // TURNS)
    return cfl.federate(pool, cfl.Partition(np.arange(len(x)), owner, test, concept=concept), None)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A finished run, (folder, config, task, data, local): groups 2 and 1 are those of the
    first and the second half, nobody is in group 3.
    """
    task = cfl.as_task(cfl.models.MLP(10, hidden=(16,)), (8, 8), 10, l2=0.0)
    local = cfl.Local(
        lr=0.1, epochs=1, batch_size=10, execution=cfl.make_execution(cfl.make_mesh(1), 1)
    )
    trained = md_icfl_figs.train_new_models(jax.random.key(5), task, data, local, TURNS)
    halves = [jax.tree.map(lambda leaf, g=g: leaf[g, 0], trained) for g in (1, 0, 0)]
    method = cfl.algorithms.nonfed(task, local, cfl.select.full_participation())
    state = jax.jit(method.init)(KEY, data)
    state = state.replace(
        groups=jax.tree.map(lambda *leaves: jnp.stack(leaves), *halves),
        assignment=jnp.repeat(jnp.array([1, 0], jnp.int32), CLIENTS // 2),
    )
    folder = tmp_path_factory.mktemp("run")
    save(folder / "checkpoints", 3, (state, {}), {}, {})
    rows = [{"round": r, "accuracy": 0.5, "ari": r / 3} for r in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"seed": 0, "algorithm": {"sampling": "back_search"}}
    return folder, config, task, data, local


@pytest.mark.nightly
def test_pseudo_samples_convince_new_models_of_their_own_group(run):
    folder, config, task, data, local = run
    new = md_icfl_figs.train_new_models(KEY, task, data, local, TURNS)
    shown = md_icfl_figs.picture_run(folder, config, task, data, local, new)
    assert shown.turned.tolist() == [1, 0, -1]
    assert shown.samples.shape == (3, 10, 30, 8, 8)
    np.testing.assert_allclose(shown.confidence.sum(-1), 1, atol=1e-5)
    own = shown.confidence.diagonal(axis1=1, axis2=2).mean(1)
    assert own[:2].min() > 0.3  # by chance 0.1
    for j, group in enumerate((1, 0)):  # the other half's models are less sure of them
        model = jax.tree.map(lambda leaf, g=group: leaf[1 - g, 0], new)
        sure = jax.nn.softmax(task.predict(model, shown.samples[j].reshape(-1, 8, 8)))
        assert sure[np.arange(300), np.repeat(np.arange(10), 30)].mean() < own[j]
    # a client is nearest to the group whose model it trained
    assert shown.distance.shape == (CLIENTS, 3) and 0 <= shown.distance.min()
    assert (shown.distance[:4, 1] < shown.distance[:4, 0]).all()
    assert (shown.distance[4:, 0] < shown.distance[4:, 1:].min(1)).all()


@pytest.mark.nightly
def test_figures_are_drawn_for_finished_cells(run, tmp_path):
    folder, *parts = run
    todo = [Cell("R", "A", 0, folder, []), Cell("R", "B", 0, tmp_path / "unfinished", [])]
    found = {("R", "A"): [folder], ("Q", "A"): [folder]}  # nobody asked for the second
    table = {"title": "T", "columns": {"A": [], "B": []}, "rows": {"R": {}, "Q": {}}}
    path = tmp_path / "figure.png"
    md_icfl_figs.draw_figures(lambda overrides: tuple(parts), todo, table, found, path)
    for name in ("figure.png", "confidence.png", "samples.png"):
        assert imread(tmp_path / name).std() > 0.02, name


@pytest.mark.nightly
def test_a_run_without_group_models_is_refused(run, tmp_path):
    with pytest.raises(InputError, match="no checkpoint with the models of groups"):
        md_icfl_figs.read_group_models(tmp_path, run[2])
