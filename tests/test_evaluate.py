"""Evaluation, and what a round reports, against a loop over clients."""

from types import SimpleNamespace

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import matrix, nightly

import fedjax_cfl as cfl
from fedjax_cfl import sharding
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.analysis.sets import time_to_keep
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.data.federated import train_label_counts
from fedjax_cfl.errors import RunError
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.method import Method
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import random_groups
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.simulation.rows import discards_accuracy
from fedjax_cfl.system import select
from fedjax_cfl.system.reports import count_to_int, make_report
from fedjax_cfl.tasks import CLASSIFICATION
from fedjax_cfl.types import Cohort, ServedModels, Upload

KEY = jax.random.key(11)


def answers(task, models, index, data):
    """Returns (class, cross-entropy) of every test sample, client by client, -1 and 0
    where a client has no model.
    """
    guess, loss = np.full(data.test.order.size, -1), np.zeros(data.test.order.size)
    every = np.asarray(jax.jit(jax.vmap(task.predict, (0, None)))(models, data.x))
    index, data = jax.device_get((index, data))
    for client in range(data.num_clients):
        place = np.arange(data.test.size[client]) + int(data.test.start[client])
        if index[client] < 0 or not place.size:
            continue
        rows = data.test.order[place]
        logits = every[index[client], rows]
        guess[place] = logits.argmax(1)
        loss[place] = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), data.y[rows]]
    return guess, loss


INDICES = {
    "some without": [0, 2, -1, 1, 1, 2, -1, 0, 2, 0, 1, -1, 0, 2],
    "one for all": [1] * 14,
    "nobody has one": [-1] * 14,
}


@pytest.mark.parametrize(("devices", "block"), [nightly(1, 4), (1, 128), (4, 4), nightly(4, 128)])
def test_predictions_are_those_of_a_loop_over_clients(
    toy, linear, models, monkeypatch, devices, block
):
    monkeypatch.setattr(evaluate, "EVAL_BLOCK", block)
    predict = jax.jit(
        lambda index: evaluate.predict_test_samples(
            linear, cfl.make_mesh(devices), ServedModels(models, index), toy
        )
    )
    for index in INDICES.values():
        guess, loss = predict(jnp.array(index))
        expected = answers(linear, models, index, toy)
        np.testing.assert_array_equal(guess, expected[0])
        np.testing.assert_allclose(loss, expected[1], rtol=1e-5)


@pytest.mark.parametrize("devices", [nightly(1), 4])
def test_each_client_is_tested_on_its_own_model(toy, linear, monkeypatch, devices):
    """Where clients have models of their own, devices hold those of their blocks alone."""
    monkeypatch.setattr(evaluate, "EVAL_BLOCK", 4)
    monkeypatch.setattr(sharding, "MIN_SPLIT_BYTES", 1)
    mesh, index = cfl.make_mesh(devices), jnp.array([*range(12), -1, 13])
    models = jax.vmap(linear.init)(jax.random.split(KEY, 14))
    expected = answers(linear, models, index, toy)
    places = jax.tree.map(lambda leaf: sharding.split_sharding(leaf, mesh), models)
    held = jax.device_put(models, places)
    predict = jax.jit(
        lambda models: evaluate.predict_test_samples(linear, mesh, ServedModels(models, index), toy)
    )
    guess, loss = predict(held)
    np.testing.assert_array_equal(guess, expected[0])
    np.testing.assert_allclose(loss, expected[1], rtol=1e-5)
    text = predict.lower(held).compile().as_text()
    weights = max(leaf.size for leaf in jax.tree.leaves(models))
    assert devices == 1 or not hlo.count_arrays(text, {weights})


def test_evaluation_counts_only_clients_with_a_model(toy, linear, models):
    index = INDICES["some without"]

    def evaluated(index):
        table, counts = evaluate.evaluate_clients(
            linear, cfl.make_mesh(1), ServedModels(models, index), toy
        )
        zero = jnp.zeros((), int)
        totals = evaluate.Totals(counts, zero, zero, zero, jnp.float32(jnp.nan))
        found = evaluate.Evaluation(table, totals)
        tested = evaluate.Tested(index, found, toy.concept, toy.train.size)
        return evaluate.finalize(CLASSIFICATION, tested, 3), table

    row, table = jax.jit(evaluated)(jnp.array(index))
    guess, loss = answers(linear, models, index, toy)
    counted = guess >= 0
    np.testing.assert_allclose(
        row["accuracy"], np.mean((guess == np.asarray(toy.y[toy.test.order]))[counted]), rtol=1e-6
    )
    np.testing.assert_allclose(row["test_loss"], np.mean(loss[counted]), rtol=1e-5)
    assert row["group_sizes"].tolist() == [4, 3, 4]
    group = np.array(index)[np.asarray(toy.owner[toy.test.order])]
    right = guess == np.asarray(toy.y[toy.test.order])
    for name, values in (("accuracy", right), ("loss", loss)):
        means = [np.mean(values[counted & (group == g)]) for g in range(3)]
        np.testing.assert_allclose(row[f"group_{name}"], means, rtol=1e-5)
    assert row["evaluated_clients"] == 11
    np.testing.assert_array_equal(table.samples, np.where(np.array(index) >= 0, toy.test.size, 0))


def test_clients_of_one_model_are_so_far_apart(toy, linear, models):
    """A client without a model, or without data, is nobody's neighbour."""
    index = np.array(INDICES["some without"])
    gone = int(np.flatnonzero((index >= 0) & (np.asarray(toy.train.size) > 0))[0])
    size = toy.train.size.at[gone].set(0)
    data = toy.replace(train=toy.train.replace(size=size))
    found = jax.jit(evaluate.evaluate_distance)(ServedModels(models, jnp.array(index)), data)
    counts = train_label_counts(data)
    shares = np.asarray(counts / jnp.maximum(counts.sum(1, keepdims=True), 1))
    known = [k for k in range(14) if index[k] >= 0 and size[k] > 0]
    each = []
    for k in known:
        others = [j for j in known if j != k and index[j] == index[k]]
        each.append(np.mean([abs(shares[k] - shares[j]).sum() for j in others]) if others else 0.0)
    assert 0 < len(known) < 14
    np.testing.assert_allclose(found, np.mean(each), rtol=1e-5)


def test_a_model_that_is_not_finite_has_no_accuracy(toy, linear, models):
    """By the models that test somebody, or because no loss is finite."""
    index = jnp.array(INDICES["some without"])

    def score(models, index):
        served = ServedModels(models, index)
        algorithm = cfl.Algorithm(init=None, round=None, serve=lambda state: served)
        return evaluate.evaluate_all(algorithm, linear, cfl.make_mesh(1), None, toy, True)[0]

    score = jax.jit(score)
    broken = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.inf), models)
    row, without = score(broken, index), score(broken, jnp.where(index == 1, -1, index))
    tested = np.asarray((index == 1) & (toy.test.size > 0)).sum()
    assert row["nonfinite_model_clients"] == tested and without["nonfinite_model_clients"] == 0
    np.testing.assert_array_equal(np.isnan(row["group_accuracy"]), [False, True, False])
    # nor are clients without a model tested on the first one
    first = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.inf), models)
    assert score(first, jnp.where(index == 0, -1, index))["nonfinite_model_clients"] == 0
    scores = {name for name in row if name.endswith(("accuracy", "f1"))} - {"group_accuracy"}
    assert len(scores) == 8 and all(np.isnan(row[name]) for name in scores)
    assert not any(np.isnan(without[name]) for name in scores - {"auxiliary_accuracy"})
    row = score(jax.tree.map(lambda leaf: jnp.full_like(leaf, 3e38), models), index)
    assert np.isnan(row["accuracy"]) and row["nonfinite_model_clients"] > 0


def test_a_client_beyond_the_last_has_no_model():
    served = ServedModels((), jnp.array([1, 0]), jnp.eye(2))
    taken = evaluate.take_served(served, jnp.array([1, 2]))
    assert taken.model_index.tolist() == [0, -1] and taken.weights.tolist() == [[0, 1], [0, 0]]


def test_parts_are_entered_whatever_their_order():
    """The part of clients 0 and 1 has room for a third one."""

    def empty(clients):
        labels = jnp.zeros(9, jnp.int32)
        data = SimpleNamespace(num_clients=clients, num_classes=2, y=labels)
        return evaluate.empty(CLASSIFICATION, data)

    def part(samples):
        found = empty(3)
        table = found.clients.replace(samples=jnp.array(samples), loss=jnp.array(samples) / 10)
        return found._replace(
            clients=table, totals=jax.tree.map(lambda each: each + 1, found.totals)
        )

    late, early = (part([3, 4, 0]), 2), (part([1, 2, 0]), 0)
    for parts in ((early, late), (late, early)):
        found = empty(5)
        for more, first in parts:
            found = evaluate.merge(found, more, first)
        assert found.clients.samples.tolist() == [1, 2, 3, 4, 0]
        np.testing.assert_allclose(found.clients.loss, [0.1, 0.2, 0.3, 0.4, np.nan])
        assert found.totals.classes.tolist() == [[2, 2], [2, 2]]


@pytest.mark.nightly
def test_auxiliary_model_is_the_mean_of_the_models_in_use(toy, linear, models):
    index = jnp.array([0, 2] * 7)  # model 1 serves nobody
    mean = jax.tree.map(lambda leaf: (leaf[0] + leaf[2]) / 2, models)
    hits = jnp.argmax(linear.predict(mean, toy.x[toy.test.order]), 1) == toy.y[toy.test.order]
    right, total = jax.jit(
        lambda index: evaluate.evaluate_auxiliary(
            linear, cfl.make_mesh(1), ServedModels(models, index), toy
        )
    )(index)
    assert (right, total) == (hits.sum(), hits.size)
    # samples that nobody holds at the moment count nowhere
    held = (jnp.arange(toy.y.size) % 3 > 0)[toy.test.order]
    hidden = toy.replace(owner=jnp.where(jnp.arange(toy.y.size) % 3 > 0, toy.owner, -1))
    right, total = evaluate.evaluate_auxiliary(
        linear, cfl.make_mesh(1), ServedModels(models, index), hidden
    )
    assert (right, total) == ((hits & held).sum(), held.sum()) and total < hits.size


def idle(task, local, pick):
    """A clustered algorithm that only meets clients."""

    def visit(client, data, shared, mine):
        nothing = jnp.zeros(())
        return Upload(
            jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), shared[1]),
            nothing,
            nothing,
            nothing,
            jnp.int32(0),
            start_group=mine.group,
        )

    meet = Method(visit, assign=lambda r: (0 * r.cohort.ids, make_report()))
    return federated(task, local, pick, meet)


@pytest.mark.parametrize(("rule", "hidden"), [("rounds", 3), nightly("met", 2), nightly("none", 0)])
def test_discard_rule(toy, linear, local, rule, hidden):
    """13 clients by 5: rounds 0, 1 and 2 begin with somebody not met, rounds 0 and 1 end so. The
    model is that of the client without training samples as well.
    """
    result = cfl.run(
        idle(linear, local, select.rr_then_random(5)),
        linear,
        toy,
        KEY,
        rounds=5,
        discard=rule,
        mesh=local.execution.mesh,
    )
    assert [row["evaluated_clients"] for row in result.rows] == [6, 11, 14, 14, 14]
    assert [row["accuracy"] is None for row in result.rows] == [n < hidden for n in range(5)]


@pytest.mark.nightly
def test_a_group_that_does_not_exist_ends_the_run(toy, linear, local):
    def choose(r):
        return jnp.where(r.cohort.ids == 5, 3, 0), make_report()

    method = Method(sgd(linear, local), random_groups(linear, 3), assign=choose)
    algorithm = federated(linear, local, select.rr_then_random(5), method)
    with pytest.raises(RunError, match=r"round 1: client 5 is in group 3; the method has 3, .*"):
        cfl.run(algorithm, linear, toy, KEY, rounds=3, mesh=local.execution.mesh)


def test_a_round_in_which_nobody_is_online_discards_nothing():
    """After everybody was met, that is; 60 updates of 6 clients."""
    row = {"round": 12, "client_updates": 60}
    assert not discards_accuracy("rounds", row, 0, 6) and discards_accuracy("rounds", row, 0, 61)


def test_nobody_waits_for_clients_that_can_have_no_group():
    """Neither discard=met nor the time to a baseline's accuracy, also if they were scored while
    there was one group.
    """
    first = {"round": 1, "evaluated_clients": 6, "groupless_clients": 0, "macro_accuracy": 0.9}
    later = first | {"round": 2, "evaluated_clients": 4, "groupless_clients": 2}
    assert not discards_accuracy("met", later, 3, 6) and discards_accuracy("met", later, 3, 7)
    assert time_to_keep([first, later], 0.8) == 1


def test_single_models_are_never_discarded(toy, linear, local):
    algorithm = idle(linear, local, select.rr_then_random(5))._replace(clustered=False)
    result = cfl.run(algorithm, linear, toy, KEY, rounds=2, mesh=local.execution.mesh)
    assert all(row["accuracy"] is not None for row in result.rows)


# What a round reports


def test_a_group_of_one_has_no_discrepancy(toy, linear, local):
    """Exactly: rounding must not show up as a distance between a client's model and the
    group model that it alone made.
    """
    algorithm = ifca(linear, local, select.from_table(np.array([[1]])), m=2)
    _, info = jax.jit(algorithm.round)(KEY, jax.jit(algorithm.init)(KEY, toy), toy)
    assert info.clients == 1 and info.discrepancy == 0 and info.loss > 0
    np.testing.assert_allclose(info.dissimilarity, 0, atol=1e-6)


def test_info_by_numpy(toy, linear, local):
    """IFCA with two models: discrepancy, losses, dissimilarity and counts, client by client."""
    algorithm = ifca(linear, local, select.from_table(np.arange(14)[None]), m=2)
    before = jax.jit(algorithm.init)(KEY, toy)
    after, info = jax.jit(algorithm.round)(KEY, before, toy)
    cohort = Cohort(ids=jnp.arange(14), rank=jnp.arange(14))
    train = jax.jit(over_clients(sgd(linear, local), local.execution))
    upload = train(
        cohort, toy, (derive_key(KEY, TRAIN, 0), before.groups), full_work(after.assignment)
    )
    old, new, delta = matrix(before.groups), matrix(after.groups), matrix(upload.delta)
    gaps, turns, group = {0: [], 1: []}, [], after.assignment.tolist()
    for client in range(14):
        if toy.train.size[client] == 0:
            continue
        step = new[group[client]] - old[group[client]]
        gaps[group[client]].append(
            np.linalg.norm(old[group[client]] + delta[client] - new[group[client]])
        )
        turns.append(
            (1 - delta[client] @ step / np.linalg.norm(delta[client]) / np.linalg.norm(step)) / 2
        )
    assert all(gaps.values()), "both groups have members"
    close = {"rtol": 1e-4}
    np.testing.assert_allclose(info.discrepancy, np.mean(gaps[0] + gaps[1]), **close)
    np.testing.assert_allclose(
        info.group_discrepancy, [np.mean(gaps[0]), np.mean(gaps[1])], **close
    )
    np.testing.assert_allclose(info.dissimilarity, np.mean(turns), **close)
    np.testing.assert_allclose(info.loss, np.average(upload.loss, weights=upload.weight), **close)
    np.testing.assert_allclose(
        info.last_loss, np.average(upload.last_loss, weights=upload.weight), **close
    )
    assert info.clients == 13 and info.cold == 14
    assert count_to_int(info.steps) == 2 * np.ceil(np.array(toy.train.size) / 5).sum()
