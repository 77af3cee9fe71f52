"""What must not matter: how clients share a device, how many devices there are, the
order of the cohort, where samples lie in memory.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, nightly, others_nightly, with_execution

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.fedopt import fedavgm
from fedjax_cfl.algorithms.fedprox import fedprox
from fedjax_cfl.algorithms.flexcfl.flexcfl import flexcfl
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.algorithms.qfedavg import qfedavg
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.data.federated import gather, take_clients
from fedjax_cfl.simulation.vectorize import stack_data
from fedjax_cfl.system import select
from fedjax_cfl.system.power_of_choice import rpow_d
from fedjax_cfl.system.reports import count_to_int
from fedjax_cfl.types import Cohort

KEY = jax.random.key(5)
ROUNDS, CLIENTS = 3, 14
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums in another order
METHODS = {
    "fedavg": lambda task, local, select: fedavg(task, local, select),
    "fedprox with stragglers": lambda task, local, select: fedprox(
        task, local, select, mu=0.1, drop_fraction=0.5
    ),
    "qfedavg": lambda task, local, select: qfedavg(task, local, select, q=1.0),
    "ifca": lambda task, local, select: ifca(task, local, select, m=2),
    "flexcfl": lambda task, local, select: build(
        flexcfl, task, local, select, m=2, alpha=3, pretrain="iters:9", eta_g=0.1, detector=None
    ),
}
OFTEN = "ifca"  # in every run: its clients choose, send words and have groups
# client 2 has no data, client 6 one sample
TABLE = np.array([[1, 4, 2, 9, 13, 0, 7], [5, 3, 8, 2, 11, 6, 10], [12, 0, 9, 5, 1, 2, 3]])


def compiled(method, task, local):
    """Returns go(table of cohorts, data) -> (state, infos) of three rounds from the start."""

    def go(table, data):
        algorithm = METHODS[method](task, local, select.from_table(table))
        state = algorithm.init(KEY, data)
        return jax.lax.scan(
            lambda state, _: algorithm.round(KEY, state, data), state, length=ROUNDS
        )

    return jax.jit(go)


@pytest.fixture(scope="module", params=others_nightly(METHODS, [OFTEN]))
def method(request):
    return request.param


@pytest.fixture(scope="module")
def go(method, mlp, local):
    """One device, one client at a time."""
    return compiled(method, mlp, local)


@pytest.fixture(scope="module")
def usual(go, toy):
    return go(TABLE, toy)


def assert_same(one, other):
    chex.assert_trees_all_equal(one[0].assignment, other[0].assignment)
    chex.assert_trees_all_equal(one[0].traffic, other[0].traffic)
    chex.assert_trees_all_close(one, other, **ROUNDING)


@pytest.mark.parametrize("seed", [0, nightly(1)])
def test_order_of_the_cohort(usual, go, toy, seed):
    shuffled = np.random.default_rng(seed).permuted(TABLE, axis=1)
    assert (shuffled != TABLE).any(axis=1).all()
    assert_same(go(shuffled, toy), usual)


def pairs(*often, rest):
    """Returns (method, how it is spread): IFCA in the ways of `often`; the rest by night."""
    return [
        (name, *way) if name == OFTEN and way in often else nightly(name, *way)
        for name in METHODS
        for way in (*often, *rest)
    ]


@pytest.mark.parametrize(("method", "width"), pairs(rest=[(3,), (4096,)]), indirect=["method"])
def test_width(usual, method, toy, mlp, local, width):
    """Seven clients, by threes and all at once."""
    assert_same(
        compiled(method, mlp, with_execution(local, width=width))(TABLE, toy),
        usual,
    )


@pytest.mark.parametrize(
    ("method", "devices", "width"), pairs((4, 4096), rest=[(8, 1)]), indirect=["method"]
)
def test_devices(usual, method, toy, mlp, local, devices, width):
    """Seven clients: two side by side, and a device without any."""
    assert_same(
        compiled(method, mlp, with_execution(local, mesh=cfl.make_mesh(devices), width=width))(
            TABLE, toy
        ),
        usual,
    )


def chosen_by_loss(task, local):
    """Returns go(key, data) -> (state, infos) of four rounds with clients of high loss."""
    algorithm = fedavg(task, local, rpow_d(4, 9))

    def one(state, _, key, data):
        return algorithm.round(key, state, data)

    def go(key, data, rounds=4, state=None):
        state = algorithm.init(key, data) if state is None else state
        return jax.lax.scan(partial(one, key=key, data=data), state, length=rounds)

    return go


@pytest.fixture(scope="module")
def by_loss(toy, mlp, local):
    return jax.jit(chosen_by_loss(mlp, local))(KEY, toy)


@pytest.mark.nightly
@pytest.mark.parametrize(("devices", "width"), [(1, 3), (4, 4096)])
def test_power_of_choice_on_devices(by_loss, toy, mlp, local, devices, width):
    spread = with_execution(local, mesh=cfl.make_mesh(devices), width=width)
    state, infos = jax.jit(chosen_by_loss(mlp, spread))(KEY, toy)
    known = jnp.isfinite(state.selection)
    assert known.sum() > 8
    chex.assert_trees_all_equal(known, jnp.isfinite(by_loss[0].selection))
    chex.assert_trees_all_close((state, infos), by_loss, **ROUNDING)


@pytest.mark.nightly
def test_power_of_choice_goes_on_where_it_stood(by_loss, toy, mlp, local):
    go = jax.jit(chosen_by_loss(mlp, local), static_argnums=2)
    saved = jax.tree.map(np.asarray, go(KEY, toy, 2)[0])
    resumed, _ = go(KEY, toy, 2, jax.tree.map(jnp.asarray, saved))
    chex.assert_trees_all_equal(resumed, by_loss[0])


@pytest.mark.nightly
def test_power_of_choice_in_a_grid(toy, mlp, local):
    keys = jax.random.split(KEY, 3)
    mapped = chosen_by_loss(
        mlp, local.replace(execution=local.execution._replace(runs_as_one=True))
    )
    together = jax.jit(jax.vmap(mapped, (0, None)))(keys, toy)
    alone = jax.jit(chosen_by_loss(mlp, local))
    for number, key in enumerate(keys):
        member = jax.tree.map(lambda leaf, number=number: leaf[number], together)
        chex.assert_trees_all_close(member, alone(key, toy), **ROUNDING)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_capacity(usual, go, toy):
    assert_same(go(TABLE, toy.replace(max_client_samples=2 * toy.max_client_samples + 1)), usual)


def moved(data, seed=0):
    """The same data with the samples at other places of the pool: every client still
    holds the same samples in the same order.
    """
    place = np.random.default_rng(seed).permutation(data.y.size)  # sample i goes to place[i]
    source = np.argsort(place)

    def follow(view):
        return view.replace(order=jnp.asarray(place[view.order], jnp.int32))

    arrays = {name: getattr(data, name)[source] for name in ("x", "y", "owner")}
    return data.replace(train=follow(data.train), test=follow(data.test), **arrays)


def shared(data):
    """The same data with every other sample stored once for two, and holdings that name
    rows of the pool in another order: (data with `sample`, the copies it stands for).
    """
    row = np.arange(data.y.size) // 2 * 2
    place = np.random.default_rng(1).permutation(data.y.size)
    pool = jnp.zeros_like(data.x).at[place].set(data.x)
    copies = data.replace(x=data.x[row])
    return data.replace(x=pool, sample=jnp.asarray(place[row], jnp.int32)), copies


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_samples_that_are_shared_are_as_good_as_copies(go, toy):
    """Each client sees the same samples, but the pool holds them once; to the last bit."""
    indexed, copies = shared(toy)
    assert len(np.unique(indexed.sample)) < 0.6 * toy.y.size
    chex.assert_trees_all_equal(go(TABLE, indexed), go(TABLE, copies))


@pytest.mark.nightly
@pytest.mark.parametrize("first_layer", [nightly("direct"), "dual"])
def test_whole_runs_on_shared_samples(toy, mlp, local, first_layer):
    """Evaluation, the memory plan and a sample of clients read them too."""
    algorithm = fedavg(
        mlp,
        with_execution(local, first_layer=first_layer),
        select.uniform(6),
    )
    indexed, copies = shared(toy)
    one, other = (
        cfl.run(algorithm, mlp, data, KEY, rounds=2, mesh=local.execution.mesh)
        for data in (indexed, copies)
    )
    chex.assert_trees_all_equal(one.state, other.state)
    for row, same in zip(one.rows, other.rows, strict=True):
        np.testing.assert_equal(row | {"wall_s": 0}, same | {"wall_s": 0})
    few, same = (take_clients(data, np.array([1, 4, 5, 9, 12])) for data in (indexed, copies))
    for view in ("train", "test"):
        rows, others = getattr(few, view).order, getattr(same, view).order
        chex.assert_trees_all_equal(gather(few, rows), gather(same, others))
        np.testing.assert_array_equal(few.owner[rows], same.owner[others])


def test_grids_stack_shared_samples(toy):
    """Beside data of their own copies, and of another size of pool."""
    indexed, copies = shared(toy)
    wider = indexed.replace(x=jnp.concatenate([indexed.x, indexed.x]))
    both = stack_data([wider, copies])
    for number, one in enumerate((wider, copies)):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], both)
        held = one.train.order
        chex.assert_trees_all_equal(gather(own, held), gather(one, held))


def test_places_in_the_pool(usual, go, toy):
    """No draw looks at a sample's number, only at its place among the samples of its client."""
    assert_same(go(TABLE, moved(toy)), usual)


@pytest.mark.parametrize(
    "method", others_nightly(["fedavg", "qfedavg", "ifca", "flexcfl"], [OFTEN]), indirect=True
)
def test_a_client_without_data_changes_nothing(method, go, toy, mlp, local):
    """Toy client 2 has none. Stragglers are a share of the cohort, so a method that has
    them notices.
    """
    with_it = np.array([[1, 4, 2, 9, 13, 0, 7]] * 3)
    without = np.delete(with_it, 2, axis=1)
    (one, infos), (other, expected) = go(with_it, toy), go(without, toy)
    chex.assert_trees_all_close(one.groups, other.groups, **ROUNDING)
    chex.assert_trees_all_close(
        infos.replace(cold=0, selected=0), expected.replace(cold=0, selected=0), **ROUNDING
    )


@pytest.fixture(scope="module")
def everyone(toy, mlp, local):
    """Trains the clients in given slots: f(ids [14]) -> Upload [14]."""
    models = jax.vmap(mlp.init)(jax.random.split(KEY, 2))
    train = over_clients(sgd(mlp, local), local.execution)

    def go(ids, gid):
        cohort = Cohort(ids=ids, rank=jnp.arange(ids.size))
        return train(cohort, toy, (KEY, models), full_work(gid))

    return jax.jit(go)


def test_empty_slots_do_nothing(everyone, toy):
    upload = everyone(jnp.full(CLIENTS, toy.num_clients), jnp.arange(CLIENTS) % 2)
    for leaf in jax.tree.leaves(upload):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("solver", [sgd, gradient_step])
def test_a_broken_client_spoils_nobody_else(toy, mlp, local, solver):
    """A sample that is not finite may not reach the masked places of another client's batches."""
    broken = toy.replace(x=jnp.where((toy.owner == 11)[:, None], jnp.nan, toy.x))
    models = jax.tree.map(lambda leaf: leaf[None], jax.jit(mlp.init)(KEY))
    train = over_clients(solver(mlp, local), local.execution)
    ids = jnp.arange(CLIENTS)
    go = jax.jit(
        lambda data: train(Cohort(ids=ids, rank=ids), data, (KEY, models), full_work(0 * ids))
    )
    usual, spoilt = go(toy), go(broken)
    assert not np.isfinite(spoilt.loss[11])
    for one, other in zip(jax.tree.leaves(usual), jax.tree.leaves(spoilt), strict=True):
        np.testing.assert_array_equal(np.delete(one, 11, axis=0), np.delete(other, 11, axis=0))


def flipped(tree):
    return jax.tree.map(lambda leaf: leaf[::-1], tree)


def test_uploads_belong_to_the_client_and_not_the_slot(everyone, toy):
    ids, gid = jnp.arange(CLIENTS), jnp.arange(CLIENTS) % 2
    upload = everyone(ids, gid)
    np.testing.assert_array_equal(upload.weight, toy.train.size)
    np.testing.assert_array_equal(upload.steps, 2 * -(-toy.train.size // 5))
    idle = np.asarray(toy.train.size) == 0
    assert idle.sum() == 1
    np.testing.assert_array_equal(upload.start_group, jnp.where(idle, 0, gid))
    for leaf in jax.tree.leaves(upload.replace(start_group=upload.weight)):
        leaf = np.asarray(leaf)
        np.testing.assert_array_equal(leaf[idle], 0)
        assert (np.abs(leaf[~idle]).reshape(CLIENTS - 1, -1).max(1) > 0).all()
    backwards = everyone(ids[::-1].at[3].set(toy.num_clients), gid[::-1])
    others = jnp.delete(ids, CLIENTS - 4)
    chex.assert_trees_all_equal(
        *(jax.tree.map(lambda leaf: leaf[others], sent) for sent in (upload, flipped(backwards)))
    )


@pytest.mark.nightly
def test_a_round_without_data_keeps_the_model(toy, mlp, local):
    algorithm = fedavgm(
        mlp, local, select.from_table(np.array([[0, 1, 4], [2, 2, 2]])), momentum=0.9
    )
    one_round = jax.jit(algorithm.round)
    before, _ = one_round(KEY, jax.jit(algorithm.init)(KEY, toy), toy)
    after, info = one_round(KEY, before, toy)
    chex.assert_trees_all_equal((after.groups, after.server), (before.groups, before.server))
    assert info.clients == count_to_int(info.steps) == 0
    assert jnp.isnan(info.loss) and jnp.isnan(info.discrepancy)
    assert jnp.isnan(info.group_discrepancy).all()
