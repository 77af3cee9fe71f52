"""What bounds other methods: FedAvg within the true groups, and all samples in one place. Slow
twins, reductions to FedAvg and NonFed, bills, refusals.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ledger, nightly, one_line, shuffled, spent, with_execution
from test_reductions import COHORT, KEY, SAME, play
from test_reference import batches_of, mean, models_of, samples, trained

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.centralised import centralised, pool_samples
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.known_groups import known_groups
from fedjax_cfl.algorithms.nonfed import nonfed
from fedjax_cfl.data import drift, stream
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.personal.ditto import ditto
from fedjax_cfl.simulation.personalize import assign_newcomers, check_rule
from fedjax_cfl.system import select
from fedjax_cfl.system.system import System

ROUNDS = 3


# known groups


def passes(round, data, client, count):
    """Returns `count` reshuffled passes over a client's samples; KEY is that of these tests."""
    held = samples(data, client)
    key = jax.random.fold_in(derive_key(KEY, TRAIN, round), client)
    words = jax.random.bits(key, (2,))
    return [held[shuffled(words, len(held), number)] for number in range(count)]


def twin(models, concepts, data, local):
    """FedAvg within groups; `concepts` [rounds, K] are the true groups in each round, -1: not
    known. Returns the models and how many clients took part.
    """
    taken = 0
    for round, group in enumerate(concepts):
        ids = COHORT.draw(derive_key(KEY, SELECT, round), round, data.train.size).tolist()
        solutions, weights = [[] for _ in models], [[] for _ in models]
        for client in ids:
            if group[client] < 0:
                continue
            taken += 1
            if data.train.size[client] == 0:
                continue
            epochs = passes(round, data, client, local.epochs)
            batches = batches_of(epochs, local.batch_size)
            solutions[group[client]].append(trained(models[group[client]], data, batches, local.lr))
            weights[group[client]].append(len(epochs[0]))
        models = [
            mean(members, weight) if members else old
            for old, members, weight in zip(models, solutions, weights, strict=True)
        ]
    return models, taken


def test_known_groups_are_fedavg_in_each_group_as_in_a_slow_twin(toy, linear, local):
    """In round 1 two clients change groups, and in round 2 the group of one is lost."""
    concepts = np.stack([np.asarray(toy.concept)] * 3)
    concepts[0, 5] = -1
    concepts[1:, [1, 4]] = concepts[1:, [4, 1]]
    concepts[2, 7] = -1
    algorithm = known_groups(linear, local, COHORT, m=4)
    data = toy.replace(concept=jnp.asarray(concepts[0]))
    state = jax.jit(algorithm.init)(KEY, data)
    begun, one_round, moved = state, jax.jit(algorithm.round), []
    for concept in concepts:
        state, info = one_round(KEY, state, data.replace(concept=jnp.asarray(concept)))
        moved.append(int(info.migrated))
        served = np.asarray(algorithm.serve(state).model_index)
        assert served.tolist() == np.where(toy.train.size > 0, concept, -1).tolist()
    models, taken = twin(models_of(begun.groups), concepts, data, local)
    for found, expected in zip(models_of(state.groups), models, strict=True):
        np.testing.assert_allclose(found.flat(), expected.flat(), atol=2e-5)
    assert moved == [0, 2, 1]
    assert state.active.tolist() == [True, True, False, False]
    sent = spent(begun, state)
    assert (sent.units_down, sent.units_up, sent.words_down, sent.words_up) == (taken, taken, 0, 0)
    assert ledger(begun.traffic).units_down == 0 < taken < 3 * 6


@pytest.mark.nightly
@pytest.mark.parametrize("m", [nightly(1), 3])
def test_one_known_group_is_fedavg(toy, linear, local, m):
    """Bit for bit; room for groups that the data do not have changes nothing but rounding."""
    together = toy.replace(concept=jnp.zeros_like(toy.concept))
    state, infos = play(known_groups(linear, local, COHORT, m=m), together)
    expected, wanted = play(fedavg(linear, local, COHORT), together)
    first = jax.tree.map(lambda leaf: leaf[:1], state.groups)
    infos, wanted = (
        [info.replace(group_discrepancy=info.group_discrepancy[:1], cold=0) for info in each]
        for each in (infos, wanted)
    )
    same = chex.assert_trees_all_equal if m == 1 else chex.assert_trees_all_close
    same((first, infos), (expected.groups, wanted), **({} if m == 1 else SAME))
    assert ledger(state.traffic) == ledger(expected.traffic)
    assert (state.assignment == 0).all()  # also of the client without samples


@pytest.mark.nightly
def test_each_client_its_own_group_is_training_alone(toy, linear, local):
    alone = toy.replace(concept=jnp.arange(toy.num_clients, dtype=jnp.int32))
    state, _ = play(known_groups(linear, local, COHORT, m=toy.num_clients), alone)
    expected, _ = play(nonfed(linear, local, COHORT, trains="cohort"), alone)
    chex.assert_trees_all_equal(state.groups, expected.rows["NonFed"].values)


@pytest.mark.nightly
def test_known_groups_follow_data_that_clients_exchange(toy, linear, local):
    """What a run serves after each round is the true group of the data that a client has then."""
    algorithm = known_groups(linear, local, COHORT, m=2)
    ran = cfl.run(
        algorithm,
        linear,
        toy,
        KEY,
        rounds=4,
        drift=drift.swap_all(0.5),
        discard="none",
        mesh=local.execution.mesh,
    )
    now = np.asarray(ran.data.concept)
    assert (now != toy.concept).sum() >= 4
    found = np.asarray(ran.state.assignment)
    assert (found == now)[found >= 0].all()
    assert [row["ari"] for row in ran.rows] == [1.0] * 4
    assert sum(row["migrated_clients"] for row in ran.rows) >= 4


@pytest.mark.nightly
def test_known_groups_take_in_clients_held_out(toy, linear, local):
    """By their true group: without a look at their data, and without traffic."""

    def make(pick):
        return known_groups(linear, local, pick, m=2)

    kept, held = np.arange(10), np.arange(10, 14)
    check_rule(make, take_clients(toy, held), KEY, 3)  # all of them have samples
    state, _ = play(make(select.uniform(6)), take_clients(toy, kept))
    everybody = take_clients(toy, np.concatenate([kept, held]))
    mesh = local.execution.mesh
    new = assign_newcomers(make, linear, mesh, state, everybody, KEY, 3)
    assert new.groups.tolist() == toy.concept[10:].tolist()
    unknown = everybody.replace(concept=everybody.concept.at[jnp.array([11, 12])].set([-1, 2]))
    new = assign_newcomers(make, linear, mesh, state, unknown, KEY, 3)
    assert new.groups.tolist() == [0, -1, -1, 1]


def test_known_groups_refuse_data_without_any(toy, linear, local):
    def run(data, **settings):
        algorithm = known_groups(linear, local, COHORT, m=2)
        cfl.run(algorithm, linear, data, KEY, rounds=1, mesh=local.execution.mesh, **settings)

    unknown = toy.replace(concept=jnp.full_like(toy.concept, -1))
    one_line("the true groups of these data are not known", run, unknown)
    more = toy.replace(concept=jnp.arange(14) % 3)
    one_line("algorithm.m=2: the data have true groups up to 2; use 3", run, more)
    at_once = drift.Drift(
        lambda key, data: (data.replace(concept=jnp.full_like(data.concept, -1)), ()),
        drift.none().apply,
    )
    one_line("a drift mixes them at once", run, toy, drift=at_once)


# all samples in one place


def pooled_twin(model, data, local, cohort):
    """SGD on all samples, as many steps a round as that share of E passes."""
    every = np.concatenate([samples(data, client) for client in range(data.num_clients)])
    for round in range(ROUNDS):
        key = jax.random.fold_in(derive_key(KEY, TRAIN, round), 0)
        words = jax.random.bits(key, (2,))
        epochs = [every[shuffled(words, len(every), number)] for number in range(local.epochs)]
        batches = batches_of(epochs, local.batch_size)
        steps = int(np.ceil(cohort / data.num_clients * len(batches) - 1e-3))
        model = trained(model, data, batches[:steps], local.lr)
    return model, ROUNDS * steps


def test_all_samples_in_one_place_as_in_a_slow_twin(toy, linear, local):
    begun, _ = play(centralised(linear, local, COHORT), toy, 0)
    state, infos = play(centralised(linear, local, COHORT), toy, ROUNDS)
    (model,) = models_of(begun.groups)
    model, steps = pooled_twin(model, toy, local, 6)
    np.testing.assert_allclose(models_of(state.groups)[0].flat(), model.flat(), atol=5e-5)
    assert sum(int(info.steps[1]) for info in infos) == steps
    total = int(toy.train.size.sum())
    assert ledger(begun.traffic).words_up == total * (5 + 1)
    assert set(spent(begun, state).__dict__.values()) == {0}
    # as many samples as FedAvg's cohorts see on average: 6 of 14 clients, two passes
    assert abs(5 * steps - ROUNDS * 2 * total * 6 / 14) < 5 * ROUNDS


@pytest.mark.nightly
def test_one_client_in_one_place_is_fedavg(toy, linear, local):
    """Bit for bit, but for what is sent."""
    alone = take_clients(toy, np.array([1]))
    everybody = select.full_participation()
    state, infos = play(centralised(linear, local, everybody), alone)
    expected, wanted = play(fedavg(linear, local, everybody), alone)
    chex.assert_trees_all_equal((state.groups, infos), (expected.groups, wanted))


@pytest.mark.nightly
def test_fixed_steps_in_one_place_are_those_of_the_cohort_together(toy, linear, local):
    fixed = local.replace(steps=4)
    _, infos = play(centralised(linear, fixed, COHORT), toy, 2)
    assert [int(info.steps[1]) for info in infos] == [4 * 6] * 2


def test_changed_data_are_sent_again(toy, linear, local):
    algorithm = centralised(linear, local, COHORT)
    begun, _ = play(algorithm, toy, 0)
    shifted = jnp.arange(14) < 2
    after, _ = jax.jit(algorithm.round)(KEY, begun, toy.replace(shifted=shifted))
    assert spent(begun, after).words_up == (7 + 40) * 6


@pytest.mark.nightly
def test_the_pool_has_what_clients_hold_now(toy):
    """Also where a stream shows a part of what they ever hold."""
    moving = stream.gradual(intervals=6, period=1, retained=2)
    data, memory = jax.jit(moving.init)(KEY, toy)
    for round in range(3):
        data, memory, _ = jax.jit(moving.apply)(KEY, round, data, memory, toy.shifted)
        pooled = pool_samples(data)
        held = [samples(data, client) for client in range(data.num_clients)]
        wanted = np.concatenate(held)
        assert 0 < wanted.size < toy.train.size.sum()
        for client in (0, 2, 13):
            assert sorted(samples(pooled, client)) == sorted(wanted)


@pytest.mark.nightly
def test_runs_in_one_place_are_the_same_in_a_grid_and_on_devices(toy, linear, local):
    expected, _ = play(centralised(linear, local, COHORT), toy)
    split = with_execution(local, mesh=cfl.make_mesh(2), width=2)
    state, _ = play(centralised(linear, split, COHORT), toy)
    chex.assert_trees_all_close(state.groups, expected.groups, rtol=1e-4, atol=1e-5)
    together = local.replace(execution=local.execution._replace(runs_as_one=True))
    algorithm = centralised(linear, together, COHORT)

    @jax.jit
    def twice(keys):
        def run(key):
            state = algorithm.init(key, toy)
            for _ in range(3):
                state, _ = algorithm.round(key, state, toy)
            return state

        return jax.vmap(run)(keys)

    states = twice(jnp.stack([jax.random.key(8), KEY]))
    last = jax.tree.map(lambda leaf: leaf[1], states.groups)
    chex.assert_trees_all_close(last, expected.groups, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("local_change", "system", "use"),
    [
        ({"personal": ditto()}, {}, "personal=none"),
        ({}, {"faults": cfl.Faults(dropout=0.1)}, "faults.dropout=0"),
        ({}, {"faults": cfl.Faults(byzantine=0.1)}, "faults.byzantine=0"),
    ],
    ids=["personal", "dropout", "attackers"],
)
def test_one_place_refuses_what_only_clients_have(linear, local, local_change, system, use):
    changed = local.replace(**local_change)
    one_line(f"use {use}", centralised, linear, changed, System(COHORT, **system))
