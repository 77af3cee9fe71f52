"""CFL, which cuts groups in two: reductions, planted groups, and one cut against all possible
cuts.
"""

from itertools import pairwise, product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, build, matrix, nightly, others_nightly, spent, with_execution
from sklearn.metrics import adjusted_rand_score
from test_assign import met
from test_fesem import planted, play
from test_twins import Rule, follow, uneven

from fedjax_cfl.algorithms.cfl import SplitTree, bipartition, cfl
from fedjax_cfl.client.local import full_work
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Round
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.system import select
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.system.system import System
from fedjax_cfl.types import Cohort, Upload

KEY = jax.random.key(5)
SAME = {"rtol": 1e-5, "atol": 1e-6}
CLIENTS, CONCEPTS = 18, 3
TRUTH = np.arange(CLIENTS) % CONCEPTS
# of the planted clients: found well between what is and is not a cut
ONCE = {
    "eps1": 0.3,
    "eps2": 0.3,
    "gamma_max": 0.3,
    "warm_up": 1,
    "min_size": 2,
}


@pytest.fixture(scope="module")
def concepts():
    """18 clients whose class names are turned by 0, 1 or 2."""
    return planted(CONCEPTS, CLIENTS)


def sent(before, after):
    """Returns the models (down, up) of one round."""
    models = spent(before, after)
    return models.units_down, models.units_up


@pytest.fixture(scope="module")
def cutting(linear, local):
    """Runs CFL with everybody and room for four groups, under any thresholds:
    cutting(data, rounds, **limits) -> states; one program.
    """

    def algorithm(limits):
        return build(cfl, linear, local, select.full_participation(), m=4, **limits)

    one_round = jax.jit(lambda limits, state, data: algorithm(limits).round(KEY, state, data))

    def run(data, rounds, start=None, **limits):
        limits = {name: jnp.float32(value) for name, value in (ONCE | limits).items()}
        states, infos = [start or jax.jit(algorithm(ONCE).init)(KEY, data)], []
        for _ in range(rounds):
            state, info = one_round(limits, states[-1], data)
            states.append(state)
            infos.append(info)
        assert one_round._cache_size() == 1, "a cut never retraces"
        return states, infos

    return run


@pytest.mark.parametrize(
    "limits",
    [{"eps1": 0.0}, {"eps2": 1e9}, {"gamma_max": 1.0}, {"warm_up": 99}],
    ids=lambda limits: next(iter(limits)),
)
def test_thresholds_never_met_are_fedavg_with_plain_means(concepts, local, cutting, limits):
    data = uneven(concepts)
    states, infos = cutting(data, 2, **limits)
    for before, after in pairwise(states):
        follow(before, after, data, local, range(CLIENTS), Rule(weighs=False), KEY)
        assert after.active.tolist() == [True, False, False, False]
    assert float(infos[-1].loss) < float(infos[0].loss)


@pytest.mark.nightly
@pytest.mark.parametrize("warm_up", [0, 3])
def test_the_first_cut_may_come_in_the_round_that_ends_the_warm_up(concepts, cutting, warm_up):
    limits = {"eps1": 1e9, "eps2": 0.0, "gamma_max": 0.0, "warm_up": warm_up}
    states, _ = cutting(concepts, 4, **limits)
    counts = [int(state.active.sum()) for state in states]
    assert counts[: warm_up + 1] == [1] * (warm_up + 1) and counts[warm_up + 1] == 2


@pytest.mark.parametrize(("min_size", "groups"), [(CLIENTS, 1), (CLIENTS - 1, 2)])
def test_only_larger_groups_are_cut(concepts, cutting, min_size, groups):
    limits = {"eps1": 1e9, "eps2": 0.0, "gamma_max": 0.0, "warm_up": 0, "min_size": min_size}
    states, _ = cutting(concepts, 1, **limits)
    assert states[-1].active.sum() == groups


def test_planted_groups_are_found_and_then_no_more(concepts, linear, local, cutting):
    states, infos = cutting(concepts, 12)
    final = states[-1]
    assert adjusted_rand_score(TRUTH, final.assignment) == 1
    assert final.active.tolist() == [True, True, True, False], "the groups found are not cut again"
    assert final.assignment[0] == 0
    counts = [int(state.active.sum()) for state in states]
    assert counts[2] == 1 and counts == sorted(counts), "no cut before the warm-up is over"
    assert float(infos[-1].loss) < 0.5 * float(infos[0].loss)
    for before, after in pairwise(states):
        assert sent(before, after) == (CLIENTS, CLIENTS)
    algorithm = cfl(linear, local, select.full_participation(), m=4)
    row = jax.jit(
        lambda state: evaluate.evaluate_all(
            algorithm, linear, local.execution.mesh, state, concepts, True
        )[0]
    )(final)
    assert row["group_sizes"].tolist() == [6, 6, 6, 0] and float(row["accuracy"]) > 0.95
    assert np.isfinite(
        [float(row[name]) for name in ("test_loss", "macro_f1", "auxiliary_accuracy")]
    ).all()


@pytest.mark.nightly
def test_automatic_thresholds_follow_the_longest_mean_update(concepts, linear, local):
    """eps1 is a tenth of the longest so far: the first cut is where a step is that short."""
    limits = {"warm_up": 2, "eps1": None, "eps2": 0.0}
    algorithm = build(cfl, linear, local, select.full_participation(), m=4, **limits)
    states = [algorithm.init(KEY, concepts)]
    one_round = jax.jit(algorithm.round)
    while states[-1].active.sum() == 1 and len(states) < 60:
        states.append(one_round(KEY, states[-1], concepts)[0])
    steps = [np.linalg.norm(matrix(b.groups)[0] - matrix(a.groups)[0]) for a, b in pairwise(states)]
    longest = np.maximum.accumulate(steps[:-1])
    np.testing.assert_allclose([s.memory.longest_mean for s in states[1:-1]], longest, rtol=1e-4)
    assert states[-1].active.sum() == 2 and all(steps[2:-1] >= longest[2:] / 10)
    limits = {"warm_up": 2, "eps1": 1e9, "eps2": None}  # 6 eps1: no update is longer
    algorithm = build(cfl, linear, local, select.full_participation(), m=4, **limits)
    state, one_round = algorithm.init(KEY, concepts), jax.jit(algorithm.round)
    for _ in range(4):
        state, _ = one_round(KEY, state, concepts)
    assert state.active.sum() == 1


def test_halves_inherit_the_model_that_was_cut(concepts, cutting):
    states, infos = cutting(concepts, 12)
    cut, after = next((a, b) for a, b in pairwise(states) if b.active.sum() > a.active.sum())
    tree = after.memory
    created = np.flatnonzero(np.asarray(after.active & ~cut.active))
    for h in created:
        parent = int(tree.parent[h])
        np.testing.assert_allclose(matrix(tree.models)[h], matrix(cut.groups)[parent], rtol=1e-6)
        # uniform means are what is aggregated
        for group, mean in (
            (h, tree.split_update),
            (parent, tree.parent_update),
        ):
            np.testing.assert_allclose(
                matrix(after.groups)[group],
                matrix(cut.groups)[parent] + matrix(mean)[h],
                rtol=1e-5,
                atol=1e-6,
            )
    assert after.rows["last_split"].tolist() == [int(after.active.sum()) - 1] * CLIENTS
    assert all(np.isnan(info.group_discrepancy[3]) for info in infos)


def test_who_missed_the_cuts_takes_its_sides(concepts, cutting):
    """It trains from each model that was cut, and joins the half of the more similar update."""
    final, missed = cutting(concepts, 12)[0][-1], np.array([1, 2, 4, 9])
    unmet = final.replace(assignment=final.assignment.at[missed].set(-1))
    unmet = unmet.put_rows({"last_split": final.rows["last_split"].at[missed].set(0)})
    before, after = cutting(concepts, 1, unmet)[0]
    np.testing.assert_array_equal(after.assignment, final.assignment)
    halves = [int(final.memory.parent[2]), 2]  # of the second cut
    passed = CLIENTS + len(missed) + int(np.isin(final.assignment[missed], halves).sum())
    assert sent(before, after) == (passed, passed)


@pytest.mark.nightly
def test_no_more_cuts_than_there_is_room(concepts, linear, local):
    algorithm = build(cfl, linear, local, select.full_participation(), m=2, **ONCE)
    states = play(algorithm, concepts, 8)
    assert states[-1].active.tolist() == [True, True]
    groups = np.asarray(states[-1].assignment)
    assert all(len(set(groups[concept == TRUTH])) == 1 for concept in range(CONCEPTS)), (
        "concepts stay together"
    )
    assert adjusted_rand_score(TRUTH, groups) < 1


@pytest.mark.nightly
def test_absent_members_and_newcomers_pass_the_cuts_later(concepts, linear, local):
    """Nine of 18 clients a round: nobody is lost, and each cut that a client passes by
    itself costs one model down and one up.
    """
    algorithm = build(cfl, linear, local, select.uniform(9), m=3, **ONCE)
    states = play(algorithm, concepts, 14)
    final = states[-1]
    assert (final.assignment >= 0).all() and final.active.all()
    assert adjusted_rand_score(TRUTH, final.assignment) == 1
    extra = [np.array(sent(before, after)) - 9 for before, after in pairwise(states)]
    assert all(down == up >= 0 for down, up in extra) and sum(down for down, _ in extra) > 0
    walked = sum(down for down, _ in extra)
    assert walked < 2 * CLIENTS


@pytest.mark.nightly
def test_stale_updates_let_a_cut_take_absent_members_along(concepts, linear, local):
    options = ONCE | {"warm_up": 3, "stale_updates": True}
    algorithm = build(cfl, linear, local, select.rr_then_random(9), m=3, **options)
    states = play(algorithm, concepts, 10)
    final = states[-1]
    assert adjusted_rand_score(TRUTH, final.assignment) == 1
    assert all(sent(before, after) == (9, 9) for before, after in pairwise(states)), (
        "everybody was met before the first cut"
    )
    changed = [
        int(np.sum(before.assignment != after.assignment)) for before, after in pairwise(states[3:])
    ]
    assert sum(changed) >= 12 and final.rows["known"].all()


@pytest.mark.nightly
def test_clients_that_never_answer_stay_where_they_are(toy, linear, local):
    """Client 2 has no data; half of the others drop out every round."""
    unsure = System(select.full_participation(), Faults(dropout=0.5))
    free = {"eps1": 9.0, "eps2": 0.0, "warm_up": 0}
    states = play(build(cfl, linear, local, unsure, m=4, **free), toy, 5)
    chex.assert_tree_all_finite(states[-1])
    assert states[-1].active.all() and states[-1].assignment[2] == -1
    assert set(states[-1].assignment.tolist()) == {-1, 0, 1, 2, 3}


def upload_of(rows, weight=None):
    """Returns updates [S, P] as an upload with two leaves."""
    rows, ones = jnp.asarray(rows, jnp.float32), jnp.ones(len(rows))
    return Upload(
        {"a": rows[:, :4].reshape(-1, 2, 2), "b": rows[:, 4:]},
        ones if weight is None else weight,
        ones,
        ones,
        ones,
        start_group=0 * ones.astype(jnp.int32),
    )


def blank(m, clients, assignment):
    """Returns a state of zeros whose groups are those of the assignment."""
    groups = {"a": jnp.zeros((m, 2, 2)), "b": jnp.zeros((m, 3))}
    tree = SplitTree(jnp.full(m, -1, jnp.int32), groups, groups, groups)
    rows = {"last_split": jnp.zeros(clients, jnp.int32)}
    return met(groups, assignment, np.arange(m) <= max(assignment), tree, rows)


def best_cut(rows):
    """Tries all bipartitions; returns (who is not with the first, gamma) of the one
    whose largest cosine across is least.
    """
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosine = unit @ unit.T
    found = []
    for side in product([False, True], repeat=len(rows) - 1):
        other = np.array([False, *side])
        if other.any():
            found.append((cosine[~other][:, other].max(), other))
    alpha, other = min(found, key=lambda each: each[0])
    return other, np.sqrt((1 - alpha) / 2)


@pytest.mark.parametrize("seed", others_nightly(range(4), [0]))
def test_a_cut_is_the_best_of_all(seed):
    """Ten clients of two groups, in any slots; only group 1 is cut, as 2^n tries in
    float64 cut it, and only above gamma_max.
    """
    rng = np.random.default_rng(seed)
    rows, assignment = (
        rng.normal(size=(10, 7)) + rng.normal(size=7),
        np.array([1, 0, 1, 1, 0, 1, 1, 0, 1, 1]),
    )
    mine = np.flatnonzero(assignment == 1)
    other, gamma = best_cut(rows[mine])
    expected = assignment.copy()
    expected[mine[other]] = 2
    slots = rng.permutation(10)
    cohort = Cohort(jnp.asarray(slots, jnp.int32), jnp.arange(10, dtype=jnp.int32))
    data = type("Data", (), {"num_clients": 10})

    def only_group_1(round, active, mean, longest, size, longest_mean):
        return (size == 7) & (longest < 99) & (mean > 0)

    def cut(gamma_max):
        regroup = bipartition(only_group_1, "single", gamma_max, False)
        return at_once(
            lambda *r: regroup(Round(KEY, r[0], data, *r[1:])),
            blank(4, 10, assignment),
            cohort,
            full_work(jnp.asarray(assignment[slots], jnp.int32)),
            upload_of(rows[slots]),
        )

    state, gid = cut(gamma * 0.999)
    assert gid.tolist() == expected[slots].tolist()
    assert state.active.tolist() == [True, True, True, False] and state.memory.parent.tolist() == [
        -1,
        -1,
        1,
        -1,
    ]
    np.testing.assert_allclose(
        matrix(state.memory.split_update)[2], rows[expected == 2].mean(0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        matrix(state.memory.parent_update)[2], rows[expected == 1].mean(0), rtol=1e-4, atol=1e-5
    )
    state, gid = cut(gamma * 1.001)
    assert gid.tolist() == assignment[slots].tolist() and state.active.tolist() == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("sign", "gamma"), [(1, 0.0), nightly(-1, 1.0)])
def test_gamma_must_exceed_its_limit(sign, gamma):
    """Equal updates have gamma 0, opposite ones 1: with that limit nothing is cut."""
    rows = np.outer([1, 1, sign, sign], np.eye(7)[0])
    ids, data = jnp.arange(4, dtype=jnp.int32), type("Data", (), {"num_clients": 4})
    for limit, cut in ((gamma, False), (gamma - 0.01, True)):
        regroup = bipartition(lambda *given: jnp.array([True, False]), "single", limit, False)
        state = blank(2, 4, [0, 0, 0, 0])
        cohort = Cohort(ids, ids)
        r = Round(KEY, state, data, cohort, full_work(0 * ids), upload_of(rows))
        state, _ = regroup(r)
        assert state.active.tolist() == [True, cut]


@pytest.mark.parametrize(("name", "value"), [("linkage", "ward"), ("aggregate", "nonsense")])
def test_unknown_choices_of_cfl_are_refused(linear, local, name, value):
    with pytest.raises(InputError, match=f"algorithm.{name}={value}"):
        build(cfl, linear, local, select.full_participation(), m=2, **{name: value})


@pytest.mark.nightly
def test_groups_do_not_depend_on_devices_or_slots(concepts, linear, local, cutting):
    spread = with_execution(local, mesh=make_mesh(4), width=2)
    many = play(build(cfl, linear, spread, select.full_participation(), m=4, **ONCE), concepts, 8)
    one = cutting(concepts, 8)[0]
    assert many[-1].active.sum() == 3
    chex.assert_trees_all_close(many[-1], one[-1], rtol=1e-4, atol=1e-5)
