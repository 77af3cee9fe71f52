"""Fielding against loop twins, SciPy and scikit-learn, and its ablations against each other."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import at_once, build, ledger, others_nightly, spent
from scipy.spatial.distance import cdist
from test_metric_kmeans import planted, shares
from test_twins import Rule, follow

from fedjax_cfl import algorithms
from fedjax_cfl.clustering import distances, metric_kmeans, recluster
from fedjax_cfl.data.federated import train_label_shares
from fedjax_cfl.errors import InputError
from fedjax_cfl.system import select

__all__ = ["planted"]


@pytest.fixture(scope="module")
def drifting(toy):
    """Returns f(clients): the toy, but these have shifted and hold label 3 alone."""

    def change(clients):
        mine = np.isin(np.asarray(toy.owner), clients)
        y = np.where(mine, 3, np.asarray(toy.y))
        shifted = np.isin(np.arange(toy.num_clients), clients)
        return toy.replace(y=jnp.asarray(y, jnp.int32), shifted=jnp.asarray(shifted))

    return change


def twin_moves(points, valid, drifted, labels, centers, active):
    """Algorithm 2, lines 1 to 5, client by client."""
    new, after = labels.copy(), centers.copy()
    for i in np.flatnonzero(drifted):
        apart = [
            np.abs(points[i] - c).sum() if a else np.inf
            for c, a in zip(centers, active, strict=True)
        ]
        new[i] = int(np.argmin(apart))
    for k in range(len(centers)):
        if any(drifted & ((labels == k) | (new == k))) and any(valid & (new == k)):
            after[k] = points[valid & (new == k)].mean(0)
    used = [k for k in range(len(centers)) if any(valid & (new == k))]
    pairs = [np.abs(after[k] - after[j]).sum() for k in used for j in used if k < j]
    return new, after, np.abs(after - centers).sum(1).max(), np.mean(pairs)


def example(seed=0, clients=30, m=5):
    rng = np.random.default_rng(seed)
    points, labels = shares(rng, clients, 6), rng.integers(m - 1, size=clients)
    centers = np.stack([points[labels == k].mean(0) if k < m - 1 else points[0] for k in range(m)])
    drifted = rng.random(clients) < 0.4
    points[drifted] = shares(rng, drifted.sum(), 6)
    valid = rng.random(clients) < 0.9
    return points, valid, drifted & valid, labels, centers.astype("f4"), np.arange(m) < m - 1


@pytest.mark.parametrize("seed", others_nightly(range(3), [0]))
def test_moves_equal_their_twin_whatever_the_order_of_clients(seed):
    points, valid, drifted, labels, centers, active = example(seed)
    new, after, shift, theta = twin_moves(points, valid, drifted, labels, centers, active)
    order = np.random.default_rng(9).permutation(30)
    measures = centers, active, distances.l1

    @jax.jit
    def apply(*given):
        return recluster.apply_moves(*given, *measures)._replace(metric=None)

    for rows in (np.arange(30), order):
        given = (each[rows] for each in (points, valid, drifted, labels))
        moves = jax.device_get(apply(*given))._replace(metric=distances.l1)
        np.testing.assert_array_equal(moves.labels, new[rows])
        np.testing.assert_allclose(moves.after, after, atol=1e-6)
    assert (new != labels).any()
    ratio = shift / theta
    for tau, fires in ((0, True), (0.99 * ratio, True), (1.01 * ratio, False), (np.inf, False)):
        assert recluster.center_shift(tau).fires((), moves) == fires


def test_no_drift_no_change_and_an_emptied_group_keeps_its_center():
    points, valid, _, labels, centers, active = example()
    nobody = np.zeros(30, bool)
    moves = recluster.apply_moves(
        points, valid, nobody, labels, jnp.asarray(centers), active, distances.l1
    )
    np.testing.assert_array_equal(moves.labels, labels)
    np.testing.assert_array_equal(moves.after, centers)
    leaving = labels == 2
    points[leaving] = centers[0]
    moves = recluster.apply_moves(
        points, valid, leaving, labels, jnp.asarray(centers), active, distances.l1
    )
    assert not moves.occupied[2] and (moves.labels[leaving] == 0).all()
    np.testing.assert_array_equal(moves.after[2], centers[2])


@pytest.mark.nightly
def test_one_group_never_fires_and_slow_drift_adds_up_only_since_the_last_clustering():
    points = jnp.asarray(shares(np.random.default_rng(0), 4, 3))
    ones, zeros = jnp.ones(4, bool), jnp.zeros(4, jnp.int32)
    moves = recluster.apply_moves(
        points, ones, ones, zeros, jnp.zeros((2, 3)), jnp.array([True, False]), distances.l1
    )
    assert not recluster.center_shift(0.0).fires((), moves)
    step, since = recluster.center_shift(0.3), recluster.center_shift_since_clustering(0.3)
    base = jnp.asarray([[0.0, 1.0], [1.0, 0.0]])
    memory, fired = since.init(base), []
    for n in range(1, 6):
        shifted = [base + n * jnp.asarray([[0.061, -0.061], [0.061, -0.061]]) for n in (n - 1, n)]
        moves = recluster.DriftEvent(base, ones[:2], zeros[:2], *shifted, ones[:2], distances.l1)
        fired.append((bool(step.fires((), moves)), bool(since.fires(memory, moves))))
        memory = since.update(memory, jnp.array(fired[-1][1]), shifted[1])
    assert fired == [(False, n == 5) for n in range(1, 6)]
    np.testing.assert_array_equal(memory, shifted[1])


def test_a_shift_of_just_tau_times_the_distance_of_centers_fires():
    """From 1 and 4 to 2 and 4: a center has moved by 1, and their distance is 2."""
    before, after = jnp.array([[1.0], [4.0]]), jnp.array([[2.0], [4.0]])
    both = jnp.ones(2, bool)
    moves = recluster.DriftEvent(after, both, jnp.arange(2), before, after, both, distances.l1)
    assert recluster.center_shift(0.5).fires((), moves)
    assert not recluster.center_shift(0.51).fires((), moves)


def test_pairwise_trigger():
    trigger = recluster.pairwise(0.1)
    memory, deltas = trigger.init(jnp.zeros((2, 2))), []
    for fired in (True, True, True, False, False, True):
        deltas.append(float(memory[0]))
        memory = trigger.update(memory, jnp.array(fired), jnp.zeros((2, 2)))
    np.testing.assert_allclose(deltas, [0.1, 0.1, 0.2, 0.4, 0.3, 0.2], atol=1e-6)
    points, valid, drifted, labels, centers, active = map(jnp.asarray, example())
    moves = recluster.apply_moves(points, valid, drifted, labels, centers, active, distances.l1)
    apart = cdist(points, points, "cityblock")
    inside = (np.asarray(moves.labels)[:, None] == moves.labels) & valid[:, None] & valid
    widest = (apart * inside).max()
    for delta, fires in ((0.999 * widest, True), (1.001 * widest, False)):
        assert trigger.fires((jnp.float32(delta), jnp.array(False)), moves) == fires
        fixed = recluster.pairwise_fixed(delta)
        assert fixed.fires(fixed.update(fixed.init(centers), True, centers), moves) == fires


@pytest.mark.nightly
def test_only_clusters_with_members_are_in_use():
    """Two distinct points, and up to four clusters: no third one waits for clients."""
    points = jnp.asarray(np.repeat(np.eye(3, dtype="f4")[:2], 5, axis=0))
    valid = jnp.arange(10) > 0
    for key in jax.random.split(jax.random.key(0), 5):
        for cluster in (metric_kmeans.by_silhouette(restarts=1), metric_kmeans.k_center):
            labels, active = cluster(key, points, valid, 4, distances.l1)
            assert set(np.asarray(labels)) == set(np.flatnonzero(active)) and active.sum() == 2
    of_nobody = metric_kmeans.clusters_in_use(labels, jnp.zeros(10, bool), 4)
    assert of_nobody.tolist() == [True, False, False, False]


def test_new_models_are_means_of_their_clients_old_ones():
    rng = np.random.default_rng(0)
    old, new, valid = rng.integers(4, size=20), rng.integers(3, size=20), rng.random(20) < 0.8
    weights = recluster.mixing_weights(old, new, valid, 4)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    tree = {"w": rng.normal(size=(4, 3)).astype("f4"), "count": np.arange(4)}
    mixed = recluster.mix_former_models(weights, tree)
    for k in range(3):
        wanted = tree["w"][old[valid & (new == k)]].mean(0)
        np.testing.assert_allclose(mixed["w"][k], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(mixed["w"][3], tree["w"][3])
    np.testing.assert_array_equal(mixed["count"], tree["count"])
    same = recluster.mixing_weights(old, old, np.ones(20, bool), 4)
    np.testing.assert_allclose(same, np.eye(4), atol=1e-6)
    equal = recluster.mix_former_models(weights, jnp.ones((4, 2)))
    np.testing.assert_allclose(equal, 1, rtol=1e-6)


def test_mean_client_distance_equals_its_loop(planted):
    points, labels = planted[0], np.random.default_rng(0).integers(3, size=60)
    labels[7] = 3  # alone
    valid = np.arange(60) % 4 > 0
    apart, each = cdist(points, points, "cityblock"), []
    for i in np.flatnonzero(valid):
        others = [j for j in np.flatnonzero(valid) if j != i and labels[j] == labels[i]]
        each.append(apart[i, others].mean() if others else 0.0)
    given = jnp.asarray(points), jnp.asarray(labels), 4, jnp.asarray(valid), distances.l1
    found = at_once(metric_kmeans.mean_client_distance, *given)
    assert found == pytest.approx(np.mean(each), rel=1e-5)


def run(algorithm, steps, rounds=None, start=None, fired=None, round_fn=None):
    """Returns the states of rounds on the data of `steps`, with one compilation; `fired` gets
    the new clusterings of each round; `round_fn` is the compiled round, where there is one.
    """
    key, round_fn = jax.random.key(0), round_fn or jax.jit(algorithm.round)
    states = [start or jax.jit(algorithm.init)(key, steps[0])]
    for data in steps[:rounds]:
        state, info = round_fn(key, states[-1], data)
        states.append(state)
        if fired is not None:
            fired.append(int(info.reclustered))
    assert getattr(round_fn, "func", round_fn)._cache_size() <= 1
    return states


SETTINGS = {"m": 3, "cluster": "k_center", "trigger": "center_shift"}


def method(linear, local, quota=6, **settings):
    by_group = select.by_group(quota)
    return build(algorithms.fielding, linear, local, by_group, **(SETTINGS | settings))


def test_a_drift_event_by_hand(toy, drifting, linear, local):
    """The state after a drift event equals the parts applied one after another."""
    still, moved = drifting([]), drifting([1, 3, 7])

    def make(tau):
        return method(linear, local, 3 * 14, tau=tau, mu=0.3)

    step = jax.jit(lambda tau, *given: make(tau).round(*given))
    for tau in (1e-6, 1e6):
        fired = []
        round_fn = functools.partial(step, tau)
        states = run(make(tau), [still, moved], fired=fired, round_fn=round_fn)
        begun, before, after = jax.device_get(states)
        everybody, rule = np.flatnonzero(toy.train.size).tolist(), Rule(weighs=False, mu=0.3)
        assert follow(begun, before, still, local, everybody, rule, jax.random.key(0)) > 1
        if tau > 1:
            follow(before, after, moved, local, everybody, rule, jax.random.key(0))
        points = np.asarray(train_label_shares(moved))
        drifted = np.abs(points - before.rows["reports"].reported).sum(1) > 0
        assert set(np.flatnonzero(drifted)) == {1, 3, 7}
        new, centers, shift, theta = twin_moves(
            points,
            np.asarray(toy.train.size) > 0,
            drifted,
            np.asarray(before.assignment),
            np.asarray(before.memory.centers),
            np.asarray(before.active),
        )
        np.testing.assert_array_equal(after.rows["reports"].reported, points)
        assert fired == [0, shift >= tau * theta]
        if tau > 1:
            np.testing.assert_array_equal(after.assignment, new)
            np.testing.assert_allclose(after.memory.centers, centers, atol=1e-6)
        assert spent(before, after).words_up == 4 * 3  # C words of each drifted client


@pytest.mark.nightly
def test_ablations(drifting, linear, local):
    steps = [
        drifting([]),
        drifting([1, 3, 7, 9]),
        drifting([1, 3, 7, 9]).replace(shifted=jnp.zeros(14, bool)),
    ]
    fired = {name: [] for name in ("always", "never", "static", "cohort")}
    states = {
        name: run(method(linear, local, **settings), steps, fired=fired[name])
        for name, settings in {
            "always": {"trigger": "always"},
            "never": {"trigger": "never"},
            "static": {"reporters": "none"},
            "cohort": {"reporters": "cohort"},
        }.items()
    }
    assert fired["always"] == [0, 1, 0]
    assert fired["never"] == fired["static"] == [0, 0, 0]
    moved = np.flatnonzero(states["never"][1].assignment != states["never"][2].assignment)
    assert 0 < len(moved) and set(moved) <= {1, 3, 7, 9}
    np.testing.assert_array_equal(states["static"][0].assignment, states["static"][-1].assignment)
    # those heard of are the clients of the cohort before; the others wait
    before, after = states["cohort"][1:3]
    shifted = np.isin(np.arange(14), [1, 3, 7, 9])
    told = np.any(
        np.asarray(before.rows["reports"].reported != after.rows["reports"].reported), axis=1
    )
    np.testing.assert_array_equal(told, shifted & np.asarray(before.rows["reports"].may_report))
    np.testing.assert_array_equal(after.rows["reports"].pending, shifted & ~told)


@pytest.mark.nightly
def test_moments_of_the_server_follow_their_models(toy, drifting, linear, local):
    """A server that keeps its moments as they are has, after an event, those of its clients'
    former groups, in the shares in which the models were mixed.
    """
    kept = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda step, moments, params: (jax.tree.map(jnp.negative, step), moments),
    )
    algorithm, fired = method(linear, local, trigger="always", server=kept), []
    still, moved = drifting([]), drifting([1, 3, 7, 9])
    _, before = run(algorithm, [still])
    draws = np.random.default_rng(0)
    given = jax.tree.map(lambda leaf: jnp.float32(draws.normal(size=leaf.shape)), before.server)
    _, after = run(algorithm, [moved], start=before.replace(server=given), fired=fired)
    assert fired == [1]
    points, valid = np.asarray(train_label_shares(moved)), np.asarray(toy.train.size) > 0
    drifted = np.isin(np.arange(14), [1, 3, 7, 9])
    places = (before.assignment, before.memory.centers, before.active)
    labels, *_ = twin_moves(points, valid, drifted, *map(np.asarray, places))
    shares = np.zeros((3, 3))
    for client in np.flatnonzero(valid):
        shares[after.assignment[client], labels[client]] += 1
    size = shares.sum(1, keepdims=True)
    shares = np.where(size > 0, shares / np.maximum(size, 1), np.eye(3))
    assert (np.abs(shares - np.eye(3)) > 0.1).any(), "nothing is mixed"
    for found, leaf in zip(jax.tree.leaves(after.server), jax.tree.leaves(given), strict=True):
        expected = np.einsum("kj,j...->k...", shares, leaf)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_bytes_of_the_start_and_of_events(toy, drifting, linear, local):
    alive = int((np.asarray(toy.train.size) > 0).sum())
    sent = ledger(run(method(linear, local), [toy], rounds=0)[0].traffic)
    assert (sent.words_up, sent.words_down, sent.units_up, sent.units_down) == (4 * alive, 0, 0, 0)
    shared = 5 * 8 + 8 + 8 * 4 + 4
    settings = {"represent": "embedding", "units": 8, "epochs": 2}
    sent = ledger(run(method(linear, local, **settings), [toy], rounds=0)[0].traffic)
    assert (sent.words_up, sent.words_down) == (8 * alive, 14 * shared)
    steps = [drifting([]), drifting([1, 7])]
    *_, before, after = states = run(method(linear, local, represent="gradient"), steps)
    start, event = ledger(states[0].traffic), spent(before, after)
    assert (start.units_up, start.units_down, start.words_up) == (alive, 14, 0)
    assert event.units_up - event.units_down == 2


@pytest.mark.nightly
def test_false_reports_are_permuted_alike_in_every_event(drifting, linear, local):
    """Half of the clients report their shares in another order, each always in the same one."""
    steps = [drifting([]), drifting(list(range(14)))]
    honest, false = (run(method(linear, local, false_reports=share), steps) for share in (0.0, 0.5))
    _, orders = false[0].memory.shared
    assert (np.asarray(orders) != np.arange(4)).any(axis=1).sum() == 7
    for before, after in zip(honest, false, strict=True):
        expected = np.take_along_axis(
            np.asarray(before.rows["reports"].reported), np.asarray(orders), 1
        )
        np.testing.assert_array_equal(after.rows["reports"].reported, expected)
        assert ledger(before.traffic).words_up == ledger(after.traffic).words_up
    assert (
        np.asarray(honest[-1].rows["reports"].reported) != false[-1].rows["reports"].reported
    ).any()


@pytest.mark.nightly
def test_a_report_threshold_keeps_small_shifts_quiet(drifting, linear, local):
    steps = [drifting([]), drifting([1, 3])]
    fired = {0.0: [], 2.5: []}
    _, quiet = (
        run(method(linear, local, report_above=above, trigger="always"), steps, fired=fired[above])
        for above in fired
    )
    assert fired == {0.0: [0, 1], 2.5: [0, 0]}
    np.testing.assert_array_equal(
        quiet[-1].rows["reports"].reported, quiet[0].rows["reports"].reported
    )


@pytest.mark.nightly
def test_the_pairwise_trigger_counts_events_in_which_a_report_has_changed(drifting, linear, local):
    """It fires in two of them in a row, whatever round lies between, and doubles."""
    algorithm = method(linear, local, m=1, trigger="pairwise", delta=0.1)
    steps = [drifting([]), drifting([1, 7]), drifting([1, 7]), drifting([3, 9])]
    fired = []
    *_, first, same, last = run(algorithm, steps, fired=fired)
    assert fired == [0, 1, 0, 1]
    assert [float(state.memory.trigger[0]) for state in (first, same, last)] == pytest.approx(
        [0.1, 0.1, 0.2]
    )


@pytest.mark.nightly
def test_one_group_is_fedavg(toy, linear, local):
    states = run(method(linear, local, m=1, aggregate="samples"), [toy] * 3)
    plain = algorithms.fedavg(linear, local, select.by_group(6))
    start = jax.jit(plain.init)(jax.random.key(0), toy).replace(groups=states[0].groups)
    last = run(plain, [toy] * 3, start=start)[-1]
    chex.assert_trees_all_close(states[-1].groups, last.groups, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_q_zero_and_tiny_q_agree(toy, linear, local):
    plain, fair = (run(method(linear, local, q=q), [toy])[-1] for q in (0.0, 1e-6))
    chex.assert_trees_all_close(plain.groups, fair.groups, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
def test_a_large_pull_keeps_clients_near(toy, linear, local):
    def step(mu):
        before, after = run(method(linear, local, mu=mu), [toy])
        return optax.tree.norm(jax.tree.map(jnp.subtract, after.groups, before.groups))

    assert step(0.0) > step(4.0) > 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"m": 0}, "algorithm.m=0"), ({"q": -1.0}, "algorithm.q=-1"), ({"mu": -0.1}, "algorithm.mu")],
)
def test_bad_settings_are_refused(linear, local, settings, text):
    with pytest.raises(InputError, match=text):
        method(linear, local, **settings)
