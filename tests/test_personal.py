"""What clients keep for themselves, over any method: slow twins in NumPy, and what must not change
in the method below.
"""

import functools
import importlib
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    SIZES,
    at_once,
    build,
    kept,
    matrix,
    nightly,
    one_line,
    others_nightly,
    run_in_grid_and_alone,
    spent,
    stop_and_go_on,
    with_execution,
)
from scipy.special import log_softmax
from test_reference import KEY, batches_of, gradient, models_of, passes, play
from test_twins import Rule, follow

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.personal import (
    apfl,
    ditto,
    fedbabu,
    feddyn,
    fedper,
    fedrep,
    fine_tune,
    lg_fedavg,
    moon,
    pfedme,
    scaffold,
)
from fedjax_cfl.simulation.evaluate import evaluate_all, used_models
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import device_profiles

ROUNDS, COHORT, LAM = 3, 6, 0.7


def pulled(model, center, data, batches, lr, lam):
    """SGD on F_k(v) + lam / 2 ||v - center||^2."""
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    for batch in batches:
        pull = lam * (model + -1.0 * center)
        model = model + -lr * (gradient(model, x[batch], y[batch]) + pull)
    return model


@pytest.mark.parametrize(("m", "width"), [nightly(1, 1), (3, 1), nightly(3, 4)])
def test_ditto_equals_its_twin(toy, linear, local, m, width):
    pick = select.uniform(COHORT)
    own = with_execution(local, width=width).replace(personal=ditto(lam=LAM))
    states = play(build(algorithms.ifca, linear, own, pick, m=m), toy)
    rows = models_of(kept(states[0]).values)
    for before, after in itertools.pairwise(states):
        number, sent = int(before.round), models_of(before.groups)
        ids = pick.draw(derive_key(KEY, SELECT, number), number, toy.train.size).tolist()
        ids = [client for client in ids if toy.train.size[client]]
        follow(before, after, toy, local, ids, Rule(weighs=False, by_loss=True))  # as without it
        for client in ids:
            epochs = passes(derive_key(KEY, TRAIN, number), toy, client, local.epochs)
            batches = batches_of(epochs, local.batch_size)
            center = sent[int(after.assignment[client])]
            rows[client] = pulled(rows[client], center, toy, batches, local.lr, LAM)
    for found, expected in zip(models_of(kept(states[-1]).values), rows, strict=True):
        np.testing.assert_allclose(found.flat(), expected.flat(), rtol=1e-5, atol=1e-5)


METHODS = {
    "fedavg": (algorithms.fedavg, {}),
    "ifca": (algorithms.ifca, {"m": 2}),
    "fesem": (algorithms.fesem, {"m": 2}),
    "fielding": (algorithms.fielding, {"m": 2}),
    "fedprox": (algorithms.fedprox, {"mu": 0.1}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", METHODS)
def test_the_method_below_is_what_it_is_alone(toy, linear, local, name):
    factory, settings = METHODS[name]
    pick = select.uniform(COHORT)
    alone = play(build(factory, linear, local, pick, **settings), toy)
    over = play(build(factory, linear, local.replace(personal=ditto()), pick, **settings), toy)
    np.testing.assert_allclose(
        matrix(alone[-1].groups), matrix(over[-1].groups), rtol=1e-6, atol=1e-7
    )
    np.testing.assert_array_equal(alone[-1].assignment, over[-1].assignment)
    assert spent(alone[0], alone[-1]) == spent(over[0], over[-1])


@pytest.mark.parametrize("judge", [nightly("template"), "own"])
def test_fedper_equals_its_twin(toy, mlp, local, judge):
    """Over IFCA: clients test the group's layers under their own head, and train both."""
    pick = select.uniform(COHORT)
    one = local.replace(personal=fedper(judge=judge))
    states = play(build(algorithms.ifca, mlp, one, pick, m=2), toy)
    heads = [
        jax.tree.map(lambda leaf, k=k: leaf[k], kept(states[0]).values)
        for k in range(toy.num_clients)
    ]
    template = {"head": jax.tree.map(lambda leaf: leaf[0], states[0].groups["head"])}
    x, y = np.asarray(toy.x), np.asarray(toy.y)
    for before, after in itertools.pairwise(states):
        number, new = int(before.round), [[], []]
        for client in pick.draw(derive_key(KEY, SELECT, number), number, toy.train.size).tolist():
            if not toy.train.size[client]:
                continue
            held = passes(derive_key(KEY, TRAIN, number), toy, client, 1)[0]
            groups = [
                jax.tree.map(lambda leaf, g=g: leaf[g], before.groups) | heads[client]
                for g in range(2)
            ]
            judged = [model | (template if judge == "template" else {}) for model in groups]
            losses = [ce(model, x[held], y[held]) for model in judged]
            g = int(np.argmin(losses))
            assert g == int(after.assignment[client])
            model = groups[g]
            epochs = passes(derive_key(KEY, TRAIN, number), toy, client, local.epochs)
            for batch in batches_of(epochs, local.batch_size):
                model = less(model, slope(mlp, model, x[batch], y[batch]), local.lr)
            heads[client] = {"head": model["head"]}
            new[g].append(model["hidden_0"])
        for g in range(2):
            expected = before.groups["hidden_0"]
            expected = jax.tree.map(lambda leaf, g=g: leaf[g], expected)
            if new[g]:
                expected = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *new[g])
            jax.tree.map(
                lambda found, twin, g=g: np.testing.assert_allclose(found[g], twin, atol=2e-5),
                after.groups["hidden_0"],
                expected,
            )
    for client, head in enumerate(heads):
        jax.tree.map(
            lambda found, twin, k=client: np.testing.assert_allclose(found[k], twin, atol=2e-5),
            kept(states[-1]).values,
            head,
        )
    # the server's heads are those of the start
    jax.tree.map(np.testing.assert_array_equal, states[-1].groups["head"], states[0].groups["head"])


def ce(model, x, y):
    """Mean cross-entropy of the network without the penalty."""
    hidden = x.astype(np.float64) @ model["hidden_0"]["kernel"] + model["hidden_0"]["bias"]
    logits = np.maximum(hidden, 0) @ model["head"]["kernel"] + model["head"]["bias"]
    return -np.mean(np.take_along_axis(log_softmax(logits, axis=1), y[:, None], 1))


@functools.partial(jax.jit, static_argnums=0)
def slope(task, model, x, y):
    """The gradient of the mean loss."""
    return jax.grad(lambda p: task.loss(p, x, y).mean())(model)


def less(model, gradient, lr):
    return jax.tree.map(lambda p, g: p - lr * g, model, gradient)


def apfl_twin(task, model, row, batches, lr, adaptive):
    own, alpha = row.model, float(row.alpha)
    for number, (x, y) in enumerate(batches):
        mixed = jax.tree.map(lambda v, w, a=alpha: a * v + (1 - a) * w, own, model)
        gradient = slope(task, mixed, x, y)
        gaps = [
            np.sum((np.asarray(v) - w) * g)
            for v, w, g in zip(*map(jax.tree.leaves, (own, model, gradient)), strict=True)
        ]
        model = less(model, slope(task, model, x, y), lr)
        own = less(own, gradient, lr * alpha)
        if adaptive and not number:
            alpha = float(np.clip(alpha - lr * sum(gaps), 0, 1))
    return model, row.replace(model=own, alpha=np.float32(alpha))


def pfedme_twin(task, model, row, batches, lr, lam, inner_steps, inner_lr):
    theta = model
    for x, y in batches:
        for _ in range(inner_steps):
            gradient = slope(task, theta, x, y)
            theta = jax.tree.map(
                lambda t, g, w: t - inner_lr * (g + lam * (t - w)), theta, gradient, model
            )
        model = jax.tree.map(lambda w, t: w - lr * lam * (w - t), model, theta)
    return model, theta


def fedrep_twin(task, model, row, batches, lr, epochs):
    model = model | row
    for number, (x, y) in enumerate(batches):
        layer = "head" if number < len(batches) // epochs * (epochs - 1) else "hidden_0"
        model = model | {layer: less(model, slope(task, model, x, y), lr)[layer]}
    return model, {"head": model["head"]}


def fedbabu_twin(task, model, row, batches, lr):
    for x, y in batches:
        model = model | {"hidden_0": less(model, slope(task, model, x, y), lr)["hidden_0"]}
    return model, ()


def lg_fedavg_twin(task, model, row, batches, lr):
    """The head is shared, and all before it a client's own."""
    assert set(model) - set(row) == {"head"}
    own = model | row
    for x, y in batches:
        own = less(own, slope(task, own, x, y), lr)
    return own | {name: model[name] for name in row}, {name: own[name] for name in row}


TWINS = {
    "lg_fedavg": (lg_fedavg(), lg_fedavg_twin),
    "apfl": (apfl(alpha=0.3), lambda *given: apfl_twin(*given, adaptive=False)),
    "apfl, adaptive": (apfl(adaptive=True), lambda *given: apfl_twin(*given, adaptive=True)),
    "pfedme": (
        pfedme(lam=3.0, inner_steps=2, inner_lr=0.05),
        lambda *given: pfedme_twin(*given, 3.0, 2, 0.05),
    ),
    "fedrep": (fedrep(), lambda *given: fedrep_twin(*given, epochs=2)),
    "fedbabu": (fedbabu(), fedbabu_twin),
}


@pytest.mark.parametrize("name", others_nightly(TWINS, [name for name in TWINS if name != "apfl"]))
def test_rounds_equal_a_slow_twin(toy, mlp, local, name):
    """Whole rounds: who trains what, which part the server averages, who keeps what."""
    method, twin = TWINS[name]
    pick = select.uniform(COHORT)
    one = local.replace(personal=method)
    states = play(build(algorithms.fedavg, mlp, one, pick), toy)
    x, y = np.asarray(toy.x), np.asarray(toy.y)
    server = jax.tree.map(lambda leaf: leaf[0], states[0].groups)
    values = kept(states[0]).values
    rows = [jax.tree.map(lambda leaf, k=k: leaf[k], values) for k in range(len(SIZES))]
    for number in range(ROUNDS):
        answers, weights = [], []
        for client in pick.draw(derive_key(KEY, SELECT, number), number, np.array(SIZES)).tolist():
            if not SIZES[client]:
                continue
            epochs = passes(derive_key(KEY, TRAIN, number), toy, client, local.epochs)
            batches = [(x[b], y[b]) for b in batches_of(epochs, local.batch_size)]
            model, rows[client] = twin(mlp, server, rows[client], batches, local.lr)
            if name == "fedrep":
                model = model | {"head": server["head"]}
            answers.append(model)
            weights.append(SIZES[client])
        server = jax.tree.map(
            lambda *leaves, w=weights: np.average(leaves, axis=0, weights=w), *answers
        )
    close = lambda found, twin: np.testing.assert_allclose(found, twin, atol=3e-5)  # noqa: E731
    jax.tree.map(lambda found, twin: close(found[0], twin), states[-1].groups, server)
    found = kept(states[-1]).values
    for client, row in enumerate(rows):
        leaves = jax.tree.leaves(jax.tree.map(lambda leaf, k=client: leaf[k], found))
        for mine, theirs in zip(leaves, jax.tree.leaves(row), strict=True):
            close(mine, theirs)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", [ditto(), nightly(apfl()), nightly(fedper())], ids=["ditto", "apfl", "fedper"]
)
def test_lanes_and_devices_change_nothing(toy, mlp, local, method):
    pick, one = select.uniform(COHORT), local.replace(personal=method)
    expected = play(build(algorithms.ifca, mlp, one, pick, m=2), toy)[-1]
    other = with_execution(one, mesh=cfl.make_mesh(4), width=3)
    found = play(build(algorithms.ifca, mlp, other, pick, m=2), toy)[-1]
    for a, b in zip(jax.tree.leaves(expected.rows), jax.tree.leaves(found.rows), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_array_equal(expected.assignment, found.assignment)


def test_a_step_of_pfedme_by_hand(monkeypatch):
    """Two inner steps on w^2 / 2 from the received model; the loss is that of the first."""
    module = importlib.import_module("fedjax_cfl.personal.pfedme")
    monkeypatch.setattr(module, "add_change", lambda solve, change: change.step)
    local = SimpleNamespace(lr=0.1)
    step = pfedme(lam=1.0, inner_steps=2, inner_lr=0.25).train(None, local, None)

    def slope(theta, number):
        return theta["w"] ** 2 / 2, theta

    received = {"w": jnp.array(2.0)}
    c = SimpleNamespace(slope=slope, number=0, lr=0.1, received=received)
    w, theta, loss = step(c, {"w": jnp.array(1.0)}, {"w": jnp.array(9.0)})
    # 2 -> 2 - 0.25 (2 + 2 - 1) = 1.25 -> 1.25 - 0.25 (1.25 + 1.25 - 1); w -> 1 - 0.1 (1 - 0.875)
    np.testing.assert_allclose([theta["w"], w["w"], loss], [0.875, 0.9875, 2.0], rtol=1e-6)


@pytest.mark.parametrize("method", [ditto(), pfedme()], ids=["ditto", "pfedme"])
def test_a_client_is_served_what_it_keeps(method):
    """And not the group's model, which both train beside it."""
    assert method.serve({"w": 1.0}, {"w": 2.0}) == {"w": 1.0}


@pytest.fixture(scope="module")
def lost(toy, linear, local):
    """FedAvg with Ditto, whose clients' answers are all lost: (algorithm, clients of round 0, and
    the state before and after round 0 of any data).
    """
    system = cfl.System(select.uniform(COHORT), cfl.Faults(dropout=1.0))
    algorithm = algorithms.fedavg(linear, local.replace(personal=ditto()), system)
    ids = system.select.draw(derive_key(KEY, SELECT, 0), 0, np.array(SIZES)).tolist()
    before, one_round = jax.jit(algorithm.init)(KEY, toy), jax.jit(algorithm.round)
    return algorithm, ids, lambda data: (before, one_round(KEY, before, data)[0])


def test_who_is_tested_on_what(toy, linear, lost):
    """Clients that have not trained use their group's model, others what the method says."""
    algorithm, ids, run = lost
    state = run(toy)[1]
    trained = [k in ids and SIZES[k] > 0 for k in range(len(SIZES))]
    np.testing.assert_array_equal(kept(state).trained, trained)
    models, index, *_ = used_models(algorithm, state, toy)
    np.testing.assert_array_equal(index, np.arange(len(SIZES)))
    for client, has in enumerate(trained):
        source = kept(state).values if has else state.groups
        row = client if has else 0
        for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(source), strict=True):
            np.testing.assert_array_equal(a[client], b[row])
    found, table = at_once(evaluate_all, algorithm, linear, cfl.make_mesh(1), state, toy, True)
    x, y, owner = (np.asarray(a) for a in (toy.x, toy.y, toy.owner))
    for client, model in enumerate(models_of(models)):
        held = np.asarray(toy.test.order)[int(toy.test.start[client]) :][
            : int(toy.test.size[client])
        ]
        if len(held):
            assert (owner[held] == client).all()
            right = np.argmax(x @ model.kernel + model.bias, -1)[held] == y[held]
            np.testing.assert_allclose(table.accuracy[client], right.mean(), rtol=1e-6)
    assert found["groups"] == 1  # groups are those of the method, whatever clients use


def test_what_a_client_has_trained_survives_a_lost_answer(toy, lost):
    _, ids, run = lost
    before, after = run(toy)
    np.testing.assert_array_equal(matrix(before.groups), matrix(after.groups))
    moved = np.any(matrix(kept(before).values) != matrix(kept(after).values), axis=1)
    np.testing.assert_array_equal(moved, kept(after).trained)
    assert moved.sum() == sum(SIZES[k] > 0 for k in ids)


def test_rows_that_are_not_finite_are_not_kept(toy, lost):
    _, ids, run = lost
    first, second = [k for k in ids if SIZES[k] > 0][:2]
    bad = toy.replace(x=toy.x.at[toy.train.order[toy.train.start[first]]].set(np.nan))
    _, after = run(bad)
    assert np.isfinite(matrix(kept(after).values)).all()
    assert not kept(after).trained[first]
    assert kept(after).trained[second]


def test_models_of_ones_own_that_diverge_are_counted(toy, linear, local):
    """The updates of the same clients are fine, and used."""
    algorithm = algorithms.fedavg(
        linear, local.replace(personal=ditto(lam=1e30)), select.uniform(COHORT)
    )
    after, info = jax.jit(algorithm.round)(KEY, jax.jit(algorithm.init)(KEY, toy), toy)
    # one with a single step begins where it received, and is not pulled yet
    diverged = int(info.clients) - int(kept(after).trained.sum())
    assert int(info.fault_counts.nonfinite) == diverged > 0
    assert np.isfinite(matrix(after.groups)).all()


@pytest.mark.nightly
def test_time_goes_by_what_is_sent_and_by_all_steps(toy, mlp, local):
    """A model has 34 parameters, 18 of them in its first layer; Ditto takes each step twice."""
    count = len(SIZES)
    clock = device_profiles(np.full(count, 1000), np.ones(count))  # seconds a step, bytes a second

    def seconds(method):
        system = cfl.System(select.full_participation(), clock=clock)
        algorithm = algorithms.fedavg(mlp, local.replace(personal=method), system)
        state = jax.jit(algorithm.init)(KEY, toy)
        return float(jax.jit(algorithm.round)(KEY, state, toy)[1].seconds)

    steps = local.epochs * -(-max(SIZES) // local.batch_size)
    assert seconds(fedper()) == 2 * 4 * 18 + 1000 * steps
    assert seconds(ditto()) == 2 * 4 * 34 + 1000 * 2 * steps


REFUSED = {
    "no such layer": (fedper(layers=("hed",)), algorithms.fedavg, "did you mean 'head'"),
    "all layers": (fedper(layers=("head", "hidden_0")), algorithms.fedavg, "algorithm=nonfed"),
    "another way to train": (apfl(), algorithms.fedsgd, "personal=apfl: changes the steps"),
    "a model each": (ditto(), algorithms.fedfomo, "a model of its own already"),
    "no epoch for the head": (fedrep(body_epochs=2), algorithms.fedavg, "none is left"),
    "losses of all clients": (fedper(judge="own"), algorithms.feddrift, "FedDrift tests"),
    "a pull that overshoots": (pfedme(lam=5.0), algorithms.fedavg, "must be below 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(mlp, local, case):
    method, factory, says = REFUSED[case]
    one_line(says, factory, mlp, local.replace(personal=method), select.uniform(COHORT))


@pytest.mark.parametrize("method", [fedper, lg_fedavg, fedrep])
def test_a_judge_that_does_not_exist_is_refused(method):
    one_line("judge", method, judge="mine")


# of an mlp: 64 pixels, 10 classes
PARTS = {"fedper": "hidden_0", "fedrep": "hidden_0", "fedbabu": "hidden_0", "lg_fedavg": "head"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ditto", "apfl", *PARTS])
def test_a_run_that_was_stopped_is_one_that_was_not(fedjax_cfl, name):
    """To the last bit, also the clients' own; bytes are those of the part that is sent."""
    line = f"algorithm=ifca model=mlp personal={name} clients_per_round=6 local.epochs=2"
    line += " eval_every=2 dataset.clients=12"
    _, whole = stop_and_go_on(fedjax_cfl, line)
    own = name != "fedbabu"
    assert len(jax.tree.leaves(whole.final.models)[0]) == (12 if own else 3)
    np.testing.assert_array_equal(whole.final.model_index >= 0, whole.table["group"] >= 0)
    one = jax.tree.map(lambda leaf: leaf[0], whole.final.models)
    sent = sum(leaf.nbytes for leaf in jax.tree.leaves(one[PARTS[name]] if name in PARTS else one))
    row = whole.rows[-1]
    assert row["bytes_down"] == sent * row["units_down"] > 0
    assert 0 <= row["bytes_up"] - sent * row["units_up"] <= 4 * 6 * 4  # and a word for each choice


@pytest.mark.nightly
def test_runs_of_a_grid_are_what_they_are_alone(fedjax_cfl):
    line = "algorithm=ifca model=mlp personal=ditto clients_per_round=6 rounds=2 dataset.clients=12"
    member, alone = run_in_grid_and_alone(fedjax_cfl, line)
    np.testing.assert_array_equal(member.table["group"], alone.table["group"])


@pytest.mark.parametrize("given", [ditto, "ditto", [ditto(), "apfl"]])
def test_what_is_no_layer_is_refused(given, local):
    one_line("local.personal: takes what functions of cfl.personal", local.replace, personal=given)


BOTH_TESTED = "both say which model a client is tested on; use one of the two"
UNFIT = {
    "two models": ((ditto(), apfl()), f"personal=[ditto,apfl]: {BOTH_TESTED}"),
    "a part and a model": ((fedper(), fine_tune()), f"personal=[fedper,fine_tune]: {BOTH_TESTED}"),
    "two corrections": (
        (scaffold(), feddyn()),
        "personal=[scaffold,feddyn]: both correct the training of clients",
    ),
    "a part is corrected": (
        (scaffold(), lg_fedavg()),
        "personal=[scaffold,lg_fedavg]: a correction is for models that are sent as a whole",
    ),
    "twice": ((moon(), moon()), "personal: moon is given twice; use it once"),
    "two steps": ((pfedme(), fedbabu()), BOTH_TESTED),
}


@pytest.mark.parametrize("case", UNFIT)
def test_layers_that_do_not_fit_are_refused_in_one_line(case, mlp, local):
    given, says = UNFIT[case]
    pick = select.uniform(COHORT)
    one_line(says, algorithms.fedavg, mlp, local.replace(personal=given), pick)


def test_a_correction_that_has_no_effect_is_refused(toy, mlp, local):
    """pFedMe's group model goes to the client's own, by no gradient."""
    one = local.replace(personal=[scaffold(), pfedme(lam=1.0)])
    algorithm = build(algorithms.fedavg, mlp, one, select.uniform(COHORT))
    one_line("pFedMe moves its group's model by itself", play, algorithm, toy, 1)


def test_a_step_is_taken_once(toy, mlp, local):
    def twice(c, w, v):
        return c.sgd, c.descend(c.descend(v, c.grad(v)), c.grad(v))

    layer = cfl.layer("twice", own=lambda w: w, step=twice)
    algorithm = build(algorithms.fedavg, mlp, local.replace(personal=layer), select.uniform(COHORT))
    one_line("step: takes c.descend twice", play, algorithm, toy, 1)


@pytest.mark.nightly
def test_a_stack_is_its_layers_where_they_do_not_meet(toy, mlp, local):
    """SCAFFOLD under Ditto: groups and variates are SCAFFOLD's alone, bit for bit; the own model is
    pulled to what SCAFFOLD sends.
    """
    pick = select.uniform(COHORT)
    alone, both = (
        play(build(algorithms.ifca, mlp, local.replace(personal=given), pick, m=2), toy)[-1]
        for given in (scaffold(), [scaffold(), ditto(lam=LAM)])
    )
    jax.tree.map(np.testing.assert_array_equal, alone.groups, both.groups)
    jax.tree.map(np.testing.assert_array_equal, alone.rows["SCAFFOLD"], both.rows["SCAFFOLD"])
    assert both.rows.keys() == {"SCAFFOLD", "Ditto"}


def test_a_corrected_step_equals_its_twin_under_apfl(toy, mlp, local):
    """Both models of APFL over SCAFFOLD: w goes by corrected gradients, v by plain ones."""
    pick = select.full_participation()
    one = local.replace(personal=[scaffold(), apfl(alpha=0.3)])
    states = play(build(algorithms.fedavg, mlp, one, pick), toy, 2)
    x, y = np.asarray(toy.x), np.asarray(toy.y)
    before, after = states[1:]
    server = jax.tree.map(lambda leaf: leaf[0], before.groups)
    variates = before.rows["SCAFFOLD"].values
    mean = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), variates)
    for client in (0, 3):
        own, variate = (
            jax.tree.map(lambda leaf, k=client: leaf[k], rows)
            for rows in (before.rows["APFL"].values.model, variates)
        )
        added, model = jax.tree.map(np.subtract, mean, variate), server
        epochs = passes(derive_key(KEY, TRAIN, 1), toy, client, local.epochs)
        for batch in batches_of(epochs, local.batch_size):
            mixed = jax.tree.map(lambda v, w: 0.3 * v + 0.7 * w, own, model)
            own = less(own, slope(mlp, mixed, x[batch], y[batch]), 0.3 * local.lr)
            direction = jax.tree.map(np.add, slope(mlp, model, x[batch], y[batch]), added)
            model = less(model, direction, local.lr)
        found = jax.tree.map(lambda leaf, k=client: leaf[k], after.rows["APFL"].values.model)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), found, own)
