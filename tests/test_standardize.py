"""Standardised features: by whose samples, what is refused, and that predictions scale alike."""

import csv
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SIZES, call, one_line
from scipy.special import softmax

import fedjax_cfl as cfl
from fedjax_cfl.cli.predict import read_as_run
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.data.scaling import Scaling, check_scaling, describe_scales, standardize
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.results import read_columns

UNITS = np.array([1e-3, 1.0, 50.0, 2e4], np.float32)  # of the features
FILE = "dataset=csv dataset.source.path=own.csv dataset.source.y=kind"
FILE += " dataset.source.client=site dataset.source.split=part"
RUN = f"{FILE} algorithm=ifca algorithm.m=2 discard=none rounds=2 dataset.standardize=client"


def write_table(path, sites, seed=0, labels=True) -> None:
    """A table whose sites measure with an offset of their own; every fourth row is for testing."""
    rng = np.random.default_rng(seed)
    with open(path, "w", newline="") as file:
        write = csv.writer(file).writerow
        write(["a", "b", "c", "d", "part", "site", *(["kind"] if labels else [])])
        for site in sites:
            for row in range(24):
                x = rng.normal(size=4)
                kind = ["low", "high"][int(x[0] > 0)]
                numbers = (x + 3 * (len(site) % 3)) * UNITS
                part = ("train", "test")[row % 4 == 0]
                write([*numbers, part, site, *([kind] if labels else [])])


def both_sides(data, x, client):
    """Returns the training and the test samples of a client, in the order of its holdings."""
    sample = np.arange(data.y.size) if data.sample is None else np.asarray(data.sample)
    sides = []
    for view in (data.train, data.test):
        start, size = int(view.start[client]), int(view.size[client])
        sides.append(np.asarray(x)[sample[np.asarray(view.order)[start : start + size]]])
    return sides


def test_the_pool_is_scaled_by_its_training_samples(toy):
    scaled, scaling = standardize(toy, "pool")
    x = np.asarray(toy.x)
    rows = np.asarray(toy.train.order)
    want = (x - x[rows].mean(0)) / x[rows].std(0)
    np.testing.assert_allclose(scaled.x, want, atol=1e-5)
    np.testing.assert_allclose(scaling.apply(x), scaled.x)
    assert np.abs(np.asarray(scaled.x)[np.asarray(toy.test.order)].mean(0)).max() > 0.01
    assert standardize(toy, "none") == (toy, None)


def test_each_client_is_scaled_by_its_own_training_samples(toy):
    scaled, scaling = standardize(toy, "client")
    _, common = standardize(toy, "pool")
    for client in range(len(SIZES)):
        (train, test), (got, tested) = (both_sides(data, data.x, client) for data in (toy, scaled))
        if SIZES[client] > 1:
            mean, deviation = train.mean(0), train.std(0)
        else:  # one sample does not vary, and none has no mean
            mean = train[0] if SIZES[client] else common.mean[0]
            deviation = common.deviation[0]
        np.testing.assert_allclose(got, (train - mean) / deviation, atol=1e-4)
        np.testing.assert_allclose(tested, (test - mean) / deviation, atol=1e-4)
        np.testing.assert_allclose(scaling.apply(test, client), tested, atol=1e-5)
    fresh = np.asarray(toy.x)[:9] * 3 + 1
    want = (fresh - fresh.mean(0)) / fresh.std(0)
    np.testing.assert_allclose(scaling.fit(fresh).apply(fresh), want, atol=1e-4)
    np.testing.assert_allclose(scaling.fit(fresh[:0]).apply(fresh), common.apply(fresh), atol=1e-5)


def test_what_never_varies_stays_finite_and_pixels_are_read_as_models_read_them(toy):
    x = np.asarray(toy.x).copy()
    x[:, 2] = 0.1
    scaled, _ = standardize(toy.replace(x=jnp.asarray(x)), "pool")
    np.testing.assert_allclose(np.asarray(scaled.x)[:, 2], 0, atol=1e-6)
    pixels = np.random.default_rng(0).integers(256, size=x.shape).astype(np.uint8)
    of_pixels, _ = standardize(toy.replace(x=jnp.asarray(pixels)), "pool")
    of_numbers, _ = standardize(toy.replace(x=jnp.asarray(pixels / np.float32(255))), "pool")
    np.testing.assert_allclose(of_pixels.x, of_numbers.x, atol=1e-6)


def far_pool(far):
    """Seconds of some days, a constant, cents, and a feature near 0, all but the last far from 0
    if `far`; 9 clients.
    """
    rng = np.random.default_rng(0)
    varies = rng.normal(size=(360, 4)) * [20, 0, 0.01, 1]
    x = varies + np.array([1.7e9, 14.62, 1e6, 0]) * far
    return cfl.datasets.from_arrays(
        x=x, y=(varies[:, 0] > 0).astype(int), client=np.arange(360) % 9
    )


@pytest.mark.parametrize("by", ["pool", "client"])
def test_features_far_from_0_are_scaled_before_they_become_float32(by):
    pools = [far_pool(far) for far in (True, False)]
    (far, scaling), (near, _) = (
        standardize(cfl.federate(pool, cfl.partition.by_user(pool)), by) for pool in pools
    )
    assert far.x.dtype == np.float32 and far.exact is None
    np.testing.assert_allclose(far.x, near.x, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(far.x)[:, 1], 0)
    # as predictions do, from the file's own numbers; of one sample, too
    x, data = pools[0].x, cfl.federate(pools[0], cfl.partition.by_user(pools[0]))
    row = np.asarray(near.train.order)[0]
    place = int(near.owner[row])
    sample = x[np.flatnonzero(x[:, 3] == data.exact.x[row, 3])]
    np.testing.assert_allclose(scaling.apply(sample, place)[0], far.x[row], atol=1e-6)
    if by == "client":
        own = x[pools[0].client == place]
        want = (own - own.mean(0)) / np.where(own.std(0) > 1e-9, own.std(0), 1)
        np.testing.assert_allclose(scaling.fit(own).apply(own), want, atol=1e-5)


def test_features_that_float32_loses_get_a_hint_and_others_change_no_number(toy):
    pool = far_pool(True)
    data = cfl.federate(pool, cfl.partition.by_user(pool))
    assert "float32 loses what varies" in describe_scales(data, "none")
    assert describe_scales(data, "pool") is None
    moved = data.replace(x=data.x[:, ::-1])  # samples that somebody has changed since
    scaled, _ = standardize(moved, "pool")
    assert abs(np.asarray(scaled.x)[:, 0].std() - 1) < 0.1
    x = np.asarray(toy.x, np.float64) + 3  # near enough
    near = cfl.datasets.from_arrays(x=x, y=np.asarray(toy.y), client=np.asarray(toy.owner))
    found = cfl.federate(near, cfl.partition.by_user(near, test_fraction=0))
    assert found.exact is None and found.x.dtype == np.float32
    scaled, scaling = standardize(found, "pool")
    assert scaling.mean.dtype == np.float32
    x = np.asarray(found.x)
    np.testing.assert_array_equal(scaled.x, (x - scaling.mean) / scaling.deviation)
    np.testing.assert_array_equal(scaling.apply(x.astype(np.float64)), scaled.x)


def test_a_run_far_from_0_predicts_as_it_was_tested(fedjax_cfl):
    """Whatever type the numbers have in the file that is predicted."""
    pool = far_pool(True)
    given = {"y": pool.y, "client": pool.client, "split": np.arange(360) % 4 == 0}
    np.savez("far.npz", x=pool.x, **given)
    np.savez("same.npz", x=np.round(pool.x[:, :1]).astype(np.int64), **given)
    np.savez("one.npz", x=np.round(pool.x[:, :1]).astype(np.int64))
    line = "dataset=npz algorithm=fedavg rounds=3 local.lr=0.5 clients_per_round=9 curves=false"
    line += " dataset.standardize=pool model=mclr eval_auxiliary=false"
    assert fedjax_cfl(f"{line} dataset.source.path=far.npz run_dir=far")[0] == 0
    assert fedjax_cfl(f"{line} dataset.source.path=same.npz run_dir=same")[0] == 0
    for name in ("far", "same"):
        right = cfl.load_run(name).rows[-1]["accuracy"]
        assert right > 0.9
        assert f"accuracy {right:.2%} on 90" in fedjax_cfl(f"predict {name} {name}.npz")[1]
    run, x = cfl.load_run("same"), np.load("one.npz")["x"]
    np.testing.assert_array_equal(run.predict(0, x[:9]), run.predict(0, x)[:9])
    np.testing.assert_array_equal(run.predict(0, x[:1].astype(float)), run.predict(0, x)[:1])


def test_a_sample_of_two_clients_is_scaled_for_each(toy_pool):
    holdings = cfl.Partition(
        np.array([0, 1, 2, 2, 3, 4]), np.array([0, 0, 0, 1, 1, 1]), np.zeros(6, bool)
    )
    data, _ = standardize(cfl.federate(toy_pool, holdings), "client")
    assert data.x.shape[0] == 6 and data.sample is None
    for k in range(2):
        np.testing.assert_allclose(np.asarray(data.x)[3 * k : 3 * k + 3].mean(0), 0, atol=1e-5)


def test_clients_that_are_held_out_have_no_say(toy):
    kept, held = np.arange(8), np.arange(8, len(SIZES))
    run, scaling = standardize(take_clients(toy, kept), "pool")
    everybody = take_clients(toy, np.concatenate([kept, held]))
    scaled, again = standardize(everybody, "pool", kept.size)
    for mine, theirs in zip(scaling, again, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(both_sides(run, run.x, 3)[0], both_sides(scaled, scaled.x, 3)[0])


def test_features_of_unlike_scales_get_a_hint(toy):
    wide = toy.replace(x=toy.x * jnp.array([1, 1, 500, 1, 1.0]))
    assert "dataset.standardize=pool (or client)" in describe_scales(wide, "none")
    heart, warmth = (toy.x[:, :1] / toy.x[:, :1].std() * deviation for deviation in (11.5, 0.3))
    pulse = toy.replace(x=jnp.concatenate([heart, warmth], 1))
    assert "deviations from 0.294 to 11.3" in describe_scales(pulse, "none")
    assert describe_scales(wide, "pool") is None and describe_scales(toy, "none") is None
    images = wide.replace(x=wide.x.reshape(-1, 5, 1))
    assert describe_scales(images, "none") is None


def test_images_that_are_turned_are_refused(toy):
    turned = toy.replace(turns=jnp.zeros(toy.y.size, jnp.int32))
    one_line("turns the images of its groups", standardize, turned, "pool")
    one_line("must be one of none, client, pool", standardize, toy, "both")


@pytest.mark.parametrize(
    ("mean", "deviation", "fits"),
    [
        (np.zeros((4, 4)), np.ones((4, 4)), True),
        (np.zeros((1, 4)), np.ones((1, 4)), True),
        (np.zeros((1, 4)), np.ones((1, 5)), False),
        (np.zeros((2, 4)), np.ones((2, 4)), False),  # of neither all nor each of 3
        (np.zeros((4, 4)), np.ones((1, 4)), False),
        (np.full((1, 4), np.nan), np.ones((1, 4)), False),
        (np.zeros(()), np.ones(()), False),
        (np.zeros((1, 4)), np.zeros((1, 4)), False),
    ],
)
def test_a_scaling_fits_samples_and_clients(mean, deviation, fits):
    data = SimpleNamespace(x=np.zeros((9, 4)), num_clients=3)
    if fits:
        check_scaling(Scaling(mean, deviation), data)
    else:
        one_line("must be what standardize", check_scaling, Scaling(mean, deviation), data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table, and a run that scaled each of its clients."""
    folder = tmp_path_factory.mktemp("scaled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_table("own.csv", ["s", "site", "sites", "the site"])
        assert call(patch, f"{RUN} local.epochs=5 local.lr=0.3 run_dir=run", devices=1) == 0
    return folder


def test_a_run_predicts_as_it_was_tested(folder, fedjax_cfl, monkeypatch):
    monkeypatch.chdir(folder)
    run = cfl.load_run("run")
    assert run.final.scaling.mean.shape == (5, 4)
    status, out, error = fedjax_cfl("predict run own.csv --confusion --out out.npz")
    assert (status, error) == (0, "")
    assert f"accuracy {run.rows[-1]['accuracy']:.2%} on 24" in out
    found = np.load("out.npz")
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, rtol=1e-5)
    best = found["classes"][found["probabilities"].argmax(1)]
    np.testing.assert_array_equal(best, found["predicted"])
    right = sum(np.trace(matrix) for matrix in found["confusion"])
    assert right == round(run.rows[-1]["accuracy"] * 24) and found["confusion"].sum() == 24
    pool = cfl.datasets.csv("own.csv", "kind", list("abcd"), "site")
    rows = pool.client == pool.client_names.index("sites")
    np.testing.assert_allclose(
        run.predict_proba("sites", pool.x[rows]), found["probabilities"][rows], atol=1e-6
    )
    np.testing.assert_array_equal(run.predict("sites", pool.x[rows]), found["predicted"][rows])
    assert "high" in out and "model" in out.splitlines()[2]


@pytest.mark.nightly
def test_a_run_from_python_keeps_its_scaling(linear, local, toy, tmp_path):
    data, scaling = standardize(toy.replace(x=1000 * toy.x), "pool")
    method = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(5))
    given = {"rounds": 1, "run_dir": tmp_path / "run", "verbose": False, "mesh": cfl.make_mesh(1)}
    run = cfl.run(method, linear, data, jax.random.key(0), scaling=scaling, **given)
    np.testing.assert_allclose(run.scale(1000 * np.asarray(toy.x)), data.x, rtol=1e-6)
    np.testing.assert_array_equal(cfl.load_run(tmp_path / "run").final.scaling.mean, scaling.mean)
    another = scaling._replace(mean=scaling.mean + 1)
    with pytest.raises(InputError, match=r"made_of\.scaling"):
        cfl.run(method, linear, data, jax.random.key(0), scaling=another, **given)


def test_new_clients_are_scaled_by_their_own_training_samples(folder, fedjax_cfl, monkeypatch):
    monkeypatch.chdir(folder)
    write_table("new.csv", ["far away"], seed=4)
    status, out, _ = fedjax_cfl("predict run new.csv --out out.npz")
    assert status == 0 and "clients new to the run: 24 samples" in out
    run, found = cfl.load_run("run"), np.load("out.npz")
    x = cfl.datasets.csv("new.csv", "kind", list("abcd")).x
    train = np.arange(24) % 4 != 0
    model = int(found["model"][0])
    right = softmax(run.infer(model, run.scale(x, like=x[train]), run.final), axis=1)
    np.testing.assert_allclose(right, found["probabilities"], atol=1e-6)
    guess = run.predict_with(model, x, like=x[train])
    np.testing.assert_array_equal(guess, found["predicted"])


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["pool", "client"])
def test_clients_that_were_held_out_are_tested_on_scaled_samples(by, fedjax_cfl):
    write_table("own.csv", ["s", "sit", "sitess", "the sites"])
    line = f"{RUN} local.lr=1.0 local.epochs=10 evaluate.new_clients=0.25 clients_per_round=3"
    assert fedjax_cfl(f"{line.replace('=client', '=' + by)} rounds=9 run_dir=run")[0] == 0
    run, (new, _) = cfl.load_run("run"), read_columns(Path("run", "new_clients.parquet"), {})
    pool = cfl.datasets.csv("own.csv", "kind", list("abcd"), "site", "part")
    rows = pool.client == pool.client_names.index(new["client"][0])
    x, y, test = pool.x[rows], np.array(pool.class_names)[pool.y[rows]], pool.test[rows]
    guess = run.predict_with(int(new["group"][0]), x[test], like=x[~test])
    assert np.mean(guess == y[test]) == pytest.approx(new["accuracy"][0])
    assert new["accuracy"][0] > 0.6


def test_other_files_are_read_as_the_run_read_its_own(folder, fedjax_cfl, monkeypatch):
    monkeypatch.chdir(folder)
    write_table("bare.csv", ["s", "site"], labels=False)
    status, out, _ = fedjax_cfl("predict run bare.csv --no-labels")
    assert status == 0 and "clients of the run: 48 samples" in out and "accuracy" not in out
    for line, says in (
        ("predict run bare.csv", "y=kind is not there"),
        ("predict run bare.csv --no-labels --confusion", "has no labels y"),
        ("predict run absent.csv", "absent.csv: file cannot be read"),
    ):
        status, _, error = fedjax_cfl(line)
        assert status == 2 and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"_target_": "os.listdir", "path": "."}, "the run read no file of a kind like this"),
        ({"_target_": "fedjax_cfl.data.datasets.digits"}, "read no file of a kind like this"),
        ({"_target_": "fedjax_cfl.data.datasets.leaf", "path": "a"}, "--no-labels is for tables"),
    ],
)
def test_nothing_but_readers_of_files_is_called(source, says):
    settings = {"dataset": {"source": source}}
    run = SimpleNamespace(settings=settings, class_names=None, num_classes=CLASSES)
    one_line(says, read_as_run, run, "own.csv", False)
