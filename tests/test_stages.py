"""Data that change from stage to stage: labels, tables and what each client sees, by brute force;
the oracle; refusals.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_line
from test_stream import rows_of

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.known_groups import found_groups, known_groups
from fedjax_cfl.data import datasets, stages
from fedjax_cfl.data.concept import exchange_pairs, rotate
from fedjax_cfl.data.datasets.synthetic import CHANGES
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.data.graded import class_subsets, graded
from fedjax_cfl.data.partition import by_user, iid
from fedjax_cfl.models import MCLR, as_task
from fedjax_cfl.runs.results import read_metrics
from fedjax_cfl.system import select

KEY = jax.random.key(3)
WORDS = ["012", "010", "210"]


def label(name, concept, x):
    """The rule of a concept, of one point."""
    if name == "sine":
        return (x[1] <= math.sin(x[0])) != (concept == 1)
    if name == "circle":
        (a, b), r = ((0.2, 0.5), 0.15) if concept == 0 else ((0.6, 0.5), 0.25)
        return math.hypot(x[0] - a, x[1] - b) > r
    return x[1] + x[2] > (8, 9, 7, 9.5)[concept]


def test_tables_are_those_of_the_experiments():
    for name, words in CHANGES.items():
        assert len(words) == 11 and {len(word) for word in words} == {10}
        assert set("".join(words)) == set("01" if name == "A" else "0123")
        assert (words[0] == "0" * 10) == (name != "D")
    assert CHANGES["A"][5] == "1011011010" and CHANGES["F"][-1] == "0033312223"


@pytest.mark.parametrize("name, end", [("sine", 1), ("circle", 1), ("sea", 10)])
def test_labels_follow_the_concept_of_client_and_stage(name, end):
    pool = getattr(datasets, name)(samples=7, test_samples=3, clients=12, noise=0.0, seed=5)
    words = CHANGES["C" if name == "sea" else "A"]
    assert len(pool.y) == 11 * 12 * 10 and pool.test.sum() == 11 * 12 * 3
    assert pool.x.min() >= 0 and 0.95 * end < pool.x.max() < end
    assert np.unique(pool.x[:, 0]).size > 1200  # no sample comes again
    for x, y, client, time in zip(pool.x.tolist(), pool.y, pool.client, pool.time, strict=True):
        concept = int(words[time][client % 10])
        assert y == label(name, concept, x) and pool.concept[time, client] == concept
    counts = np.zeros((11, 12, 2), int)
    np.add.at(counts, (pool.time, pool.client, pool.test.astype(int)), 1)
    assert (counts == [7, 3]).all()
    assert 0.1 < pool.y.mean() < 0.95


def test_noise_bounds_what_an_oracle_can_reach():
    clean, noisy = (datasets.sea(samples=100, noise=noise).y for noise in (0.0, 0.1))
    assert np.mean(clean == noisy) == pytest.approx(0.9, abs=0.004)
    moved = datasets.sea(samples=100, noise=0.0, theta=[8, 9, 7, 9]).y
    assert 0 < np.mean(clean != moved) < 0.02  # concept 3 alone


def make_data(words=WORDS, **sizes):
    sizes = {"samples": 4, "test_samples": 2, "clients": len(words[0])} | sizes
    return cfl.federate(pool := datasets.sea(words, **sizes), by_user(pool)), pool


def follow(made, data, rounds):
    """Yields (data, shifted) at the start and after each round, from one compiled program."""
    data, memory = jax.jit(made.init)(KEY, data)
    yield data, None
    step = jax.jit(made.apply)
    for round in range(rounds):
        data, memory, shifted = step(KEY, round, data, memory, jnp.ones(data.num_clients, bool))
        yield data, shifted


@pytest.mark.parametrize("prequential", [True, False])
def test_clients_have_the_samples_of_their_stage(prequential):
    data, pool = make_data()
    made = stages.by_stage(2, prequential)
    assert data.concept.tolist() == [-1, 1, -1]  # of all stages together
    assert data.max_client_samples == 12 and made.max_client_samples(data) == 4
    placed = by_user(pool).sample
    for number, (now, shifted) in enumerate(follow(made, data, 8)):
        stage = min(max(number - 1, 0) // 2, 2)  # row `number` is after round number - 1
        assert now.concept.tolist() == [int(digit) for digit in WORDS[stage]]
        tested = min(stage + prequential, 2)
        assert shifted is None or shifted.all() == shifted.any() == (number - 1 in (2, 4))
        for k in range(3):
            for view, when, test in ((now.train, stage, False), (now.test, tested, True)):
                mine = (pool.client == k) & (pool.time == when) & (pool.test == test)
                found = placed[rows_of(view, k)]
                assert sorted(found) == np.flatnonzero(mine).tolist()


@pytest.mark.nightly
def test_the_oracle_follows_the_groups_and_fedavg_cannot():
    """Labels are exchanged, so that one model is right for one of two concepts alone."""
    words = ["0011", "0101", "0101"]
    pool = datasets.sine(words, clients=4, samples=100, test_samples=50)
    data = cfl.federate(pool, by_user(pool))
    task = as_task(MCLR(2), (2,), 2)
    local, cohort = cfl.Local(lr=1.0, epochs=5, batch_size=25), select.uniform(4)

    def run(algorithm):
        drift = stages.by_stage(10)
        return cfl.run(algorithm, task, data, KEY, rounds=20, eval_every=10, drift=drift).rows

    moved, steady = run(known_groups(task, local, cohort, m=2))
    assert steady["accuracy"] > 0.95 and moved["ari"] == steady["ari"] == 1.0
    assert moved["accuracy"] == pytest.approx(0.5, abs=0.05)  # two of four have just changed
    assert min(steady["concept_accuracy"]) > 0.9
    assert steady["migrated_clients"] == 2
    assert run(fedavg(task, local, cohort))[1]["accuracy"] < 0.65


def test_a_group_that_appears_begins_with_what_its_clients_had(linear, local, toy):
    state = known_groups(linear, local, select.uniform(4), m=4).init(KEY, toy)
    models = jax.tree.map(lambda leaf: jax.random.normal(KEY, leaf.shape), state.groups)
    state = state.replace(groups=models, active=jnp.array([True, True, False, False]))
    before = jnp.array([0, 0, 0, 1, 1, -1])
    after = found_groups(state, before, jnp.array([0, 2, 2, 2, 1, 3]))
    assert after.active.all()
    for was, now in zip(jax.tree.leaves(models), jax.tree.leaves(after.groups), strict=True):
        np.testing.assert_allclose(now[2], (2 * was[0] + was[1]) / 3, atol=1e-6)
        np.testing.assert_array_equal(now[jnp.array([0, 1, 3])], was[jnp.array([0, 1, 3])])


def test_a_drift_without_stages_knows_no_groups_and_clients_can_be_taken():
    data, _ = make_data()
    held = take_clients(data, np.array([2, 0]))
    assert held.concepts.tolist() == [[2, 0], [0, 0], [0, 2]]
    assert cfl.federate(*_with_concept(make_data()[1])).concepts is None


def _with_concept(pool):
    return pool, by_user(pool), lambda x, y, owner, clients, classes: (x, y, np.arange(clients))


K, SIZE, CLASSES = 12, 12, 8  # of clients, of their samples, of classes


def make_images(partition=iid, **settings):
    rng = np.random.RandomState(7)
    x = rng.rand(K * SIZE, 4, 4).astype(np.float32)
    pool = cfl.Pool(x, rng.permutation(K * SIZE).astype(np.int32) % CLASSES, CLASSES)
    return pool, partition(pool, clients=K, test_fraction=0.25, **settings)


def show(made, data, rounds):
    """Returns who has what after each round: sets of (x, y, test) by client, and true groups."""
    seen = []
    for now, shifted in follow(made, data, rounds):
        x, y = np.asarray(now.x), np.asarray(now.y)
        rows = np.arange(y.size) if now.sample is None else np.asarray(now.sample)
        both = [
            {
                (x[rows[n]].tobytes(), int(y[n]), side == "test")
                for side in ("train", "test")
                for n in rows_of(getattr(now, side), k)
            }
            for k in range(K)
        ]
        seen.append((both, now.concept.tolist(), shifted))
    return seen[1:]


@pytest.mark.parametrize(
    "kind, rounds, begins",
    [
        ("sudden", [2], [[2]] * 3),
        ("incremental", [2, 3, 5], [[2], [3], [5]]),
        ("recurring", [2, 4], [[2, 4]] * 3),
    ],
)
def test_pairs_of_classes_are_exchanged_on_schedule(kind, rounds, begins):
    """FedCCFA's three patterns, a fiftieth as long."""
    pool, held = make_images()
    made = stages.scheduled(kind, rounds)
    concept = partial(exchange_pairs, stages=2)
    data = made.federate(pool, held, concept)
    assert data.train.size.sum() == 2 * (~held.test).sum()
    assert made.max_client_samples(data) == SIZE * 3 // 4
    for number, (rows, concepts, shifted) in enumerate(show(made, data, 7)):
        for k in range(K):
            part = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}.get(k % 10, 2)
            later = sum(number >= begin for begin in begins[part]) % 2
            one, two = [(1, 2), (3, 4), (5, 6)][part]
            mine = np.flatnonzero(held.owner == k)
            labels = pool.y[held.sample[mine]].tolist()
            if later:
                labels = [{one: two, two: one}.get(label, label) for label in labels]
            x = [pool.x[n].tobytes() for n in held.sample[mine]]
            assert rows[k] == set(zip(x, labels, held.test[mine].tolist(), strict=True))
            assert concepts[k] == (part + 1 if later else 0)
            assert shifted[k] == (number in begins[part])


@pytest.mark.parametrize("shift", ["x", "y_given_x", "x_given_y"])
def test_clients_see_another_pattern_in_the_next_stage(shift):
    pool, held = make_images()
    concept = partial(graded, shift=shift, level=3, seed=2)
    made = stages.scheduled(rounds=[1])
    owner = np.concatenate([held.owner, held.owner + K])
    rows, test = np.tile(held.sample, 2), np.tile(held.test, 2)
    x, y, groups = concept(pool.x[rows], pool.y[rows], owner, 2 * K, CLASSES)
    first, second = show(made, made.federate(pool, held, concept), 2)
    for stage, (found, concepts, _) in enumerate((first, second)):
        assert concepts == groups[stage * K : (stage + 1) * K].tolist()
        for k in range(K):
            mine = np.flatnonzero(owner == stage * K + k)
            assert found[k] == {(x[n].tobytes(), int(y[n]), bool(test[n])) for n in mine}
    changed = groups[:K] != groups[K:]
    assert second[2].tolist() == changed.tolist() and 2 < changed.sum()


def test_clients_exchange_samples_for_a_shift_of_classes():
    pool, held = make_images(class_subsets, level=8, subsets=4)
    made = stages.scheduled("sudden", [1, 2], stages=3, exchange=True)
    owner = {pool.x[n].tobytes(): k for n, k in zip(held.sample.tolist(), held.owner, strict=True)}
    givers = []
    for rows, concepts, shifted in show(made, made.federate(pool, held), 3):
        from_whom = [{owner[one[0]] for one in own} for own in rows]
        assert all(len(one) == 1 for one in from_whom)
        givers.append([one.pop() for one in from_whom])
        assert concepts == held.concept[givers[-1]].tolist()
        assert len(givers) == 1 or shifted.all()
    assert givers[0] == list(range(K)) and all(sorted(one) == givers[0] for one in givers)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert all(a != b for a, b in zip(givers[one], givers[other], strict=True))


@pytest.mark.nightly
def test_a_run_that_was_interrupted_before_a_stage_goes_on(fedjax_cfl, tmp_path):
    ask = "dataset=digits concept=graded concept.shift=y_given_x concept.level=2 drift=scheduled"
    ask += " drift.rounds=[3] algorithm=known_groups algorithm.m=2 dataset.clients=12 rounds={}"
    for rounds, folder in ((2, "a"), (5, "a"), (5, "b")):
        status, _, error = fedjax_cfl(ask.format(rounds) + f" run_dir={tmp_path / folder}")
        assert status == 0, error
    rows, whole = (read_metrics(tmp_path / folder) for folder in "ab")
    assert [row["macro_accuracy"] for row in rows] == [row["macro_accuracy"] for row in whole]
    assert [row["ari"] for row in rows] == [1.0] * 5
    assert [row["shifted_clients"] > 0 for row in rows] == [False, False, False, True, False]


def test_schedules_that_do_not_fit_are_refused():
    one_line("drift.kind=sudden needs one round for each", stages.scheduled, rounds=[3, 5])
    one_line("drift.kind=incremental needs 2 to 10", stages.scheduled, "incremental", [3])
    one_line("drift.kind=recurring needs at least", stages.scheduled, "recurring", [3])
    for rounds in ([], [0], [3, 3], 5):
        one_line("drift.rounds", stages.scheduled, rounds=rounds)
    pool, held = make_images()
    make = stages.federate_stages
    one_line("nothing would change", make, pool, held)
    same = partial(rotate, groups=4, shuffle=False)
    one_line("the same true group in all stages", make, pool, held, same)
    for pairs in ([], [[1, 1]], [[1, 2, 3]], [1, 2], [[0, -1]]):
        one_line("concept.pairs", make, pool, held, partial(exchange_pairs, pairs=pairs, stages=2))
    one_line("class 8; the data have 8", make, pool, held, partial(exchange_pairs, pairs=[[0, 8]]))
    own = datasets.sine(samples=2, test_samples=2)
    one_line("have stages of their own", make, own, by_user(own), exchange=True)
    made = stages.scheduled(rounds=[1, 2, 3], stages=4)
    one_line("have no stages, or too few", made.max_client_samples, make_data()[0])


def test_bad_input_is_refused():
    for changes in ("G", ["0"], ["01", "0"], ["0a", "00"], [0, 1]):
        one_line("dataset.source.changes", datasets.sea, changes)
    one_line("names concept 3, and there are 2", datasets.sine, "B")
    one_line("names concept 3, and there are 2", datasets.sea, "B", theta=[1.0, 2.0])
    one_line("dataset.source.noise", datasets.circle, noise=2.0)
    one_line("drift.period", stages.by_stage, 0)
    for theta in (["high"], []):
        one_line("dataset.source.theta", datasets.sea, theta=theta)
    plain = make_data()[0].replace(concepts=None)
    one_line("the data have no stages", stages.by_stage().max_client_samples, plain)
    one_line("the data have no stages", stages.by_stage().init, KEY, plain)
