"""MD-ICFL: the federated model distance, and rounds of the method."""

from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FEATURES, at_once, matrix, spent
from test_synthesis import TURNS, reader, rotated, softmax, trained
from test_twins import Rule, follow

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.md_icfl.md_icfl import (
    class_distances,
    copy_largest,
    md_icfl,
    nearest_group,
    new_models,
    refill_empty_groups,
)
from fedjax_cfl.algorithms.md_icfl.synthesis import back_search, generator
from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.data.federated import train_label_shares
from fedjax_cfl.keys import REGROUP, derive_keys
from fedjax_cfl.method import Round
from fedjax_cfl.simulation.evaluate import ari
from fedjax_cfl.system.reports import count_bytes
from fedjax_cfl.system.select import full_participation, uniform
from fedjax_cfl.types import Rows

KEY = jax.random.key(3)
QUICK = {"samples": 4, "search_steps": 20}
__all__ = ["reader", "rotated", "trained"]


def quick(task, local, m, privacy="weak", select=None, **settings):
    settings = {"m": m, "privacy": privacy} | QUICK | settings
    return md_icfl(task, local, select or full_participation(), **settings)


# the distance


@pytest.fixture(scope="module")
def measured(linear, toy, local, models):
    """Distances [S, m, C] of clients that moved from group id % 3, and all they come from."""
    cohort = make_cohort(jnp.arange(toy.num_clients), toy, local.execution)
    start = (cohort.ids % 3).astype(jnp.int32)
    delta = jax.tree.map(
        lambda leaf: jax.random.normal(KEY, (cohort.ids.size, *leaf.shape[1:])), models
    )
    samples = jax.random.normal(KEY, (3, toy.num_classes, 5, FEATURES))
    measure = jax.jit(class_distances(linear, local))
    return measure, cohort, start, delta, samples


def test_distance_equals_a_numpy_loop(linear, toy, models, measured):
    measure, cohort, start, delta, samples = measured
    found = measure(cohort, toy, (models, samples), (start, delta))

    def answer(kernel, bias, x):
        return softmax(np.asarray(x, np.float64) @ kernel + bias)

    bias, kernel, bias_step, kernel_step = map(
        np.asarray, (*jax.tree.leaves(models), *jax.tree.leaves(delta))
    )
    for slot, origin in enumerate(np.asarray(start)):
        own = kernel[origin] + kernel_step[slot], bias[origin] + bias_step[slot]
        for j in range(3):
            for k in range(toy.num_classes):
                gaps = [
                    sum(abs(answer(*own, x) - answer(kernel[j], bias[j], x))) for x in samples[j, k]
                ]
                np.testing.assert_allclose(found[slot, j, k], np.mean(gaps), atol=1e-5)
    assert found.min() >= 0 and found.max() <= 2


def test_a_model_has_distance_0_from_itself_and_at_most_2_from_any(linear, toy, models, measured):
    measure, cohort, start, delta, samples = measured
    zero = jax.tree.map(jnp.zeros_like, delta)
    found = np.asarray(measure(cohort, toy, (models, samples), (start, zero)))
    own = found[np.arange(start.size), start]
    np.testing.assert_allclose(own, 0.0, atol=1e-6)
    assert found.max() > 0.1
    far = jax.tree.map(lambda leaf: 1e4 * leaf, delta)  # all answers are certain, many disagree
    found = np.asarray(measure(cohort, toy, (models, samples), (start, far)))
    assert 1.0 < found.max() <= 2 + 1e-6


def test_groups_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    share, distance = rng.dirichlet(np.ones(4), 9), rng.uniform(0, 2, (9, 3, 4))
    distance[0] = distance[0, :1]  # a tie goes to the lowest group
    distance[1, 0] = np.nan  # never chosen
    distance[2] = np.inf  # stays
    expected = []
    for i in range(9):
        total = [sum(share[i, k] * distance[i, j, k] for k in range(4)) for j in range(3)]
        finite = [t if np.isfinite(t) else np.inf for t in total]
        expected.append(2 if i == 2 else finite.index(min(finite)))
    assert expected[0] == 0 and expected[1] > 0
    found = nearest_group(jnp.asarray(share), jnp.asarray(distance), jnp.full(9, 2))
    assert found.tolist() == expected


# rounds


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sampling",
    [back_search(samples=10), generator(samples=10, hidden=64, generator_steps=300)],
    ids=["back_search", "generator"],
)
def test_one_call_separates_disjoint_rotations(sampling, rotated, reader, trained):
    """From pre-trained group models of a common start, if clients train long enough to forget
    where they started.
    """
    local = cfl.Local(
        lr=0.1, epochs=200, batch_size=15, execution=cfl.make_execution(cfl.make_mesh(1), 1)
    )
    method = md_icfl(reader, local, full_participation(), m=TURNS, sampling=sampling)
    state = method.init(KEY, rotated).replace(groups=trained)
    truth = jnp.arange(4 * TURNS) // 4
    assert np.mean(state.assignment == truth) < 0.5
    state, _ = jax.jit(method.round)(KEY, state, rotated)
    assert state.assignment.tolist() == truth.tolist()


@pytest.mark.nightly
def test_new_groups_are_the_means_of_their_clients_models(linear, toy, local, models):
    """Clients that end in another group than they started from bring their model along."""
    local = local.replace(epochs=30)
    algorithm = quick(linear, local, 3)
    state = algorithm.init(KEY, toy).replace(groups=models)
    after, _ = jax.jit(algorithm.round)(KEY, state, toy)
    assert np.mean(after.assignment != state.assignment) > 0.2
    # each client alone, from the model of the group it was in
    own = jax.tree.map(lambda leaf: leaf[state.assignment], models)
    trained, weight = matrix(train_alone(linear, local, toy, own)), np.asarray(toy.train.size)
    expected = matrix(models)
    for j in range(3):
        members = [i for i in range(toy.num_clients) if after.assignment[i] == j and weight[i]]
        if members:
            expected[j] = trained[members].mean(axis=0)
    np.testing.assert_allclose(matrix(after.groups), expected, atol=2e-5)


def train_alone(task, local, data, models):
    """Returns the models [K, ...] that clients train in one round, each from its own one."""
    alone = cfl.algorithms.nonfed(task, local, full_participation())
    state = alone.init(KEY, data)
    rows = Rows(models, jnp.ones(data.num_clients, bool))
    state = state.replace(rows=state.rows | {"NonFed": rows})
    return jax.jit(alone.round)(KEY, state, data)[0].rows["NonFed"].values


def skew(toy):
    """Returns the toy whose odd clients have one label."""
    owner = np.asarray(toy.owner)
    y = np.where(owner % 2, owner // 2 % toy.num_classes, toy.y).astype(np.int32)
    return toy.replace(y=jnp.asarray(y))


@pytest.mark.nightly
@pytest.mark.parametrize("privacy", ["weak", "strong"])
def test_a_round_moves_clients_by_the_labels_they_hold(linear, toy, local, models, privacy):
    """Every odd client has one label, so that others count for nothing (eq. 4)."""
    skewed, local = skew(toy), local.replace(epochs=30)
    algorithm = quick(linear, local, 3, privacy)
    state = at_once(algorithm.init, KEY, skewed).replace(groups=models)
    after, _ = jax.jit(algorithm.round)(KEY, state, skewed)
    own = jax.tree.map(lambda leaf: leaf[state.assignment], models)
    trained = train_alone(linear, local, skewed, own)
    sampler = back_search(**QUICK)(linear, local)
    samples, _ = at_once(sampler.sample, derive_keys(KEY, 0)[REGROUP], (), models, skewed)
    cohort = make_cohort(jnp.arange(skewed.num_clients), skewed, local.execution)
    ids = np.minimum(cohort.ids, skewed.num_clients - 1)
    delta = jax.tree.map(lambda new, old: (new - old)[ids], trained, own)
    present = state.assignment[ids]
    distance = class_distances(linear, local)(cohort, skewed, (models, samples), (present, delta))
    share = train_label_shares(skewed)[ids]
    wanted = nearest_group(share, distance, present)
    real = (np.asarray(cohort.ids) < skewed.num_clients) & (share.sum(1) > 0)
    assert (after.assignment[ids] == wanted)[real].all()
    assert (wanted != nearest_group(jnp.ones_like(share), distance, present))[real].any()


@pytest.mark.nightly
def test_a_client_that_never_answers_stays(linear, toy, local):
    silent = cfl.System(full_participation(), cfl.Faults(dropout=1.0))
    algorithm = quick(linear, local, 3, select=silent)
    state = algorithm.init(KEY, toy)
    after, _ = jax.jit(algorithm.round)(KEY, state, toy)
    assert after.assignment.tolist() == state.assignment.tolist()
    assert not after.rows["labels"].known.any()
    assert spent(state, after).words_up == 0
    chex.assert_trees_all_equal(after.groups, state.groups)


@pytest.mark.nightly
def test_label_shares_are_sent_with_updates_that_are_not_used(linear, toy, local):
    """They arrive with a model that is not finite; the server keeps none, and they come again."""
    bad = cfl.System(full_participation(), cfl.Faults(nan=1.0))
    algorithm = quick(linear, local, 3, select=bad)
    states = [algorithm.init(KEY, toy)]
    for _ in range(2):
        states.append(jax.jit(algorithm.round)(KEY, states[-1], toy)[0])
    able = int((toy.train.size > 0).sum())
    assert [spent(*pair).words_up for pair in pairwise(states)] == [able * toy.num_classes] * 2
    assert not states[-1].rows["labels"].known.any()


@pytest.mark.nightly
@pytest.mark.parametrize("cohort", [5, 14])
def test_privacy_changes_the_bill_and_nothing_else(linear, toy, local, cohort):
    """Weak: C words up, once a client. Strong: m C words down and 1 up, every time."""
    m, rounds, classes = 3, 4, toy.num_classes
    clients = int((toy.train.size > 0).sum())  # one has no samples, and is never drawn
    runs = []
    for privacy in ("weak", "strong"):
        algorithm = quick(linear, local, m, privacy, uniform(cohort))
        states = [algorithm.init(KEY, toy)]
        step = jax.jit(algorithm.round)
        for _ in range(rounds):
            states.append(step(KEY, states[-1], toy)[0])
        runs.append(states)
    for weak, strong in zip(*runs, strict=True):
        assert weak.assignment.tolist() == strong.assignment.tolist()
        chex.assert_trees_all_equal(weak.groups, strong.groups)
    weak, strong = (spent(states[0], states[-1]) for states in runs)
    asked = int(runs[0][-1].rows["labels"].known.sum())
    answers = strong.words_up
    assert (weak.units_down, weak.units_up) == (strong.units_down, strong.units_up)
    assert weak.units_down == rounds * min(cohort, clients)
    assert (weak.words_down, weak.words_up) == (0, asked * classes)
    assert strong.words_down == answers * m * classes
    if cohort == 14:
        assert (asked, answers) == (clients, rounds * clients)
    share = np.asarray(train_label_shares(toy))
    known = np.asarray(runs[0][-1].rows["labels"].known)
    np.testing.assert_array_equal(
        runs[0][-1].rows["labels"].share, np.where(known[:, None], share, 0)
    )


@pytest.mark.nightly
def test_bytes_of_the_baselines_are_those_of_closed_forms(linear, toy, local):
    """A participant receives one model of FedAvg, m of IFCA and none of Local, and sends the
    number of its group to IFCA alone; FedFomo's and ClusteredFL's are in their own tests.
    """
    size, others, selected = cfl.models.model_bytes(linear.init(KEY)), cfl.algorithms, 14
    for method, down, up in (
        (others.fedavg(linear, local, full_participation()), size, size),
        (others.ifca(linear, local, full_participation(), m=3), 3 * size, size + 4),
        (others.nonfed(linear, local, full_participation()), 0, 0),
    ):
        state, _ = jax.jit(method.round)(KEY, method.init(KEY, toy), toy)
        assert count_bytes(state.traffic, size) == (selected * down, selected * up)


def test_groups_start_from_different_models_unless_one_is_asked_for(linear, toy, local):
    def starts(**settings):
        method = md_icfl(linear, local, full_participation(), m=3, **QUICK, **settings)
        kernel = np.asarray(method.init(KEY, toy).groups["head"]["kernel"])
        assert kernel.shape == (3, 5, 4)
        return len({row.tobytes() for row in kernel})

    assert (starts(), starts(start="common")) == (3, 1)


def test_groups_are_the_plain_means_of_who_has_moved_there(linear, toy, local, models):
    """What is averaged are models that were trained in the groups before."""
    local, everybody = local.replace(epochs=9), np.flatnonzero(toy.train.size).tolist()
    data, algorithm = skew(toy), quick(linear, local, 3)
    state, one_round = (
        at_once(algorithm.init, KEY, data).replace(groups=models),
        jax.jit(algorithm.round),
    )
    moved = 0
    for _ in range(2):
        before, (state, _) = state, one_round(KEY, state, data)
        was = before.assignment
        follow(before, state, data, local, everybody, Rule(weighs=False), KEY, was)
        moved += int((was != state.assignment).sum())
    assert moved > 0


# empty groups


def refilled(linear, toy, local, models, rule, groups, round=1):
    """The models [3, P] after a rule has seen clients in `groups` [K]."""
    algorithm = quick(linear, local, 3)
    state = at_once(algorithm.init, KEY, toy).replace(
        groups=models, assignment=jnp.asarray(groups, jnp.int32), round=jnp.int32(round)
    )
    after, report = at_once(refill_empty_groups(linear, rule), Round(KEY, state, toy))
    assert after.assignment.tolist() == list(groups) and not report.migrated
    chex.assert_trees_all_equal(after.replace(groups=models), state)
    return after.groups


def test_an_empty_group_gets_a_noisy_copy_of_the_largest(linear, toy, local, models):
    """Groups have 0, 5 and 8 clients; the one that has no samples does not count."""
    idle = int(np.flatnonzero(np.asarray(toy.train.size) == 0)[0])
    groups = [1] * 5 + [2] * 9
    groups[idle] = 0
    value = jnp.asarray([0.0, 3.0, 5.0])
    models = jax.tree.map(lambda leaf: jnp.moveaxis(jnp.zeros_like(leaf).T + value, -1, 0), models)
    after = matrix(refilled(linear, toy, local, models, copy_largest, groups))
    assert (after[1] == 3.0).all() and (after[2] == 5.0).all()
    noise = (after[0] - 5.0) / 0.5  # a tenth of the root mean square, which is 5
    assert 0 < np.abs(noise).min() and np.abs(noise).max() < 4
    assert abs(noise.mean()) < 0.6 and 0.6 < noise.std() < 1.4
    assert len(np.unique(noise)) == noise.size


def test_an_empty_group_gets_a_new_model(linear, toy, local, models):
    after = refilled(linear, toy, local, models, new_models, [0] * 14)
    expected = matrix(jax.vmap(linear.init)(jax.random.split(KEY, 3)))
    np.testing.assert_array_equal(matrix(after)[0], matrix(models)[0])
    np.testing.assert_allclose(matrix(after)[1:], expected[1:], rtol=1e-6)


@pytest.mark.parametrize(("groups", "round"), [([0, 1] * 6 + [2, 2], 1), ([0] * 14, 0)])
def test_full_groups_and_the_first_models_stay(linear, toy, local, models, groups, round):
    after = refilled(linear, toy, local, models, copy_largest, groups, round)
    chex.assert_trees_all_equal(after, models)


def test_running_statistics_are_copied_without_noise():
    def model(value):
        return jnp.full((2, 3), value).at[1].mul(2.0)

    models = {"dense": model(1.0), "batch_stats": {"var": model(0.01)}}
    copied = copy_largest(None, KEY, models, jnp.int32(1))
    np.testing.assert_array_equal(copied["batch_stats"]["var"], np.full((2, 3), 0.02, np.float32))
    assert (copied["dense"] != 2.0).all() and (copied["dense"][0] != copied["dense"][1]).all()


@pytest.mark.nightly
def test_a_group_left_by_all_is_refilled_in_the_next_round(linear, toy, local, models):
    """Its old model stays without the rule; everything else is the same until then."""
    methods = [
        md_icfl(linear, local, full_participation(), m=3, **QUICK, empty=rule)
        for rule in ("keep", "copy")
    ]
    kept, copied = (method.init(KEY, toy) for method in methods)
    chex.assert_trees_all_equal(kept, copied)
    everybody = jnp.zeros(toy.num_clients, jnp.int32)
    kept, copied = (
        jax.jit(method.round)(KEY, state.replace(assignment=everybody, round=jnp.int32(1)), toy)[0]
        for method, state in zip(methods, (kept, copied), strict=True)
    )
    own = np.asarray(kept.assignment) == 0
    assert own.any()
    assert (matrix(kept.groups)[1:] != matrix(copied.groups)[1:]).any()


def test_ari_at_fixed_points():
    """Four groups of 12: perfect, two merged, two pairs merged, three merged, all in one."""
    truth = np.repeat(np.arange(4), 12)
    for joined, value in (
        ([0, 1, 2, 3], 1.0),
        ([0, 0, 2, 3], 0.701),
        ([0, 0, 2, 2], 0.484),
        ([0, 0, 0, 3], 0.319),
        ([0, 0, 0, 0], 0.0),
    ):
        found = ari(np.array(joined)[truth], truth, np.ones(48, bool))
        assert found == pytest.approx(value, abs=5e-4)
