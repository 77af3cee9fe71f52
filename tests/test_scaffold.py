"""SCAFFOLD over FedAvg and within groups: a slow twin in NumPy, and what must hold of variates."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CLASSES,
    FEATURES,
    SIZES,
    build,
    matrix,
    nightly,
    one_line,
    others_nightly,
    run_in_grid_and_alone,
    spent,
    stop_and_go_on,
    with_execution,
)
from test_personal import play
from test_reference import (
    KEY,
    batches_of,
    cross_entropy,
    gradient,
    mean,
    models_of,
    passes,
    samples,
)

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.method import Method, Start
from fedjax_cfl.models import BatchNorm
from fedjax_cfl.personal import ditto, feddyn, scaffold
from fedjax_cfl.personal.scaffold import remove_correction
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.client_rows import find_members, reset_rows_of_movers
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import keep_groups
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import device_profiles
from fedjax_cfl.types import Rows, Upload, Work

COHORT, CLIENTS = 6, len(SIZES)


def corrected(local, **changes):
    return local.replace(personal=scaffold(), **changes)


def train_corrected(model, correction, data, batches, local, rho=0.0):
    """Returns the trained model and the client's new variate."""
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    start, velocity, reach, speed = model, 0.0 * model, 0.0, 0.0
    for batch in batches:
        velocity = rho * velocity + gradient(model, x[batch], y[batch]) + correction
        speed = rho * speed + 1.0
        reach += local.lr * speed
        model = model + -local.lr * velocity
    return model, -1.0 * correction + (-1.0 / reach) * (model + -1.0 * start)


class Twin:
    """Models of groups, a variate of each client, and who is in which group; float64."""

    def __init__(self, groups, server_lr=1.0):
        self.groups, self.group, self.server_lr = groups, [-1] * CLIENTS, server_lr
        self.variates = [0.0 * groups[0] for _ in range(CLIENTS)]
        self.moves = 0

    def choose(self, data, client):
        x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
        held = samples(data, client)
        return int(np.argmin([cross_entropy(model, x[held], y[held]) for model in self.groups]))

    def find_center(self, g):
        if len(self.groups) == 1:
            return mean(self.variates)
        pairs = zip(self.variates, self.group, strict=True)
        return mean([variate for variate, group in pairs if group == g])

    def play(self, number, data, pick, local, rho=0.0):
        ids = pick.draw(derive_key(KEY, SELECT, number), number, data.train.size).tolist()
        ids = [k for k in ids if SIZES[k]]
        for k in ids:
            g = self.choose(data, k)
            if self.group[k] not in (-1, g):
                self.moves += 1
                self.variates[k] = 0.0 * self.variates[k]
            self.group[k] = g
        centers = {g: self.find_center(g) for g in {self.group[k] for k in ids}}
        answers = {}
        for k in ids:
            g = self.group[k]
            epochs = passes(derive_key(KEY, TRAIN, number), data, k, local.epochs)
            correction = centers[g] + -1.0 * self.variates[k]
            batches = batches_of(epochs, local.batch_size)
            answers[k] = train_corrected(self.groups[g], correction, data, batches, local, rho)
        for g in centers:
            found = mean([answers[k][0] for k in ids if self.group[k] == g])
            self.groups[g] = (1 - self.server_lr) * self.groups[g] + self.server_lr * found
        for k in ids:
            self.variates[k] = answers[k][1]


def close(found, expected, atol=3e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.flat(), b.flat(), atol=atol)


@pytest.mark.parametrize(
    ("m", "width", "momentum"),
    [nightly(1, 4, 0.0), (1, 1, 0.5), nightly(3, 4, 0.0), (3, 1, 0.5)],
)
def test_rounds_equal_a_slow_twin(toy, linear, local, m, width, momentum):
    """One model for all, with a step of the server, and IFCA, whose clients move; steps become
    shorter from round to round.
    """
    pick, rounds, server_lr = select.uniform(COHORT), *((3, 0.7) if m == 1 else (6, 1.0))
    own = with_execution(local, width=width).replace(momentum=momentum)
    own = own.replace(schedule=lambda round: 0.9**round)
    algorithm = (
        algorithms.scaffold(linear, own, pick, server_lr=server_lr)
        if m == 1
        else build(algorithms.ifca, linear, corrected(own), pick, m=m)
    )
    states = play(algorithm, toy, rounds)
    twin = Twin(models_of(states[0].groups), server_lr)
    for number, state in enumerate(states[1:]):
        twin.play(number, toy, pick, own.replace(lr=own.lr * 0.9**number), momentum)
        close(models_of(state.groups), twin.groups)
        close(models_of(state.rows["SCAFFOLD"].values), twin.variates, 2e-4)
        if m > 1:
            met = np.asarray(state.assignment)
            np.testing.assert_array_equal(met, twin.group)
    assert m == 1 or twin.moves > 0


def test_a_correction_is_removed_by_hand(local):
    """Of two steps with momentum and half the step size, of lengths 1 and 1.5, each 0.1 long; a
    client that did not answer has none.
    """
    delta, added = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[10.0, 20.0], [30.0, 40.0]])
    weight, steps = jnp.array([5.0, 0.0]), jnp.array([2, 3])
    upload = Upload({"w": delta}, weight, weight, weight, steps, steps, model_steps=steps)
    work = Work(steps, weight, jnp.array([0.5, 1.0]))
    own = local.replace(lr=0.2, momentum=0.5)
    found = remove_correction(own, work, {"w": added}, upload)
    np.testing.assert_allclose(found.delta["w"], [[3.5, 7.0], [3.0, 4.0]], rtol=1e-6)
    np.testing.assert_allclose(found.squared_norm, [61.25, 25.0], rtol=1e-6)


@pytest.mark.nightly
def test_first_round_is_fedavg(toy, linear, local):
    """To the last bit: all variates are 0."""
    direct, pick = with_execution(local, first_layer="direct"), select.uniform(COHORT)
    over = play(algorithms.fedavg(linear, corrected(direct), pick), toy, 2)
    alone = play(algorithms.fedavg(linear, direct, pick), toy, 2)
    np.testing.assert_array_equal(matrix(over[1].groups), matrix(alone[1].groups))
    assert np.abs(matrix(over[2].groups) - matrix(alone[2].groups)).max() > 1e-3


@pytest.mark.nightly
def test_one_full_step_keeps_the_gradient_at_the_received_model(toy, linear, local):
    """Options I and II are then the same."""
    one = local.replace(epochs=1, batch_size=64)
    before, after = play(algorithms.scaffold(linear, one, select.full_participation()), toy, 1)
    x, y = np.asarray(toy.x, np.float64), np.asarray(toy.y)
    for client, found in enumerate(models_of(after.rows["SCAFFOLD"].values)):
        held = samples(toy, client)
        expected = gradient(models_of(before.groups)[0], x[held], y[held]) if len(held) else None
        close([found], [expected or 0.0 * found], 1e-5)


@pytest.mark.nightly
def test_methods_compare_updates_that_are_not_corrected(toy, linear, local):
    """What `regroup` and `finish` see is - lr steps (mean gradient); the server averages y - x."""
    seen = lambda delta: jax.tree.map(lambda leaf: leaf[:COHORT], delta)  # noqa: E731

    def start(key, data):
        groups = jax.vmap(linear.init)(key[None])
        none = jax.tree.map(lambda leaf: jnp.zeros((COHORT, *leaf.shape[1:])), groups)
        return Start(groups, memory=(none, none))

    def regroup(r):
        return r.state.replace(memory=(seen(r.upload.delta), r.state.memory[1])), r.group

    def finish(r):
        return r.state.replace(memory=(r.state.memory[0], seen(r.upload.delta)))

    method = Method(
        sgd(linear, local), start=start, regroup=regroup, aggregate=uniform_mean, finish=finish
    )
    pick = select.uniform(COHORT)
    before, after = play(federated(linear, corrected(local), pick, method), toy, 3)[-2:]
    ids = pick.draw(derive_key(KEY, SELECT, 2), 2, toy.train.size)
    kept = matrix(after.rows["SCAFFOLD"].values)[np.asarray(ids)]
    steps = np.array([local.epochs * -(-SIZES[k] // local.batch_size) for k in ids.tolist()])
    plain = -local.lr * steps[:, None] * kept
    order = np.lexsort(plain.T)
    for delta in map(matrix, after.memory):
        np.testing.assert_allclose(delta[np.lexsort(delta.T)], plain[order], atol=2e-5)
    old = matrix(before.rows["SCAFFOLD"].values)
    bend = local.lr * steps[:, None] * (old[np.asarray(ids)] - old.mean(0))
    used = steps > 0
    step = matrix(after.groups)[0] - matrix(before.groups)[0]
    np.testing.assert_allclose(step, (plain + bend)[used].mean(0), atol=2e-5)
    assert np.abs(bend[used].mean(0)).max() > 1e-3


def test_a_variate_is_about_the_model_of_its_group(toy, linear, local):
    """A client that gets another group begins anew; half of a group that was cut has its model."""
    one = corrected(local)
    state = build(algorithms.ifca, linear, one, select.uniform(COHORT), m=3).init(KEY, toy)
    groups = jax.tree.map(lambda leaf: leaf.at[2].set(leaf[0]), state.groups)
    was, now = jnp.full(CLIENTS, 1), jnp.full(CLIENTS, 1)
    was, now = was.at[:5].set([0, 0, 0, -1, 1]), now.at[:5].set([0, 1, 2, 1, -1])
    rows = jax.tree.map(jnp.ones_like, state.rows["SCAFFOLD"].values)
    state = state.replace(
        groups=groups,
        assignment=now,
        rows={"SCAFFOLD": Rows(rows, group=was, trained=was >= 0)},
    )
    after = reset_rows_of_movers(one, state).rows["SCAFFOLD"]
    kept = [True, False, True, False, False, *[True] * (CLIENTS - 5)]
    np.testing.assert_array_equal(matrix(after.values), np.repeat(kept, 24).reshape(-1, 24))
    np.testing.assert_array_equal(after.group, now)
    np.testing.assert_array_equal(after.trained, kept)


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [True, False])
def test_who_moves_by_its_update_begins_anew(toy, linear, local, cut):
    """Unless it is half of a group that was cut: both halves go on from the group's model."""

    def start(key, data):
        groups = jax.vmap(linear.init)(jax.random.split(key))
        return Start(groups, jnp.zeros(data.num_clients, jnp.int32))

    def regroup(r):
        state = r.state
        groups = jax.tree.map(lambda leaf: leaf.at[1].set(leaf[0]), state.groups)
        state = state.replace(groups=groups) if cut else state
        return state, (r.cohort.ids % 2).astype(jnp.int32)

    method = Method(sgd(linear, local), start=start, assign=keep_groups, regroup=regroup)
    algorithm = federated(linear, corrected(local), select.full_participation(), method)
    after = play(algorithm, toy, 1)[-1]
    trained = np.array(SIZES) > 0
    kept = trained & (cut | (np.arange(CLIENTS) % 2 == 0))
    np.testing.assert_array_equal((matrix(after.rows["SCAFFOLD"].values) != 0).any(1), kept)


class Normed(nn.Module):
    """A layer with running statistics."""

    decayed = ()

    @nn.compact
    def __call__(self, x, owner=None):
        """[B, 5] -> [B, 4]."""
        return nn.Dense(CLASSES)(BatchNorm()(x, owner))


@pytest.mark.nightly
def test_running_statistics_have_no_variate(toy, local):
    task = cfl.as_task(Normed(), (FEATURES,), CLASSES)
    before, *_, after = play(algorithms.scaffold(task, local, select.uniform(COHORT)), toy, 2)
    assert (matrix(after.rows["SCAFFOLD"].values["batch_stats"]) == 0).all()
    assert (matrix(after.rows["SCAFFOLD"].values["Dense_0"]) != 0).any()
    assert (matrix(after.groups["batch_stats"]) != matrix(before.groups["batch_stats"])).any()


def test_a_group_that_is_the_only_one_has_all_clients(toy, linear, local):
    state = algorithms.scaffold(linear, local, select.uniform(COHORT)).init(KEY, toy)
    assert (np.asarray(state.assignment) == -1).all()
    np.testing.assert_array_equal(find_members(state), np.zeros(CLIENTS))


FAULTS = {
    "dropped": cfl.Faults(dropout=0.5),
    "not finite": cfl.Faults(nan=0.5),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_variate_changes_only_with_an_update_that_is_used(toy, linear, local, name):
    """What is lost is not counted either."""
    pick = select.uniform(COHORT)
    algorithm = algorithms.scaffold(linear, local, cfl.System(pick, FAULTS[name]))
    states, infos = [jax.jit(algorithm.init)(KEY, toy)], []
    one_round = jax.jit(algorithm.round)
    for _ in range(3):
        state, info = one_round(KEY, states[-1], toy)
        states.append(state)
        infos.append(info)
    lost = 0
    for (before, after), info in zip(itertools.pairwise(states), infos, strict=True):
        changed = (
            matrix(before.rows["SCAFFOLD"].values) != matrix(after.rows["SCAFFOLD"].values)
        ).any(1)
        assert changed.sum() == info.clients
        faults = info.fault_counts
        lost += int(faults.dropped + faults.nonfinite)
        sent = spent(before, after)
        assert (sent.words_down, sent.words_up) == (0, 0)
        assert (sent.units_down, sent.units_up) == (12, 12 - 2 * int(faults.dropped))
    assert lost > 0
    assert np.isfinite(matrix(states[-1].rows["SCAFFOLD"].values)).all()


@pytest.mark.nightly
def test_what_comes_too_late_changes_nothing(toy, linear, local):
    """And bytes take time: two models down and two up."""
    speed = np.where(np.arange(CLIENTS) % 2, 1.0, 2.0)
    clock = device_profiles(np.zeros(CLIENTS), speed, wait_for=1)
    system = cfl.System(select.full_participation(), clock=clock)
    algorithm = algorithms.scaffold(linear, local, system)
    before = jax.jit(algorithm.init)(KEY, toy)
    after, info = jax.jit(algorithm.round)(KEY, before, toy)
    changed = (matrix(before.rows["SCAFFOLD"].values) != matrix(after.rows["SCAFFOLD"].values)).any(
        1
    )
    np.testing.assert_array_equal(changed, (np.arange(CLIENTS) % 2 == 0) & (np.array(SIZES) > 0))
    assert (info.late, info.seconds) == (CLIENTS // 2, 4 * 4 * 24 / 2.0)


@pytest.mark.nightly
@pytest.mark.parametrize("m", others_nightly([1, 2], [2]))
def test_lanes_and_devices_change_nothing(toy, mlp, local, m):
    pick, one = select.uniform(COHORT), corrected(local)
    expected = play(build(algorithms.ifca, mlp, one, pick, m=m), toy, 3)[-1]
    other = with_execution(one, mesh=cfl.make_mesh(4), width=3)
    found = play(build(algorithms.ifca, mlp, other, pick, m=m), toy, 3)[-1]
    np.testing.assert_array_equal(expected.assignment, found.assignment)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, atol=5e-5)


REFUSED = {
    "one gradient": (algorithms.fedsgd, scaffold(), "personal=scaffold: changes the steps"),
    "corrected already": (algorithms.feddane, scaffold(), "correct their gradients already"),
    "a model each": (algorithms.nonfed, scaffold(), "a model of its own already"),
    "two corrections": (algorithms.scaffold, feddyn(), "both correct the training of clients"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(linear, local, case):
    factory, method, says = REFUSED[case]
    one_line(says, factory, linear, local.replace(personal=method), select.uniform(COHORT))


def test_a_server_without_steps_is_refused(linear, local):
    says = "algorithm.server_lr=0.0"
    one_line(says, algorithms.scaffold, linear, local, select.uniform(COHORT), server_lr=0.0)


@pytest.mark.nightly
def test_a_run_that_was_stopped_is_one_that_was_not(fedjax_cfl):
    """To the last bit; and each run of a grid is what it is alone. FeSEM cuts nothing, moves."""
    line = "algorithm=fesem model=mclr personal=scaffold clients_per_round=6 local.epochs=2"
    line += " eval_every=2 dataset.clients=12"
    stop_and_go_on(fedjax_cfl, line)


@pytest.mark.nightly
def test_runs_of_a_grid_are_what_they_are_alone(fedjax_cfl):
    line = "algorithm=scaffold model=mclr clients_per_round=6 rounds=2 dataset.clients=12"
    _, alone = run_in_grid_and_alone(fedjax_cfl, line)
    row = alone.rows[-1]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(alone.final.models))
    assert row["bytes_down"] == row["bytes_up"] == 2 * 2 * 6 * size


def test_other_layers_stand_over_the_algorithm(toy, linear, local):
    """Named before its correction, which changes the steps of SGD alone, they could not."""
    algorithm = build(
        algorithms.scaffold, linear, local.replace(personal=ditto()), select.uniform(6)
    )
    rows = jax.eval_shape(algorithm.init, KEY, toy).rows
    assert rows.keys() == {"SCAFFOLD", "Ditto"}
