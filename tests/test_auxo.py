"""Auxo against a loop twin on random updates, and on the toy."""

import importlib
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, build, nightly

from fedjax_cfl import algorithms
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Round
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.system import select

auxo = importlib.import_module("fedjax_cfl.algorithms.auxo")  # the name of the function, too


def twin_score(signature, fit, labels, first, several):
    """Scores the clients of a group one by one; `labels` are those of 2-means."""
    member, known, side, score = (np.asarray(each) for each in fit[:4])
    side, score, rows = side.copy(), score.copy(), np.flatnonzero(member)
    if len(rows) < 5:
        return side, score
    centered = signature - signature[rows].mean(0)
    unit = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    named = {}
    if first:
        mine = [i for i in rows if known[i]] if several else rows
        named = {i: labels[i] for i in mine} if len(mine) > 1 else {}
    else:
        clear = [i for i in rows if side[i, 0] != side[i, 1] and score[i] >= 0]
        named = {i: int(side[i, 1] > side[i, 0]) for i in clear}
        rest = [i for i in rows if i not in named]
        if len(set(named.values())) == 2:
            for i in rest:
                named[i] = named[min(clear, key=lambda j: np.sum((unit[i] - unit[j]) ** 2))]
        elif clear:
            rest.sort(key=lambda i: np.sum((unit[i] - unit[clear[0]]) ** 2))
            named |= {i: named[clear[0]] for i in rest[: len(rows) // 4]}
    for i, label in named.items():
        side[i, label] += 1
        side[i, 1 - label] -= 1
    friends = [i for i in rows if known[i]]
    if several and len(friends) >= 2:
        apart = np.linalg.norm(centered - centered[friends].mean(0), axis=1)
        limit = apart[rows].mean() + apart[rows].std()
        for i in rows:
            reward = (5 - 5 * apart[i] / limit) * len(friends) / len(rows)
            score[i] += reward
            if reward < 0:
                side[i] = score[i] / 2
    return side, score


score_group = jax.jit(auxo.score_group)


@jax.jit
def halves(key, rows, weight):
    return auxo.kmeans(key, rows, 2, restarts=auxo.RESTARTS, weight=weight).labels


@pytest.mark.parametrize("several", [nightly(False), True])
@pytest.mark.parametrize(
    "case", ["first", "both", nightly("one"), nightly("none"), "few", nightly("alone")]
)
def test_scores_equal_their_twin(case, several):
    rng = np.random.default_rng(len(case))
    signature = rng.normal(size=(16, 12)).astype("f4")
    member = np.arange(16) < (4 if case == "few" else 13)
    known, score = rng.random(16) < 0.6, rng.normal(2, 2, size=16).astype("f4")
    if case == "alone":
        known = np.arange(16) == 3
    side = np.full((16, 2), 0.5, "f4")
    clear = rng.random(16) < (0.4 if case in ("both", "one", "few") else 0)
    clear[:2] |= case in ("both", "one")
    side[clear, rng.integers(2, size=clear.sum()) if case == "both" else 1] += 1
    score[:2] = 3
    key, first = jax.random.key(0), case == "first"
    fit = auxo.Fit(*map(jnp.asarray, (member, known, side, score, first, several)))
    rows = member & known if several else member
    centered = signature - signature[member].mean(0)
    unit = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    labels = halves(key, unit.astype("f4"), rows.astype("f4"))
    found = score_group(key, jnp.asarray(signature), fit)
    wanted = twin_score(signature, fit, np.asarray(labels), first, several)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_last_tenth():
    tree = {"a": np.arange(24).reshape(2, 3, 4), "b": np.arange(100, 118).reshape(2, 9)}
    np.testing.assert_array_equal(auxo.last_tenth(tree), [[107, 108], [116, 117]])
    wide = {"a": np.zeros((1, 40)), "b": np.ones((1, 3))}
    np.testing.assert_array_equal(auxo.last_tenth(wide), [[0, 1, 1, 1]])


def begin(toy, linear, local):
    algorithm = algorithms.auxo(linear, local, select.full_participation(), m=3)
    return jax.jit(algorithm.init)(jax.random.key(0), toy)


def test_a_cut_copies_the_model_and_shares_out_the_clients(toy, linear, local):
    state = begin(toy, linear, local)
    prefer = np.arange(14) % 3  # 0, 1, or neither
    side = np.full((14, 3, 2), 0.5, "f4")
    side[prefer == 0, 0, 0] += 1
    side[prefer == 1, 0, 1] += 1
    scores = state.rows["scores"]
    scores = scores.replace(side=jnp.asarray(side), count=scores.count.at[:, 0].set(4))
    state = state.put_rows({"scores": scores})
    unlike = jax.tree.map(
        lambda leaf: leaf + np.arange(3.0)[(..., *[None] * (leaf.ndim - 1))], state.groups
    )
    state = state.replace(groups=unlike)
    after = at_once(auxo.cut_groups, state, jnp.arange(3) == 0)
    assert after.active.tolist() == [True, True, False]
    for new, old in zip(*map(jax.tree.leaves, (after.groups, unlike)), strict=True):
        np.testing.assert_array_equal(new, np.asarray(old)[[0, 0, 2]])
    np.testing.assert_array_equal(after.rows["scores"].group[:, 0], 1 + (prefer == 0))
    np.testing.assert_array_equal(after.rows["scores"].group[:, 1], 1 + (prefer == 1))
    np.testing.assert_array_equal(after.rows["scores"].count[:, 0], 4 * (prefer == 0))
    np.testing.assert_array_equal(after.rows["scores"].count[:, 1], 4 * (prefer == 1))
    np.testing.assert_array_equal(after.rows["scores"].side[:, 1, 0], (1 + (prefer == 1)) / 2)
    full = at_once(auxo.cut_groups, after.replace(active=jnp.ones(3, bool)), jnp.arange(3) == 0)
    np.testing.assert_array_equal(full.rows["scores"].group, after.rows["scores"].group)


def test_when_groups_are_cut(toy, linear, local):
    state = begin(toy, linear, local)
    active, sizes = state.active, jnp.array([14, 0, 0])
    for rounds, due in ((0, False), (5, True), (6, False), (9, True)):
        cuts = state.memory.replace(rounds=jnp.full(3, rounds))
        due_now = auxo.split_at([5, 9])(state.rows["scores"], cuts, sizes, active)
        assert due_now.tolist() == [due, False, False]
    for ones, zeros, groups, due in ((5, 4, 1, True), (9, 1, 1, True), (9, 0, 1, False),
                                     (9, 2, 2, False), (5, 4, 2, True)):  # fmt: skip
        side = np.full((14, 3, 2), 0.5, "f4")
        side[:ones, 0, 1] += 1
        side[ones : ones + zeros, 0, 0] += 1
        scores, cuts = state.rows["scores"].replace(side=jnp.asarray(side)), state.memory
        rule = auxo.split_adaptively(participants=14, least=14)
        assert rule(scores, cuts, sizes, jnp.arange(3) < groups)[0] == due
        rule = auxo.split_adaptively(participants=14, least=15)
        assert not rule(scores, cuts, sizes, active).any()


def test_clients_stay_where_nothing_could_be_cut(toy, linear, local):
    """All groups are in use, one is empty, and one is due."""
    state = begin(toy, linear, local)
    scores = state.rows["scores"].replace(
        group=jnp.tile(jnp.array([0.0, 1.0, 2.0]), (14, 1)),
        count=jnp.ones((14, 3)),
        joining=jnp.arange(14) == 3,
    )
    full = state.replace(
        round=jnp.int32(5),
        active=jnp.ones(3, bool),
        memory=state.memory.replace(rounds=jnp.full(3, 5)),
        assignment=jnp.zeros(14, jnp.int32),
    ).put_rows({"scores": scores})
    join = auxo.split_and_join(auxo.split_at([5]), 0.0)
    after, _ = at_once(join, Round(jax.random.key(0), full, toy))
    assert np.flatnonzero(after.assignment).tolist() == [3]


def test_clients_explore_less_and_less(toy, linear, local):
    """0.8 * 0.99^69 = 0.4 of 4,000 clients join a random one of two groups, the others their
    best.
    """
    state, clients = begin(toy, linear, local), 4000
    best = jnp.tile(jnp.array([0.0, 1.0, 9.0]), (clients, 1))
    scores = state.rows["scores"].replace(
        group=best,
        side=jnp.zeros((clients, 3, 2)),
        count=jnp.ones((clients, 3)),
        joining=jnp.ones(clients, bool),
    )
    state = state.replace(
        active=jnp.array([True, True, False]), assignment=jnp.zeros(clients, jnp.int32)
    ).put_rows({"scores": scores})
    migrate = auxo.split_and_join(auxo.split_at([5]), 0.8)
    data = SimpleNamespace(num_clients=clients, train=SimpleNamespace(size=jnp.ones(clients)))
    go = jax.jit(lambda state: migrate(Round(jax.random.key(0), state, data))[0])
    for round, wanted in ((0, 1600), (69, 800), (2000, 0)):
        after = go(state.replace(round=jnp.int32(round)))
        assert abs(int(jnp.sum(after.assignment == 0)) - wanted) <= 120 * (wanted > 0)


@pytest.mark.nightly
def test_a_cut_comes_when_it_is_due_and_nothing_is_traced_again(toy, linear, local):
    algorithm = build(
        algorithms.auxo,
        linear,
        local,
        select.by_group(14),
        m=2,
        split="fixed",
        split_rounds=[6],
        explore=0.0,
    )
    key, step = jax.random.key(1), jax.jit(algorithm.round)
    state, sizes = jax.jit(algorithm.init)(key, toy), []
    for _ in range(12):
        state, _ = step(key, state, toy)
        sizes.append(int(state.active.sum()))
    assert sizes == [1] * 6 + [2] * 6
    assert step._cache_size() == 1
    assert set(np.delete(state.assignment, 2)) == {0, 1}
    assert state.assignment[2] == -1  # it has no samples
    assert (state.rows["scores"].count[:, 1] > 0).any()


@pytest.mark.nightly
def test_without_a_cut_auxo_is_fedavg(toy, linear, local):
    key, everyone = jax.random.key(0), select.full_participation()
    one = algorithms.auxo(linear, local, everyone, m=1, explore=0.0)
    plain = algorithms.fedavg(linear, local, everyone, aggregate=uniform_mean)
    state, other = (
        jax.jit(each.round)(key, jax.jit(each.init)(key, toy), toy)[0] for each in (one, plain)
    )
    for a, b in zip(jax.tree.leaves(state.groups), jax.tree.leaves(other.groups), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bad_settings_are_refused(linear, local):
    with pytest.raises(InputError, match=r"algorithm.split_rounds=\[0\]"):
        auxo.split_at([0])
    with pytest.raises(InputError, match=r"algorithm\.explore=2"):
        algorithms.auxo(linear, local, select.uniform(3), explore=2)


@pytest.mark.nightly
def test_the_cut_of_ten_clients_is_about_the_best_of_all():
    """Beside all 511 cuts, of 40 groups of random unit vectors."""
    unit = np.random.default_rng(0).normal(size=(40, 10, 30))
    unit /= np.linalg.norm(unit, axis=2, keepdims=True)
    sides = np.array([sides for sides in itertools.product((0, 1), repeat=10) if any(sides)])
    sides = sides[sides[:, 0] == 0]
    sizes = sides.sum(1)

    def spread(x):
        """Sums of squared distances from the means of the sides, of each cut."""
        one, both = sides @ x, x.sum(0)
        parts = (one**2).sum(1) / sizes, ((both - one) ** 2).sum(1) / (10 - sizes)
        return (x**2).sum() - parts[0] - parts[1]

    best = np.array([spread(x).min() for x in unit])
    go = jax.vmap(lambda key, x: kmeans(key, x, 2, restarts=auxo.RESTARTS).inertia)
    found = jax.jit(go)(jax.random.split(jax.random.key(3), 40), jnp.asarray(unit, jnp.float32))
    assert np.mean(found / best) < 1.004 and np.max(found / best) < 1.03
