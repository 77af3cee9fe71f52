"""Clients that train on from their group's model, and clients held out of the run."""

from functools import partial

import jax
import numpy as np
import pyarrow.parquet
import pytest
from conftest import build, call, matrix, nightly

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.method import Method
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import copy_model, random_groups
from fedjax_cfl.runs.results import read_summary
from fedjax_cfl.simulation.evaluate import evaluate_clients
from fedjax_cfl.simulation.personalize import (
    assign_newcomers,
    check_rule,
    extend_state,
    finetune_clients,
    hold_out_clients,
    split_clients,
)
from fedjax_cfl.types import Selection, ServedModels

LINE = (
    "dataset.clients=20 clients_per_round=6 rounds=8 model=mclr partition=iid discard=none"
    " local.epochs=3"
)
GROUPS = "dataset.groups=2 concept=permute_labels concept.groups=2"


@pytest.mark.nightly
def test_a_client_trains_on_from_its_own_model(toy, linear, local, models):
    """As by hand: the same cohort function on one client at a time."""
    index = np.arange(toy.num_clients) % 4 - 1  # every fourth client has no model
    served = ServedModels(models, jax.numpy.asarray(index))
    key = jax.random.key(3)
    found = finetune_clients(linear, local, 4, served, toy, key, at_once=5)
    again = finetune_clients(linear, local, 4, served, toy, key, at_once=14)
    np.testing.assert_allclose(found.accuracy, again.accuracy, equal_nan=True)
    plain = evaluate_clients(linear, local.execution.mesh, served, toy)[0]
    np.testing.assert_array_equal(found.samples, plain.samples)
    assert np.isnan(found.accuracy[(index < 0)]).all()
    tested = np.asarray(plain.samples) > 0
    assert found.loss[tested].mean() < 0.7 * float(np.asarray(plain.loss)[tested].mean())
    untrained = np.asarray(toy.train.size) == 0
    both = tested & untrained
    np.testing.assert_allclose(found.loss[both], np.asarray(plain.loss)[both], rtol=1e-6)
    still = finetune_clients(linear, local, 4, served, toy, key, at_once=14, lr_scale=0.0)
    np.testing.assert_allclose(still.loss, np.asarray(plain.loss), rtol=1e-6)


def test_rows_of_clients_are_filled_up():
    np.testing.assert_array_equal(split_clients(np.arange(3), 2, 9), [[0, 1], [2, 9]])


@pytest.mark.nightly
def test_some_clients_are_as_they_were(toy):
    clients = np.array([5, 0, 11])
    data = take_clients(toy, clients)
    assert data.num_clients == 3 and data.concept.tolist() == [1, 0, 1]
    for new, old in enumerate(clients.tolist()):
        for side in ("train", "test"):
            ours, theirs = (
                np.asarray(own.order)[int(own.start[k]) : int(own.start[k] + own.size[k])]
                for own, k in ((getattr(data, side), new), (getattr(toy, side), old))
            )
            x, y = cfl.data.federated.gather(data, ours)
            expected = cfl.data.federated.gather(toy, theirs)
            np.testing.assert_array_equal(x, expected[0])
            np.testing.assert_array_equal(y, expected[1])
            assert set(np.asarray(data.owner)[ours].tolist()) <= {new}


def test_new_clients_have_not_been_met(toy, linear, local, models):
    method = build(cfl.algorithms.ifca, linear, local, cfl.select.uniform(3), m=3)
    few = take_clients(toy, np.arange(10))
    trained, fresh = (jax.eval_shape(method.init, jax.random.key(0), data) for data in (few, toy))
    trained, fresh = (
        jax.tree.map(lambda leaf, value=value: np.full(leaf.shape, value, leaf.dtype), state)
        for state, value in ((trained, 1), (fresh, 2))
    )
    state = extend_state(trained, jax.tree.map(jax.numpy.asarray, fresh), 10)
    assert state.assignment.tolist() == [1] * 10 + [-1] * 4
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(state.groups))
    assert state.round == 1


def test_only_clients_that_can_be_scored_are_held_out(toy):
    kept, held, _ = hold_out_clients(toy, 0.4, 0)
    assert len(held) == 6 and sorted([*kept, *held]) == list(range(14))
    assert (np.asarray(toy.train.size)[held] > 0).all() and (
        np.asarray(toy.test.size)[held] > 0
    ).all()
    with pytest.raises(InputError, match=r"evaluate.new_clients=0.99: 14 of 14 clients cannot"):
        hold_out_clients(toy, 0.99, 0)
    with pytest.raises(InputError, match=r"evaluate.validation_clients=0.01: 0 of 14 clients"):
        hold_out_clients(toy, 0.4, 0, 0.01)
    with pytest.raises(InputError, match=r"evaluate.new_clients=0.4: 6 of 14 clients cannot"):
        hold_out_clients(toy, 0.4, 0, 0.5)
    kept, held, apart = hold_out_clients(toy, 0.2, 0, 0.3)
    assert (len(held), len(apart)) == (3, 4)
    assert sorted([*kept, *held, *apart]) == list(range(14))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    [
        "ifca algorithm.m=2 evaluate.finetune=2",
        pytest.param("fedavg", marks=pytest.mark.slow),
    ],
)
def test_new_clients_join_by_the_rule_of_the_method(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"{LINE} {GROUPS} evaluate.new_clients=0.3 algorithm={method} run_dir=run"
    assert call(monkeypatch, line, devices=1) == 0
    table = cfl.load_run("run").table
    new = pyarrow.parquet.read_table("run/new_clients.parquet").to_pydict()
    summary = read_summary("run")
    assert len(table["client"]) == 14 and len(new["client"]) == 6
    assert summary["new_clients"] == summary["new_clients_assigned"] == 6
    accuracy, weight = (np.array(new[name]) for name in ("accuracy", "test_samples"))
    assert summary["new_clients_accuracy"] == pytest.approx(np.average(accuracy, weights=weight))
    if method == "fedavg":
        assert set(new["group"]) == {0} and "finetuned_accuracy" not in table
        return
    assert 0 <= summary["finetuned_accuracy"] <= 1
    assert table["finetuned_accuracy"].shape == (14,) and len(new["finetuned_accuracy"]) == 6
    # lowest loss finds the group whose labels are theirs
    pairs = set(zip(new["group"], new["concept"], strict=True))
    old = set(zip(table["group"].tolist(), table["concept"].tolist(), strict=True))
    assert pairs <= old and len(old) == 2


def warm_start(task, local, system):
    """Clusters every client at the start; later ones join by the loss of the models."""

    def start(key, data):
        return random_groups(task, 2)(key, data)._replace(
            assignment=jax.numpy.zeros(data.num_clients, int)
        )

    return cfl.clustered(task, local, system, m=2, start=start, once=True)


def test_a_method_needs_a_rule_for_new_clients(toy, linear, local):
    """A model for each client, and groups that everybody has from the start, are none, unless
    others join by a look at their data.
    """
    key, made = jax.random.key(0), {"warm_start": partial(warm_start, linear, local)}
    for name, settings, rule in (
        ("fedavg", {}, True),
        ("ifca", {"m": 2}, True),
        ("ifca", {"m": 2, "start": "kmeanspp_loss"}, True),
        ("warm_start", {}, True),
        ("fl_hc", {"m": 2, "warm_up": 1}, True),
        ("fl_hc", {"m": 2, "warm_up": 1, "newcomers": "nearest"}, True),
        ("nonfed", {}, False),
        ("auxo", {"m": 2}, False),
    ):
        method = getattr(cfl.algorithms, name, None)
        make = made.get(name) or partial(build, method, linear, local, **settings)
        if rule:
            check_rule(make, toy, key, 3)
        else:
            why = "; use 0" if name == "nonfed" else ": every client of the run gets its group"
            with pytest.raises(InputError, match=f"no rule for new clients{why}"):
                check_rule(make, toy, key, 3)


def personal(task, local, select):
    """FedAvg, and of each client its own model after its last training, which it is served; its
    selection remembers who answered.
    """

    def update(memory, state, cohort, upload, seconds):
        return select.update(memory[0], state, cohort, upload, seconds), cohort.put(memory[1], 1)

    def pick(key, memory, state, data):
        return select.select(key, memory[0], state, data)

    wrapped = Selection(lambda data: (select.init(data), 0 * data.train.size), pick, update)

    def start(key, data):
        initial = random_groups(task, 1)(key, data)
        return initial._replace(rows={"last": copy_model(task.init(key), data.num_clients)})

    def finish(r):
        trained = jax.tree.map(lambda old, new: old[0] + new, r.before.groups, r.upload.delta)
        return r.state.put_rows({"last": jax.tree.map(r.cohort.put, r.state.rows["last"], trained)})

    def serve(state):
        return ServedModels(state.rows["last"], jax.numpy.arange(state.assignment.size))

    method = Method(sgd(task, local), start, finish=finish)
    return federated(task, local, wrapped, method)._replace(serve=serve)


@pytest.mark.nightly
def test_new_clients_keep_what_is_their_own(toy, linear, local):
    """Their models are those that they trained in the round in which they were met, from the model
    as the run left it; nothing of the run's own clients changes. The selection may be wrapped.
    """
    make, key, mesh = partial(personal, linear, local), jax.random.key(0), local.execution.mesh
    few = take_clients(toy, np.arange(10))
    run = make(cfl.select.uniform(5))
    state = jax.jit(run.round)(key, jax.jit(run.init)(key, few), few)[0]
    check_rule(make, few, key, 3)
    new = assign_newcomers(make, linear, mesh, state, toy, key, at_once=3)
    step = jax.jit(over_clients(sgd(linear, local), local.execution))
    fresh = state.replace(round=state.round)
    for client in range(10, 14):
        cohort = make_cohort(jax.numpy.array([client]), toy, local.execution)
        work = full_work(jax.numpy.zeros_like(cohort.ids))
        given = derive_key(key, TRAIN, fresh.round), fresh.groups
        delta = step(cohort, toy, given, work).delta
        for own, group, change in zip(
            *map(jax.tree.leaves, (new.served.models, fresh.groups, delta)), strict=True
        ):
            np.testing.assert_allclose(own[client], group[0] + change[0], rtol=1e-5, atol=1e-6)
    for own, old in zip(
        *map(jax.tree.leaves, (new.served.models, state.rows["last"])), strict=True
    ):
        np.testing.assert_array_equal(own[:10], old)
    assert new.groups.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    "layer", [cfl.personal.ditto(), nightly(cfl.personal.apfl()), cfl.personal.fedper()]
)
def test_what_new_clients_keep_starts_from_the_model_of_their_group(toy, mlp, local, layer):
    """They train with next to no step, so that they are served what they begin with. In the round
    that names their groups they begin with a trained model, too, and not with a drawn one.
    """
    begun = []

    def make(select, lr=1e-9):
        one = local.replace(personal=layer, lr=lr)
        method = build(cfl.algorithms.ifca, mlp, one, select, m=2)

        def watched(key, state, data):
            jax.debug.callback(begun.append, state.rows[layer.name].values)
            return method.round(key, state, data)

        return method._replace(round=watched)

    few, key = take_clients(toy, np.arange(10)), jax.random.key(0)
    run = make(cfl.select.uniform(6), lr=0.2)
    state, one_round = jax.jit(run.init)(key, few), jax.jit(run.round)
    for _ in range(3):
        state = one_round(key, state, few)[0]
    begun.clear()
    other = jax.random.key(1)  # what a run's start would draw now
    new = assign_newcomers(make, mlp, local.execution.mesh, state, toy, other, at_once=3)
    at = np.asarray(new.served.model_index)[10:]
    trains = np.asarray(toy.train.size)[10:] > 0
    assert trains.sum() >= 3 and (new.groups[trains] >= 0).all()
    served, groups = matrix(new.served.models), matrix(state.groups)
    np.testing.assert_allclose(served[at[trains]], groups[new.groups[trains]], atol=1e-6)
    jax.effects_barrier()
    first = matrix(make(cfl.select.uniform(6)).first_rows(state)[layer.name])
    assert len(begun) >= 2
    for rows in begun:
        gaps = np.abs(matrix(rows)[10:, None] - first)
        assert (gaps.max(axis=-1).min(axis=1) == 0).all()
