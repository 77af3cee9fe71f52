"""Partitions: the recipes' published numbers, what must hold for every partition, and
what is refused.
"""

from fractions import Fraction

import numpy as np
import pytest
from conftest import one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cfl.data import concept, dealing, partition
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

MNIST = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


def pool_of(counts, client=None, test=None, seed=0):
    """Returns a pool with these label counts, in random order."""
    y = (
        np.random.default_rng(seed)
        .permutation(np.repeat(np.arange(len(counts)), counts))
        .astype(np.int32)
    )
    return Pool(np.zeros((len(y), 1), np.uint8), y, len(counts), client, test)


def labels_of(pool, holdings, clients):
    """Returns the label counts of each client [K, C], train and test together."""
    counts = np.zeros((clients, pool.num_classes), int)
    np.add.at(counts, (holdings.owner, pool.y[holdings.sample]), 1)
    return counts


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_power_law_is_fedprox_mnist(seed):
    pool = pool_of(MNIST)
    holdings = partition.power_law(pool, clients=1000, seed=seed)
    counts = labels_of(pool, holdings, 1000)
    sizes = counts.sum(axis=1)
    assert 69_040 <= len(holdings.sample) <= 69_090 and len(np.unique(holdings.sample)) == len(
        holdings.sample
    )
    assert sizes.min() >= 10 and 22 <= np.median(sizes) <= 26 and 1_800 <= sizes.max() <= 5_200
    owned = (np.arange(1000)[:, None] + [0, 1]) % 10
    assert (np.take_along_axis(counts, owned, axis=1) >= 5).all()
    assert ((counts > 0).sum(axis=1) == 2).all()
    np.testing.assert_array_equal(
        np.bincount(holdings.owner[~holdings.test]), (0.9 * sizes).astype(int)
    )


def test_power_law_with_other_numbers():
    pool = pool_of([400, 300, 500])
    holdings = partition.power_law(
        pool, clients=20, classes_per_client=1, seed_samples=3, test_fraction=0
    )
    counts = labels_of(pool, holdings, 20)
    assert (
        (counts.argmax(axis=1) == np.arange(20) % 3).all()
        and counts.sum(axis=1).min() >= 3
        and not holdings.test.any()
    )


def test_ditto_reproduces_its_totals():
    test = np.arange(70_000) >= 60_000
    holdings = partition.ditto(
        Pool(np.zeros((70_000, 1)), (np.arange(70_000) % 10).astype(np.int32), 10, test=test)
    )
    train = np.bincount(holdings.owner[~holdings.test])
    assert (train.sum(), holdings.test.sum(), train.min(), train.max()) == (
        61_251,
        11_254,
        31,
        1_378,
    )
    np.testing.assert_array_equal(test[holdings.sample], holdings.test)
    assert len(np.unique(holdings.sample)) < len(holdings.sample)  # the wraps


def test_femnist_variants():
    pool = pool_of([4000] * 10)
    for seed in (0, 1):
        disjoint, released = (
            partition.femnist_power_law(pool, variant=v, seed=seed)
            for v in ("disjoint", "released")
        )
        assert len(disjoint.sample) == len(released.sample)  # the same sizes
        assert len(np.unique(disjoint.sample)) == len(disjoint.sample)
        assert len(np.unique(released.sample)) < 0.2 * len(released.sample)
        leaked = np.isin(released.sample[released.test], released.sample[~released.test])
        assert leaked.mean() > 0.9
        assert ((labels_of(pool, disjoint, 200) > 0).sum(axis=1) == 3).all()


@pytest.mark.parametrize(
    ("alpha", "over5", "over1", "largest", "distance"),
    [
        (1, 2.7, 3.8, 0.67, 1.65),
        (3, 4.2, 6.4, 0.46, 1.39),
        (10, 6.3, 9.1, 0.29, 0.96),
        (100, 9.7, 10.0, 0.15, 0.34),
    ],
)
def test_dirichlet_per_client_is_md_icfl(alpha, over5, over1, largest, distance):
    pool = pool_of(MNIST)
    holdings = partition.dirichlet_per_client(
        pool, clients=400, alpha=alpha, samples_per_client=1000, seed=3, test_fraction=0.2
    )
    train = holdings._replace(
        sample=holdings.sample[~holdings.test], owner=holdings.owner[~holdings.test]
    )
    share = labels_of(pool, train, 400) / 1000
    between = np.abs(share[:, None] - share[None]).sum(axis=-1).sum() / (400 * 399)
    found = (
        (share > 0.05).sum(axis=1).mean(),
        (share > 0.01).sum(axis=1).mean(),
        share.max(axis=1).mean(),
        between,
    )
    np.testing.assert_allclose(found, (over5, over1, largest, distance), rtol=0.05)
    # shared, but never across train and test
    assert not np.isin(holdings.sample[holdings.test], train.sample).any()


def test_dirichlet_per_client_repeats_only_what_it_must():
    pool = pool_of([30, 30])
    holdings = partition.dirichlet_per_client(
        pool, clients=8, alpha=5.0, samples_per_client=100, test_fraction=0.1
    )
    assert (np.bincount(holdings.owner[~holdings.test]) == 100).all()
    for k in range(8):
        mine = holdings.sample[(holdings.owner == k) & ~holdings.test]
        for label in (0, 1):
            times = np.unique(mine[pool.y[mine] == label], return_counts=True)[1]
            assert not len(times) or times.max() - times.min() <= 1


def test_dirichlet_per_client_gives_test_samples_in_proportion():
    """40 training samples are four fifths, so that 10 are for testing."""
    holdings = partition.dirichlet_per_client(
        pool_of([50, 50]), clients=3, alpha=5.0, samples_per_client=40, test_fraction=0.2
    )
    assert np.bincount(holdings.owner[~holdings.test]).tolist() == [40] * 3
    assert np.bincount(holdings.owner[holdings.test]).tolist() == [10] * 3


def test_the_test_part_of_a_pool_is_its_own_or_a_share():
    rng = np.random.RandomState(0)
    assert dealing.draw_test_mask(rng, pool_of([50, 50]), 0.2).sum() == 20
    own = np.arange(100) < 7
    assert dealing.draw_test_mask(rng, pool_of([50, 50], test=own), 0.2) is own


def test_a_client_that_has_its_share_gets_nothing_of_later_classes():
    """With tiny alpha one client gets all of a class: the other client all of the next."""
    for seed in range(8):
        pool = pool_of([10, 10])
        holdings = partition.dirichlet(pool, clients=2, alpha=1e-3, min_samples=0, seed=seed)
        assert sorted(labels_of(pool, holdings, 2).tolist()) == [[0, 10], [10, 0]]


def test_proportions_that_underflow_are_all_on_an_allowed_place():
    allowed = np.arange(5) == 2
    for seed in range(8):
        found = dealing.draw_proportions(np.random.RandomState(seed), 5, 1e-9, allowed)
        np.testing.assert_array_equal(found, allowed)


def test_by_user_keeps_names_and_true_groups():
    client = np.array([1, 0, 0, 1], np.int32)
    pool = pool_of([2, 2], client)._replace(concept=np.array([4, 7]), client_names=("a", "b"))
    for test in (None, np.array([False, True, False, True])):
        holdings = partition.by_user(pool._replace(test=test))
        assert holdings.client_names == ("a", "b") and holdings.concept.tolist() == [4, 7]


def test_by_user_keeps_the_split():
    client, test = np.array([2, 0, 0, 2, 2, 0]), np.array([False, True, False, False, True, False])
    holdings = partition.by_user(pool_of([3, 3], client.astype(np.int32), test))
    np.testing.assert_array_equal(client[holdings.sample], holdings.owner)
    np.testing.assert_array_equal(test[holdings.sample], holdings.test)
    assert sorted(holdings.sample) == list(range(6))


@pytest.mark.parametrize("split", [False, True])
def test_some_owners_are_drawn_by_the_seed(split):
    """With their names, true groups, samples and split; as many as there are: as all are."""
    client = np.repeat(np.arange(6), 5).astype(np.int32)
    names, groups = tuple("fedcba"), np.array([np.arange(6), 10 + np.arange(6)])
    test = np.tile([True, False, False, False, False], 6) if split else None
    pool = pool_of([15, 15], client, test)._replace(concept=groups, client_names=names)
    drawn = set()
    for seed in range(20):
        held = partition.by_user(pool, clients=2, seed=seed, test_fraction=0.2)
        chosen = [names.index(name) for name in held.client_names]
        assert chosen == sorted(chosen) and held.concept.tolist() == groups[:, chosen].tolist()
        np.testing.assert_array_equal(client[held.sample], np.array(chosen)[held.owner])
        assert sorted(held.sample) == np.flatnonzero(np.isin(client, chosen)).tolist()
        assert held.test.sum() == 2 and (not split or test[held.sample[held.test]].all())
        drawn.add(tuple(chosen))
        again = partition.auto(pool, clients=2, alpha=1.0, seed=seed, test_fraction=0.2)
        np.testing.assert_array_equal(again.sample, held.sample)
    assert len(drawn) > 10
    every = partition.by_user(pool, clients=6), partition.by_user(pool)
    for mine, theirs in zip(*every, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    numbered = partition.by_user(pool._replace(client_names=None), clients=2, seed=3)
    assert numbered.client_names == tuple(np.unique(client[numbered.sample]).tolist())
    one_line("at most 6 clients are possible with the owners", partition.by_user, pool, clients=7)


EVERY = {
    "power_law": lambda pool, k, s: partition.power_law(pool, clients=k, seed=s, seed_samples=1),
    "femnist_power_law": lambda pool, k, s: partition.femnist_power_law(
        pool, clients=k, seed=s, classes_per_client=2
    ),
    "ditto": lambda pool, k, s: partition.ditto(pool, clients=k, seed=s, classes_per_client=2),
    "by_user": lambda pool, k, s: partition.by_user(pool._replace(test=None), seed=s),
    "iid": lambda pool, k, s: partition.iid(pool, clients=k, seed=s),
    "shards": lambda pool, k, s: partition.shards(pool, clients=k, seed=s),
    "dirichlet": lambda pool, k, s: partition.dirichlet(
        pool, clients=k, seed=s, alpha=0.5, min_samples=1
    ),
    "dirichlet_per_client": lambda pool, k, s: partition.dirichlet_per_client(
        pool, clients=k, seed=s, alpha=2.0, samples_per_client=20
    ),
    "quantity_skew": lambda pool, k, s: partition.quantity_skew(
        pool, clients=k, seed=s, min_samples=2
    ),
}
SHARING = {"femnist_power_law", "ditto", "dirichlet_per_client"}
COMPLETE = {"by_user", "iid", "shards", "dirichlet", "quantity_skew"}


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(40, 80), min_size=2, max_size=6),
    clients=st.integers(2, 15),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_partition(name, counts, clients, seed):
    total = sum(counts)
    test = np.zeros(total, bool)
    pool = pool_of(counts, (np.arange(total) % clients).astype(np.int32), test, seed)
    for label in range(len(counts)):
        test[np.flatnonzero(pool.y == label)[::5]] = True
    holdings, again = EVERY[name](pool, clients, seed), EVERY[name](pool, clients, seed)
    for array, same in zip(holdings, again, strict=True):
        np.testing.assert_array_equal(array, same)
    assert (
        holdings.sample.dtype == np.int64
        and holdings.owner.dtype == np.int32
        and holdings.test.dtype == bool
    )
    assert (
        holdings.owner.min() >= 0
        and holdings.owner.max() < clients
        and (holdings.sample >= 0).all()
    )
    assert len(np.unique(holdings.owner)) == clients
    if name not in SHARING:
        assert len(np.unique(holdings.sample)) == len(holdings.sample)
    if name in COMPLETE:
        assert sorted(holdings.sample) == list(range(total))
        sizes = np.bincount(holdings.owner, minlength=clients)
        np.testing.assert_array_equal(
            np.bincount(holdings.owner[~holdings.test], minlength=clients),
            (0.9 * sizes).astype(int),
        )


def test_shapes_of_skew():
    pool = pool_of([100] * 10)
    assert ((labels_of(pool, partition.shards(pool, clients=50), 50) > 0).sum(axis=1) <= 4).all()
    assert set(np.bincount(partition.iid(pool, clients=30).owner)) == {33, 34}
    few, many = (
        np.bincount(partition.quantity_skew(pool, clients=20, sigma=s).owner).max()
        for s in (0.1, 2.0)
    )
    assert few < 80 < many
    extreme = partition.dirichlet(pool, clients=5, alpha=1e-9, min_samples=0)
    assert len(extreme.sample) == 1000  # the underflowing draw deals everything too


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        (
            "power_law",
            {"clients": 2000},
            "at most 100 clients are possible with 5 samples of each of 2 classes per client",
        ),
        ("power_law", {"clients": 10**7}, "at most 100 clients"),
        (
            "power_law",
            {"clients": 5, "classes_per_client": 11},
            "classes_per_client=11: must be a whole number from 1 to 10",
        ),
        ("power_law", {"clients": 5, "sigma": 0}, "sigma=0"),
        ("power_law", {"clients": 5, "seed_samples": 0}, "seed_samples=0"),
        (
            "femnist_power_law",
            {"clients": 5, "variant": "broken"},
            "variant=broken: must be one of disjoint, released",
        ),
        ("ditto", {}, "no test split"),
        ("by_user", {}, "names no clients"),
        ("iid", {"clients": 0}, "clients=0: must be a whole number from 1 to 10000000"),
        ("ditto", {"clients": 10**12}, "clients=1000000000000"),
        ("iid", {"clients": 2.5}, "clients=2.5"),
        ("iid", {"clients": 1001}, "at most 1000 clients"),
        ("iid", {"clients": 5, "seed": -1}, "seed=-1"),
        ("iid", {"clients": 5, "test_fraction": 1}, "test_fraction=1"),
        ("iid", {"clients": 5, "test_fraction": float("nan")}, "test_fraction=nan"),
        ("shards", {"clients": 501}, "at most 500 clients"),
        (
            "dirichlet",
            {"clients": 101, "alpha": 1.0},
            "at most 100 clients are possible with 10 samples per client",
        ),
        ("dirichlet", {"clients": 90, "alpha": 0.01}, "min_samples=10: not met in 1000 draws"),
        ("dirichlet", {"clients": 5, "alpha": 0.0}, "alpha=0.0: must be a finite number > 0"),
        (
            "dirichlet_per_client",
            {"clients": 5, "alpha": float("inf"), "samples_per_client": 5},
            "alpha=inf",
        ),
        (
            "dirichlet_per_client",
            {"clients": 5, "alpha": 1, "samples_per_client": 0},
            "samples_per_client=0",
        ),
        (
            "dirichlet_per_client",
            {"clients": 5, "alpha": 1, "samples_per_client": 10**20},
            "samples_per_client=100000000000000000000: must be a whole number from 1 to 10000000",
        ),
        ("iid", {"clients": 5, "test_fraction": np.array(2.0)}, "test_fraction=2.0"),
        ("iid", {"clients": np.array(0)}, "clients=0"),
        ("quantity_skew", {"clients": 101}, "at most 100 clients"),
    ],
)
def test_impossible(name, kwargs, says):
    with pytest.raises(InputError) as caught:
        getattr(partition, name)(pool_of([100] * 10), **kwargs)
    assert "\n" not in str(caught.value) and says in str(caught.value), caught.value
    assert str(caught.value).startswith("partition")


IMAGES = np.random.default_rng(0).random((60, 4, 4)).astype(np.float32)
LABELS, OWNERS = np.arange(60) % 5, (np.arange(60) % 6).astype(np.int32)


def test_rotate():
    for groups in (1, 2, 4):
        x, y, groups_of = concept.rotate(IMAGES, LABELS, OWNERS, 6, 5, groups=groups, shuffle=False)
        assert groups_of.tolist() == [k % groups for k in range(6)] and y is LABELS
        for i in range(60):
            np.testing.assert_array_equal(
                x[i], np.rot90(IMAGES[i], groups_of[OWNERS[i]] * 4 // groups)
            )
    colour = concept.rotate(IMAGES[..., None], LABELS, OWNERS, 6, 5, groups=2, shuffle=True, seed=1)
    assert colour[0].shape == (60, 4, 4, 1) and sorted(colour[2]) == [0, 0, 0, 1, 1, 1]


def test_permute_labels():
    x, y, groups_of = concept.permute_labels(IMAGES, LABELS, OWNERS, 6, 5, groups=3, seed=4)
    tables = []
    for g in range(3):
        rows = groups_of[OWNERS] == g
        table = [set(y[rows & (LABELS == label)]) for label in range(5)]
        assert all(len(image) == 1 for image in table) and len(set.union(*table)) == 5
        tables.append([image.pop() for image in table])
    assert (
        tables[0] == [0, 1, 2, 3, 4]
        and tables[1] != tables[2]
        and tables[0] not in tables[1:]
        and x is IMAGES
    )


@pytest.mark.parametrize(
    ("function", "x", "groups", "says"),
    [
        (concept.rotate, IMAGES, 3, "must be 1, 2 or 4"),
        (concept.rotate, IMAGES.reshape(60, 16), 2, "samples have shape (16,)"),
        (concept.rotate, IMAGES.reshape(60, 2, 8), 2, "samples have shape (2, 8)"),
        (concept.permute_labels, IMAGES, 121, "expected 1 .. 120"),
        (concept.permute_labels, IMAGES, 7, "at most 6 are possible"),
    ],
)
def test_bad_concepts(function, x, groups, says):
    with pytest.raises(InputError, match="concept") as caught:
        function(x, LABELS, OWNERS, 6, 5, groups=groups)
    assert says in str(caught.value)


def test_owners_that_no_memory_holds_are_refused():
    """Account numbers of a pool from Python, not renumbered."""
    pool = pool_of([5] * 10)._replace(client=np.arange(50) + 2**30)
    with pytest.raises(InputError, match=r"clients=1073741874: must be a whole number from 1 to"):
        partition.by_user(pool)


@pytest.mark.parametrize("text", ["0.1", "0.2", "0.25", "0.3", "0.5", "0.7", "0.8", "0.9"])
def test_shares_are_exact_as_they_are_written(text):
    for count in range(1, 201):
        expected = int((1 - Fraction(text)) * count)
        assert dealing.count_train(count, float(text)) == expected
        pool = Pool(np.zeros((count, 2), np.float32), np.arange(count) % 2, 2)
        mask = dealing.draw_test_mask(np.random.RandomState(0), pool, float(text))
        assert count - mask.sum() == expected
    pool = Pool(np.zeros((5, 2), np.float32), np.arange(5) % 2, 2, np.zeros(5, int))
    assert (~partition.by_user(pool, seed=0, test_fraction=0.8).test).sum() == 1
