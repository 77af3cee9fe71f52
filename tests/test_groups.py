"""Partitions with true groups, transformations, and the data sets of several sources."""

import gzip
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.io
from conftest import at_once, nightly

from fedjax_cfl.data import concept, federate, partition
from fedjax_cfl.data.datasets import cifar10, digit_sources, download, multi_source_digits
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR
from fedjax_cfl.data.datasets.readers import read_hdf5
from fedjax_cfl.data.federated import gather, turn_images
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

real = pytest.mark.skipif(
    not os.environ.get(DATA_ENV_VAR), reason=f"real data: {DATA_ENV_VAR} is not set"
)
TRAIN, TEST = 300, 100


@pytest.fixture
def pool():
    """Images of which no two are alike, also turned."""
    rng = np.random.default_rng(0)
    y = (np.arange(TRAIN + TEST) % 10).astype(np.int32)
    x = rng.integers(0, 256, (TRAIN + TEST, 3, 3), np.uint8)
    return Pool(x, y, 10, test=np.arange(TRAIN + TEST) >= TRAIN)


def test_images_are_turned_as_in_a_loop():
    rng = np.random.default_rng(0)
    turns = rng.integers(4, size=20)
    for shape in ((4, 4), (4, 4, 3)):
        x = rng.normal(size=(20, *shape)).astype(np.float32)
        expected = np.stack([np.rot90(image, t) for image, t in zip(x, turns, strict=True)])
        for turn in (turn_images, jax.jit(turn_images)):
            np.testing.assert_array_equal(turn(jnp.asarray(x), jnp.asarray(turns)), expected)


@pytest.mark.parametrize("swap", [nightly(False), True])
def test_rotated_groups_are_exact(pool, swap):
    held = partition.rotated_groups(
        pool, clients_per_group=3, samples_per_client=50, swap_labels=swap, seed=1
    )
    data = federate(pool, held)
    x, y = jax.device_get(at_once(gather, data, jnp.arange(len(held.sample))))
    concept = np.asarray(data.concept)
    assert len(data.x) <= len(pool.x) < len(x), "a sample is stored once"
    assert concept.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert data.train.size.tolist() == [50] * 12 and data.test.size.tolist() == [TEST] * 12
    for place in range(len(held.sample)):
        group = int(concept[held.owner[place]])
        sample = held.sample[place]
        np.testing.assert_array_equal(x[place], np.rot90(pool.x[sample], group))
        exchanged = {2 * group + 1: 2 * group + 2, 2 * group + 2: 2 * group + 1} if swap else {}
        label = int(pool.y[sample])
        assert y[place] == exchanged.get(label, label)
        assert pool.test[sample] == held.test[place]
    few = partition.rotated_groups(pool, clients_per_group=1, samples_per_client=5, test_samples=7)
    assert np.bincount(few.owner[few.test]).tolist() == [7] * 4


@pytest.mark.parametrize("seed", [0, 1])
def test_each_client_may_draw_its_group(pool, seed):
    """Each of the four rotations is as likely; what clients hold is what they hold in equal
    groups.
    """
    settings = {"samples_per_client": 20, "test_samples": 5, "swap_labels": True, "seed": seed}
    equal, drawn = (
        partition.rotated_groups(pool, clients_per_group=size, **settings)
        for size in (3, "drawn:3")
    )
    own = np.random.RandomState([seed, 4]).randint(4, size=12)
    assert drawn.concept.tolist() == sorted(own.tolist())
    assert equal.concept.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert drawn.concept.tolist() != equal.concept.tolist()
    for name in ("sample", "owner", "test"):
        np.testing.assert_array_equal(getattr(equal, name), getattr(drawn, name))
    x, y = gather(federate(pool, drawn), jnp.arange(len(drawn.sample)))
    for place, sample in enumerate(drawn.sample):
        group = int(drawn.concept[drawn.owner[place]])
        np.testing.assert_array_equal(x[place], np.rot90(pool.x[sample], group))
        label = int(pool.y[sample])
        exchanged = {2 * group + 1: 2 * group + 2, 2 * group + 2: 2 * group + 1}
        assert y[place] == exchanged.get(label, label)


def test_drawn_groups_differ_in_size_as_a_multinomial_does(pool):
    sizes = np.array(
        [
            np.bincount(
                partition.rotated_groups(
                    pool,
                    clients_per_group="drawn:6",
                    samples_per_client=1,
                    test_samples=1,
                    seed=seed,
                ).concept,
                minlength=4,
            )
            for seed in range(60)
        ]
    )
    assert (sizes.sum(1) == 24).all()
    np.testing.assert_allclose(sizes.mean(0), 6, atol=1)
    np.testing.assert_allclose(sizes.var(0), 24 * 0.25 * 0.75, rtol=0.5)


def test_samples_are_drawn_with_replacement_across_clients_only(pool):
    """Until a class is used up a client repeats none, though all share a small pool."""
    held = partition.rotated_groups(pool, clients_per_group=4, samples_per_client=100, alpha=1e6)
    shared = np.bincount(held.sample[~held.test], minlength=TRAIN)
    assert shared.max() > 4
    for client in range(16):
        own = held.sample[~held.test & (held.owner == client)]
        assert len(own) == 100 and len(np.unique(own)) == 100


def test_label_shares_are_those_of_the_specification(pool):
    """Dir(alpha / C): mean largest share and mean L1 distance between clients, section 14."""
    large = pool._replace(
        x=np.zeros((20_000, 1, 1), np.uint8),
        y=(np.arange(20_000) % 10).astype(np.int32),
        test=np.arange(20_000) >= 19_000,
    )
    for alpha, largest, distance in ((1, 0.67, 1.65), (10, 0.29, 0.96), (100, 0.15, 0.34)):
        held = partition.rotated_groups(large, clients_per_group=50, alpha=alpha, test_samples=1)
        counts = np.zeros((200, 10))
        rows = ~held.test
        np.add.at(counts, (held.owner[rows], large.y[held.sample[rows]]), 1)
        share = counts / counts.sum(1, keepdims=True)
        assert abs(share.max(1).mean() - largest) < 0.05
        assert abs(np.abs(share[:100] - share[100:]).sum(1).mean() - distance) < 0.12


def test_ifca_uses_everything_once_a_rotation(pool):
    held = partition.ifca_rotations(pool, samples_per_client=30)
    data = federate(pool, held)
    assert data.num_clients == 40 and data.train.size.tolist() == [30] * 40
    assert np.bincount(data.concept).tolist() == [10] * 4
    for group in range(4):
        own = data.concept[held.owner] == group
        for side, count in ((False, TRAIN), (True, TEST)):
            assert len(np.unique(held.sample[own & (held.test == side)])) == count
    assert len(held.sample) == 4 * (TRAIN + TEST)


def test_source_groups(pool):
    pool = pool._replace(source=(np.arange(TRAIN + TEST) % 2).astype(np.int32))
    held = partition.source_groups(pool, clients_per_group=2, samples_per_client=20)
    assert (pool.source[held.sample] == held.concept[held.owner]).all()
    assert held.concept.tolist() == [0, 0, 1, 1] and federate(pool, held).num_clients == 4
    drawn = partition.source_groups(pool, clients_per_group="drawn:5", samples_per_client=20)
    own = np.random.RandomState([0, 2]).randint(2, size=10)
    assert drawn.concept.tolist() == sorted(own.tolist()) and drawn.concept.sum() != 5
    assert (pool.source[drawn.sample] == drawn.concept[drawn.owner]).all()
    assert np.bincount(drawn.owner[~drawn.test]).tolist() == [20] * 10


@pytest.mark.parametrize(
    ("says", "make", "options", "changes"),
    [
        ("square images", "rotated_groups", {}, {"x": np.zeros((400, 3, 4), np.uint8)}),
        ("square images", "ifca_rotations", {}, {"x": np.zeros((400, 9), np.uint8)}),
        ("expected one", "ifca_rotations", {}, {"test": None}),
        ("one source", "source_groups", {}, {}),
        ("at least 9", "rotated_groups", {"swap_labels": True}, {"num_classes": 8}),
        ("test_samples=101", "rotated_groups", {"test_samples": 101}, {}),
        ("samples_per_client=0", "rotated_groups", {"samples_per_client": 0}, {}),
        ("samples_per_client=301", "ifca_rotations", {"samples_per_client": 301}, {}),
        ("clients_per_group=0", "rotated_groups", {"clients_per_group": 0}, {}),
        ("drawn:0: must be", "rotated_groups", {"clients_per_group": "drawn:0"}, {}),
        ("or drawn:N", "rotated_groups", {"clients_per_group": "drawn:1.5"}, {}),
        ("or drawn:N", "rotated_groups", {"clients_per_group": "12"}, {}),
        ("alpha=0", "rotated_groups", {"alpha": 0}, {}),
    ],
)
def test_what_cannot_be_is_refused(pool, says, make, options, changes):
    with pytest.raises(InputError, match=says) as caught:
        getattr(partition, make)(pool._replace(**changes), **options)
    assert "\n" not in str(caught.value)


def test_codes_need_the_device_and_no_concept(pool):
    held = partition.ifca_rotations(pool)
    with pytest.raises(InputError, match="resident=host: this partition turns"):
        federate(pool, held, on_host=True)
    with pytest.raises(InputError, match="concept: this partition turns"):
        federate(pool, held, concept.rotate)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A few digits of each source, as files."""
    h5py = pytest.importorskip("h5py")
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    for folder in ("mnist", "usps", "sign_digits", "svhn"):
        (tmp_path / folder).mkdir()
    for side, count in (("train", 20), ("t10k", 10)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
            with gzip.open(tmp_path / "mnist" / f"{side}-{kind}-ubyte.gz", "wb") as file:
                file.write(head + bytes(np.prod(shape)))
    with h5py.File(tmp_path / "usps" / "usps.h5", "w") as file:
        for side, count in (("train", 7), ("test", 4)):
            file[f"{side}/data"] = np.ones((count, 256), np.float32)
            file[f"{side}/target"] = np.arange(count, dtype=np.int32)
    np.savez(
        tmp_path / digit_sources.SIGN,
        images=np.full((10, 64, 64), 255, np.uint8),
        labels=np.arange(10, dtype=np.uint8),
    )
    for side, count in (("train", 6), ("test", 3)):
        x = np.zeros((32, 32, 3, count), np.uint8)
        x[:, :, 0] = 255  # red
        y = np.arange(1, count + 1, dtype=np.uint8)[:, None]
        y[-1] = 10
        scipy.io.savemat(tmp_path / "svhn" / f"{side}_32x32.mat", {"X": x, "y": y})
    return tmp_path


def test_multi_source_digits(sources):
    three, four = multi_source_digits(offline=True), multi_source_digits(svhn=True, offline=True)
    assert np.bincount(three.source).tolist() == [30, 11, 10]
    assert np.bincount(four.source).tolist() == [30, 11, 10, 9]
    assert four.x.shape[1:] == (28, 28) and four.x.dtype == np.float32
    level = [four.x[four.source == source].mean() for source in range(4)]
    np.testing.assert_allclose(level, [-1, 1, 1, 2 * 0.299 - 1], atol=1e-5)
    assert np.bincount(four.source[four.test]).tolist() == [10, 4, 2, 3]
    assert four.y[four.source == 3].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 0]
    np.savez(
        sources / digit_sources.SVHN,
        images=np.zeros((5, 32, 32, 3), np.uint8),
        labels=np.arange(5),
        split=np.array([0, 0, 0, 1, 1]),
    )
    assert np.bincount(multi_source_digits(svhn=True).source).tolist() == [30, 11, 10, 5]


@pytest.mark.parametrize("name", ["usps/usps.h5", "svhn/train_32x32.mat", digit_sources.SIGN])
def test_bad_sources_are_one_line(sources, name):
    for content in (b"", b"garbage" * 99, (sources / name).read_bytes()[:-300]):
        (sources / name).write_bytes(content)
        with pytest.raises(InputError, match=os.path.basename(name)) as caught:
            multi_source_digits(svhn=True, offline=True)
        assert "\n" not in str(caught.value)
    (sources / name).unlink()
    with pytest.raises(InputError, match="not found"):
        multi_source_digits(svhn=True, offline=True)
    os.mkfifo(sources / name)
    with pytest.raises(InputError, match="not a regular file"):
        multi_source_digits(svhn=True, offline=True)


@pytest.mark.parametrize(
    ("array", "value", "words"),
    [
        ("test/data", np.zeros((4, 16, 16)), "test/data (4, 16, 16) from 0.0"),
        ("train/data", np.zeros((7, 255)), "train/data (7, 255)"),
        ("train/target", np.zeros((7, 1), int), "train/target (7, 1)"),
        ("train/target", np.zeros(6, int), "and train/target (6,)"),
        ("train/data", np.full((7, 256), 255, np.uint8), "from 255 to 255 and train/target"),
        ("train/data", np.full((7, 256), np.nan), "from nan to nan"),
        ("train/target", np.full(7, 11), "11"),
    ],
)
def test_a_usps_file_of_another_make_is_refused(sources, array, value, words):
    h5py = pytest.importorskip("h5py")
    with h5py.File(sources / "usps" / "usps.h5", "a") as file:
        del file[array]
        file[array] = value
    with pytest.raises(InputError) as caught:
        multi_source_digits(offline=True)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [0, 11, 99, -1, 2.5, "ten"])
def test_svhn_labels_are_one_to_ten(sources, label):
    scipy_io = pytest.importorskip("scipy.io")
    x = np.zeros((32, 32, 3, 2), np.uint8)
    scipy_io.savemat(sources / digit_sources.SVHN_MAT[0], {"X": x, "y": np.array([label, label])})
    with pytest.raises(InputError, match=f"y is {label} somewhere, expected .* 1 to 10"):
        multi_source_digits(svhn=True, offline=True)


def test_h5py_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(InputError, match=r"pip install 'fedjax-cfl\[hdf5\]'"):
        read_hdf5(tmp_path / "a.h5", ["x"])


@real
def test_the_real_sources():
    pytest.importorskip("h5py")
    pool = multi_source_digits(offline=True)
    sides = [np.bincount(pool.source[pool.test == side]).tolist() for side in (False, True)]
    assert sides == [[60_000, 7291, 1649], [10_000, 2007, 413]]
    held = partition.source_groups(pool)
    assert np.bincount(held.owner[~held.test]).tolist() == [1000] * 36


@real
def test_centered_cifar():
    pool, raw = cifar10(centered=True), cifar10()
    assert pool.x.dtype == np.float32
    np.testing.assert_allclose(pool.x[:50], raw.x[:50] / 127.5 - 1, atol=1e-6)
