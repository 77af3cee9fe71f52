"""False label counts, shared samples, and data sets that are streams of their own."""

import gzip
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.cli.build import assemble
from fedjax_cfl.data import datasets, partition, perturb, stream
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR
from fedjax_cfl.data.datasets.leaf_sets import parse_hour
from fedjax_cfl.data.federated import federate, train_label_counts
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

KEY = jax.random.key(5)
real = pytest.mark.skipif(
    not os.environ.get(DATA_ENV_VAR), reason=f"real data: {DATA_ENV_VAR} is not set"
)


def make_pool():
    """Returns 600 samples of 6 labels, the last ones rare."""
    label = np.repeat(np.arange(6), (200, 150, 100, 80, 40, 30))
    return Pool(np.arange(600, dtype=np.float32)[:, None], label, 6)


def mean_distance(data):
    """Returns the mean L1 distance of two clients' label shares (Fielding, appendix B.2)."""
    counts = np.asarray(train_label_counts(data), float)
    shares = counts / counts.sum(1, keepdims=True)
    each = abs(shares[:, None] - shares).sum(2)
    return each.sum() / (len(each) * (len(each) - 1))


@pytest.mark.parametrize("fraction", [0, 0.1, 0.4, 1])
def test_false_reports_are_permutations_of_so_many_clients(fraction):
    orders = perturb.draw_false_orders(KEY, 50, 30, fraction)
    np.testing.assert_array_equal(jnp.sort(orders, axis=1), np.tile(np.arange(30), (50, 1)))
    assert int((orders != jnp.arange(30)).any(1).sum()) == fraction * 50
    shares = np.random.default_rng(0).dirichlet(np.ones(30), 50)
    told = np.asarray(perturb.report_falsely(jnp.asarray(shares, jnp.float32), orders))
    np.testing.assert_allclose(told.sum(1), 1, rtol=1e-5)  # they stay on the simplex
    expected = [share[order] for share, order in zip(shares, np.asarray(orders), strict=True)]
    np.testing.assert_allclose(told, expected, rtol=1e-6)


@pytest.mark.nightly
def test_more_shared_samples_bring_clients_closer():
    pool = make_pool()
    held = partition.dirichlet_per_client(
        pool, clients=8, samples_per_client=40, alpha=1.0, test_fraction=0.2
    )
    levels, made = ((0, 1.0), (1, 0.5), (1, 1.0), (2, 1.0)), []
    for per_label, share in levels:
        more = perturb.share_samples(pool, held, per_label, share, seed=1)
        made.append(federate(pool, more))
        added = int(made[-1].train.size[0] - made[0].train.size[0])
        assert added == per_label * share * 6
        assert (made[-1].test.size == made[0].test.size).all()
        if per_label:
            given = [more.sample[more.shared & (more.owner == k)] for k in range(8)]
            assert all((one == given[0]).all() for one in given)
            assert not np.isin(given[0], held.sample[held.test]).any()
            assert (np.bincount(pool.y[given[0]], minlength=6)[:3] > 0).all() == (share == 1)
    distances = [mean_distance(one) for one in made]
    assert distances == sorted(distances, reverse=True) and len(set(distances)) == 4


@pytest.mark.nightly
def test_shared_samples_are_in_every_window():
    pool = make_pool()
    held = partition.iid(pool, clients=5, test_fraction=0.2)
    data = federate(pool, perturb.share_samples(pool, held, 1))
    made = stream.bucket(intervals=6, period=1, retained=1)
    now, memory = made.init(KEY, data)
    step, shared = jax.jit(made.apply), np.flatnonzero(np.asarray(data.time) < 0)
    for round in range(6):
        now, memory, _ = step(KEY, round, now, memory, jnp.ones(5, bool))
        order, start, size = (np.asarray(a) for a in jax.tree.leaves(now.train))
        mine = [order[a : a + b] for a, b in zip(start, size, strict=True)]
        assert np.isin(shared, np.concatenate(mine)).all()
        assert size.sum() < 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_label": -1}, "shared_samples.per_label=-1: must be a whole number"),
        ({"per_label": 1, "label_share": 2}, "shared_samples.label_share=2: must be a number"),
        ({"per_label": 1000}, "shared_samples.per_label=1000: label 0 has 160 training samples"),
    ],
)
def test_bad_shared_samples_are_one_line(settings, message):
    pool = make_pool()
    held = partition.iid(pool, clients=5, test_fraction=0.2)
    held = held._replace(test=np.arange(600) % 5 == 0, sample=np.arange(600))
    with pytest.raises(InputError, match=message) as raised:
        perturb.share_samples(pool, held, **settings)
    assert "\n" not in str(raised.value)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))

    return write


HEADER = "period,nswprice,nswdemand,vicprice,vicdemand,transfer,class"


def test_tables_are_read(root):
    root("elec2/elec.csv.gz", f"{HEADER}\n" + "0,.1,.2,.3,.4,.5,1\n0.5,.1,.2,.3,.4,.5,0\n" * 2)
    pool = datasets.elec2(clients=3)
    assert pool.x.shape == (4, 6) and pool.x.dtype == np.float32 and pool.x[1, 0] == 0.5
    assert pool.y.tolist() == [1, 0, 1, 0] and pool.client.tolist() == [0, 1, 2, 0]
    assert pool.time.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "y=class is not there"),
        (f"{HEADER}\n", "table has no rows"),
        (f"{HEADER}\n1,2\n", "column class has no value in row 1"),
        (f"{HEADER}\n0,0,0,0,0,x,1\n", "column transfer is 'x' in row 1"),
        (f"{HEADER}\n" + "0,0,0,0,0,0,2\n" * 48, "y is 2 in sample 0"),
        (f"{HEADER}\n0,0,0,0,0,0,1\n", "dataset.source.clients=48: at most 1"),
    ],
)
def test_bad_tables_are_one_line(root, text, message):
    root("elec2/elec.csv.gz", text)
    with pytest.raises(InputError, match=message) as raised:
        datasets.elec2()
    assert "\n" not in str(raised.value)


def test_missing_tables_are_named(root):
    with pytest.raises(InputError, match=r"not found: \w+/\w+.csv.gz; put it .* of https://"):
        datasets.elec2()


@pytest.mark.parametrize(
    ("date", "hour"),
    [
        ("Thu Jan 01 05:59:59 PDT 1970", 5),
        ("Mon Apr 06 22:19:45 PDT 2009", 344_182),
        ("Mon Foo 06 22:19:45 PDT 2009", None),
        ("Mon Feb 30 22:19:45 PDT 2009", None),
        ("Mon Apr 06 25:19:45 PDT 2009", None),
        ("2009-04-06", None),
        (7, None),
    ],
)
def test_dates_of_tweets(date, hour):
    assert parse_hour(date) == hour


@real
def test_elec2_by_time(monkeypatch):
    """The half-hours that a client has in each window are those of its stretch of days."""
    # JAX has started long ago
    monkeypatch.setattr("fedjax_cfl.cli.build.use_cpu_cores", lambda: None)
    *_, data, _ = assemble(["dataset=elec2", "drift=by_time"])
    assert data.num_clients == 48 and data.y.size == 45_312
    assert np.bincount(data.y).tolist() == [26_075, 19_237]
    made = stream.by_time()
    now, memory = jax.jit(made.init)(KEY, data)
    step, days, time = jax.jit(made.apply), 944, np.asarray(data.time)
    for round in (0, 48, 49, 398, 399):
        if round:
            now, memory, _ = step(KEY, round, now, memory, jnp.ones(48, bool))
        seen = time[np.asarray(now.owner) >= 0]
        if round in (0, 399):
            begin = 0 if round == 0 else 45_312 * 8 // 10
            assert seen.min() == pytest.approx(begin, abs=1)
            assert seen.size == pytest.approx(45_312 / 5, abs=2)
            assert abs(np.asarray(now.train.size + now.test.size) - days / 5).max() <= 1


@pytest.mark.nightly
@real
def test_sent140_by_date():
    pool = datasets.sent140(min_tweets=100)
    assert pool.time is not None and np.ptp(pool.time) // 24 == 79  # 6 April to 25 June 2009
    data = cfl.federate(pool, partition.by_user(pool, test_fraction=0.2))
    shares = []
    made = stream.by_time(intervals=4, period=1, retained=1)
    now, memory = made.init(KEY, data)
    for round in range(4):
        seen = np.asarray(now.owner) >= 0
        shares.append(np.asarray(now.y)[seen].mean())
        now, memory, _ = made.apply(KEY, round, now, memory, None)
    assert max(shares[:2]) > 0.6 and min(shares) < 0.5  # the share of positive tweets falls
