"""Text by character: LEAF's Shakespeare, its model, and samples that are no characters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_line

import fedjax_cfl as cfl
from fedjax_cfl.cli.build import assemble, resolve_settings
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, locate
from fedjax_cfl.data.datasets.leaf_json import CHARACTERS

TEXT = "the quality of mercy is not strained, it droppeth as the gentle rain from heaven. "
SMALL = "model=char_lstm model.module.hidden=4 model.module.layers=1 clients_per_round=2"


def windows(text: str, length: int = 6) -> dict[str, list[str]]:
    """Returns the windows of a text and the character after each, as LEAF has them."""
    starts = range(len(text) - length)
    return {"x": [text[i : i + length] for i in starts], "y": [text[i + length] for i in starts]}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A data root; returns f(folder of shakespeare/, texts of users) that writes a file there."""
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")

    def write(folder, **users):
        data = {user: windows(text) for user, text in users.items()}
        place = tmp_path / "shakespeare" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "all.json").write_text(json.dumps({"user_data": data}))

    return write


def test_the_last_fifth_of_a_role_is_for_testing(home):
    home("data/all_data", BRUTUS=TEXT[:26], ANTONY=TEXT[30:41], CASCA=TEXT[:7])
    pool = cfl.datasets.shakespeare()
    assert pool.client_names == ("ANTONY", "BRUTUS", "CASCA") and pool.x.shape == (26, 6)
    assert np.bincount(pool.client).tolist() == [5, 20, 1]
    for client, training in ((0, 4), (1, 16), (2, 1)):  # one window alone is for training
        test = pool.test[pool.client == client]
        assert test.tolist() == [False] * training + [True] * (len(test) - training)
    read = "".join(CHARACTERS[int(place)] for place in pool.x[pool.client == 1][0])
    assert read == TEXT[:6] and CHARACTERS[pool.y[pool.client == 1][0]] == TEXT[6]


def test_the_split_of_the_files_is_kept(home):
    home("data/train", BRUTUS=TEXT[:40])
    home("data/test", BRUTUS=TEXT[40:60], CASCA=TEXT[:20])
    pool = cfl.datasets.shakespeare()
    assert pool.test.sum() == 28 and not pool.test[:34].any()
    assert pool.client_names == ("BRUTUS", "CASCA")


def test_no_files(home):
    one_line("LEAF's scripts make it, https://github.com/", cfl.datasets.shakespeare)


def test_the_model_sees_characters_and_not_sizes():
    """Equal embeddings make characters equal; numbers as such have no effect."""
    module = cfl.models.CharLSTM(5, embedding=2, hidden=3, layers=2)
    task = cfl.as_task(module, (4,), 5)
    params = jax.tree.map(jnp.asarray, jax.jit(task.init)(jax.random.key(0)))
    x = jnp.array([[0, 1, 2, 3], [0, 1, 2, 4], [4, 1, 2, 3.0]])
    out = np.asarray(task.predict(params, x))
    assert out.shape == (3, 5) and len(np.unique(out.round(6), axis=0)) == 3
    table = params["embedding"].at[4].set(params["embedding"][3])
    out = np.asarray(task.predict(params | {"embedding": table}, x))
    np.testing.assert_allclose(out[0], out[1], rtol=1e-6)
    one_line("whole numbers are allowed", cfl.as_task, module, (4, 2), 5)


@pytest.mark.parametrize(
    ("x", "more", "says"),
    [
        (np.full((40, 6), 3, np.uint8), "", "uint8 is read as x / 255; store x.astype"),
        (np.full((40, 6), 0.5), "", "x is 0.5 somewhere, expected whole numbers from 0 to 1"),
        (np.full((40, 6), 2), "", "x is 2 somewhere, expected whole numbers from 0 to 1"),
        (np.full((40, 6), -1), "", "x is -1 somewhere"),
        (np.ones((40, 6), int), " dataset.standardize=pool", "reads whole numbers; use none"),
    ],
)
def test_what_are_no_characters_is_refused(x, more, says, home, tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=x, y=np.arange(40) % 2, client=np.arange(40) % 4)
    line = f"dataset=npz dataset.source.path={path} {SMALL}{more}"
    one_line(says, assemble, line.split())


@pytest.mark.nightly
def test_a_run_on_text_learns(home, fedjax_cfl, monkeypatch, tmp_path):
    home("", **{f"ROLE {k}": TEXT * 3 for k in range(4)})
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    line = f"dataset=shakespeare algorithm=fedavg {SMALL} rounds=20 local.epochs=5 run_dir=run"
    status, _, error = fedjax_cfl(line)
    assert (status, error) == (0, "")
    run = cfl.load_run("run")
    assert run.rows[-1]["accuracy"] > 0.5 and run.class_names == tuple(CHARACTERS)


@pytest.mark.skipif(not locate("shakespeare"), reason="the files are not here")
def test_the_original_file():
    pool = cfl.datasets.shakespeare()
    assert pool.x.shape[1:] == (80,) and len(set(pool.client.tolist())) == len(pool.client_names)
    assert pool.num_classes == 80 and 0.15 < pool.test.mean() < 0.25
    config = resolve_settings(["dataset=shakespeare"])
    assert config["model"]["name"] == "char_lstm"
