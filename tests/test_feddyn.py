"""FedDyn over FedAvg and within groups: a slow twin in NumPy, and what must hold of its terms."""

import jax
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
    spent,
    with_execution,
)
from test_personal import play
from test_reference import (
    KEY,
    batches_of,
    cohort_of,
    gradient,
    mean,
    models_of,
    passes,
    samples,
    trained,
)
from test_scaffold import Normed, close
from test_scaffold import Twin as Groups

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.client.local import Work
from fedjax_cfl.client.objective import erm, find_objective, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.personal import feddyn, scaffold
from fedjax_cfl.system import select

PICK, ALPHA, CLIENTS = select.uniform(6), 0.6, len(SIZES)
EVERYBODY = select.full_participation()


class Twin(Groups):
    """As that of SCAFFOLD, with duals, h / alpha, for variates."""

    def train(self, data, k, key, local):
        x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
        start, velocity = self.groups[self.group[k]], 0.0 * self.groups[0]
        model = start
        for batch in batches_of(passes(key, data, k, local.epochs), local.batch_size):
            pull = ALPHA * (model + -1.0 * start + self.variates[k])
            velocity = local.momentum * velocity + gradient(model, x[batch], y[batch]) + pull
            model = model + -local.lr * velocity
        return model

    def play(self, number, data, local):
        ids = cohort_of(PICK, number, data)
        for k in ids:
            g = self.choose(data, k)
            if self.group[k] not in (-1, g):
                self.moves += 1
                self.variates[k] = 0.0 * self.variates[k]
            self.group[k] = g
        answers = {k: self.train(data, k, derive_key(KEY, TRAIN, number), local) for k in ids}
        for k, model in answers.items():
            self.variates[k] = self.variates[k] + model + -1.0 * self.groups[self.group[k]]
        for g in {self.group[k] for k in ids}:
            found = mean([answers[k] for k in ids if self.group[k] == g])
            only = len(self.groups) == 1
            duals = [self.variates[k] for k in range(CLIENTS) if only or self.group[k] == g]
            self.groups[g] = found + mean(duals) if len(duals) >= 3 else found


@pytest.mark.parametrize(
    ("m", "width", "momentum"), [nightly(4, 1, 0.0), (1, 1, 0.5), nightly(1, 4, 0.0)]
)
def test_rounds_equal_a_slow_twin(toy, linear, local, m, width, momentum):
    """One model for all, and IFCA, whose clients move; bytes are those of the method below."""
    own = with_execution(local, width=width).replace(momentum=momentum, lr=0.1)
    algorithm = (
        algorithms.feddyn(linear, own, PICK, alpha=ALPHA)
        if m == 1
        else build(algorithms.ifca, linear, own.replace(personal=feddyn(alpha=ALPHA)), PICK, m=m)
    )
    states = play(algorithm, toy, 6)
    twin = Twin(models_of(states[0].groups))
    sizes = set()
    for number, state in enumerate(states[1:]):
        twin.play(number, toy, own)
        close(models_of(state.groups), twin.groups, 1e-4)
        close(
            [(1 / ALPHA) * row for row in models_of(state.rows["FedDyn"].values)],
            twin.variates,
            1e-4,
        )
        sizes |= {twin.group.count(g) for g in range(m)}
    assert m == 1 or (twin.moves > 0 and sizes & {1, 2} and max(sizes) > 2)
    sent = spent(states[0], states[-1])
    assert (sent.units_down, sent.units_up) == (6 * 6 * m, 6 * 6)
    correction = feddyn(alpha=ALPHA).correction
    found = [float(correction.server_step(1.0, members)) for members in (2, 3)]
    assert found == pytest.approx([0.0, 1 / ALPHA])


@pytest.mark.parametrize(("pick", "share"), [nightly(PICK, 6 / 14), nightly(EVERYBODY, 13 / 14)])
def test_without_pull_the_server_goes_farther(toy, linear, local, pick, share):
    """In the first round by the share of clients that have trained: twice as far with all."""
    before, after = models_in_turn(algorithms.feddyn(linear, local, pick, alpha=1e-9), toy)
    ids, key = cohort_of(pick, 0, toy), derive_key(KEY, TRAIN, 0)
    assert len(ids) == round(share * CLIENTS)
    plans = [batches_of(passes(key, toy, k, local.epochs), local.batch_size) for k in ids]
    plain = mean([trained(before, toy, plan, local.lr) for plan in plans])
    close([after], [before + (1 + share) * (plain + -1.0 * before)])


def models_in_turn(algorithm, data):
    return [models_of(state.groups)[0] for state in play(algorithm, data, 1)]


def test_a_pull_of_the_method_below_adds_up(linear, local):
    near = sgd(linear, local, proximal(0.2, erm(linear)))
    for below, mu in ((near, ALPHA + 0.2), (sgd(linear, local), ALPHA)):
        solve = feddyn(alpha=ALPHA).train(linear, local, below)
        (change,) = solve.args[0]
        assert change.objective(find_objective(solve), None, None).mu == pytest.approx(mu)


@pytest.mark.nightly
def test_clients_end_at_one_model_where_all_losses_together_have_no_slope(toy, linear, local):
    """Whose rows then are minus their gradients there."""
    one = local.replace(epochs=30, batch_size=64, lr=0.3)
    state = play(algorithms.feddyn(linear, one, EVERYBODY, alpha=0.3), toy, 160)[-1]
    model = models_of(state.groups)[0]
    x, y = np.asarray(toy.x, np.float64), np.asarray(toy.y)
    slopes = []
    for k in range(CLIENTS):
        held = samples(toy, k)
        if len(held):
            slopes.append(gradient(model, x[held], y[held]))
            close([models_of(state.rows["FedDyn"].values)[k]], [-1.0 * slopes[-1]], 2e-3)
    assert np.abs(mean(slopes).flat()).max() < 1e-3 < np.abs(slopes[0].flat()).max()


@pytest.mark.nightly
def test_running_statistics_have_no_term(toy, local):
    task = cfl.as_task(Normed(), (FEATURES,), CLASSES)
    before, *_, after = play(algorithms.feddyn(task, local, PICK), toy, 2)
    assert (matrix(after.rows["FedDyn"].values["batch_stats"]) == 0).all()
    assert (matrix(after.rows["FedDyn"].values["Dense_0"]) != 0).any()
    assert (matrix(after.groups["batch_stats"]) != matrix(before.groups["batch_stats"])).any()


def test_methods_compare_updates_without_the_linear_term(local):
    """lr steps h is added to what a client sends."""
    one = local.replace(personal=feddyn(alpha=ALPHA))
    uncorrect = one.personal.correction.uncorrect
    row = {"w": np.array([[2.0], [3.0]], np.float32)}
    upload = cfl.Upload(
        delta={"w": np.ones((2, 1), np.float32)},
        weight=np.array([5.0, 0.0]),
        loss=np.zeros(2),
        last_loss=np.zeros(2),
        steps=np.array([9, 0]),
        model_steps=np.array([4, 0]),
        start_group=np.zeros(2, np.int32),
    )
    work = Work(np.zeros(2, np.int32), np.ones(2), np.full(2, 0.5))
    found = uncorrect(one, work, row, upload)
    np.testing.assert_allclose(found.delta["w"][:, 0], [1 + 0.2 * 0.5 * 4 * 2, 1])


@pytest.mark.nightly
def test_terms_change_only_with_updates_that_are_used(toy, linear, local):
    system, key = cfl.System(PICK, cfl.Faults(dropout=0.5)), jax.random.key(3)
    algorithm = algorithms.feddyn(linear, local, system)
    before = jax.jit(algorithm.init)(key, toy)
    after, info = jax.jit(algorithm.round)(key, before, toy)
    changed = (matrix(before.rows["FedDyn"].values) != matrix(after.rows["FedDyn"].values)).any(1)
    assert 0 < changed.sum() == info.clients < 6


REFUSED = {
    "no pull": (algorithms.fedavg, {"alpha": 0.0}, "personal.alpha=0.0: must be"),
    "a pull that overshoots": (algorithms.fedavg, {"alpha": 5.0}, "times local.lr=0.2 it is 1,"),
    "another server": (algorithms.fedadam, {}, "the server of this method makes another step"),
    "another mean": (algorithms.qfedavg, {}, "the server of this method makes another step"),
    "a linear term": (algorithms.feddane, {}, "a pull or a linear term of their own already"),
    "one gradient": (algorithms.fedsgd, {}, "personal=feddyn: changes the steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(linear, local, case):
    factory, settings, says = REFUSED[case]

    def make():
        return factory(linear, local.replace(personal=feddyn(**settings)), PICK)

    one_line(says, make)


def test_two_corrections_are_refused(linear, local):
    both = local.replace(personal=scaffold())
    one_line("both correct the training", algorithms.feddyn, linear, both, PICK)
    one_line("algorithm.alpha=0.0", algorithms.feddyn, linear, local, PICK, alpha=0.0)
