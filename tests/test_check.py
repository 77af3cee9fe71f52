"""What `check_algorithm` says of methods of one's own: toy methods that are wrong on purpose."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.start import random_groups
from fedjax_cfl.simulation.check import (
    check_newcomers,
    find_broken_rules,
    in_any_order,
    take_few,
    try_rounds,
)
from fedjax_cfl.system.reports import make_bill, make_report


def method(task, local, system, *, memory=(), m=2, serve=None, **parts):
    """IFCA without losses: client k is in group k % m, and the server remembers `memory`."""

    def start(key, data):
        return random_groups(task, m)(key, data)._replace(memory=memory)

    def assign(r):
        return r.cohort.ids % m, make_report()

    given = {"start": start, "assign": assign} | parts
    algorithm = cfl.federated(task, local, system, Method(sgd(task, local), **given))
    return algorithm._replace(serve=serve) if serve else algorithm


def broken_rules(task, data, **wrong):
    """Returns the names of the rules that a method breaks, and the whole text."""
    with pytest.raises(InputError) as caught:
        cfl.check_algorithm(functools.partial(method, **wrong), task, data)
    text = str(caught.value)
    return re.findall(r"^- ([a-z ]+):", text, re.MULTILINE), text


def test_all_broken_rules_are_listed_each_with_a_remedy(linear, toy):
    """Of one method that trains, but names groups that do not exist, sends less than nothing, is
    not finite, serves nobody, gives everyone a group and listens to its first slot alone.
    """

    def assign(r):
        sent = make_bill(words_up=jnp.full(r.cohort.ids.shape, -1))
        return jnp.where(r.cohort.ids == 3, 2, 0), make_report(sent)

    def aggregate(r):
        first = jnp.argmin(r.cohort.rank)
        step = jax.tree.map(lambda leaf: jnp.stack([leaf[first], leaf[0] / 0.0]), r.upload.delta)
        return step, jnp.ones(2)

    def finish(r):
        everyone = jnp.maximum(r.state.assignment, 0)
        return r.state.replace(assignment=everyone)

    def serve(state):
        return cfl.ServedModels(state.groups, jnp.full(state.assignment.size, 2))

    wrong = {"assign": assign, "aggregate": aggregate, "finish": finish, "serve": serve}
    names, text = broken_rules(linear, toy, **wrong)
    assert names == ["groups", "finite", "traffic", "served", "no samples", "order"]
    assert text.startswith("the method breaks 6 rules of a round:\n- groups: after ")
    for said in (
        "client 3 is in group 2 of 0 to 1; let assign, regroup and what changes state.assignment",
        "state.groups['head']['bias'], state.groups['head']['kernel'] is not; a group without",
        "words up; report finite whole numbers from 0 on (make_bill)",
        "model_index has 2 to 2 of 2 models; give ServedModels",
        "leave -1 in state.assignment where data.train.size is 0",
        "gives another state.groups",
    ):
        assert said in text, text


def test_a_state_that_changes_its_shape(linear, toy):
    def finish(r):
        memory = {"seen": r.upload.loss, "sum": r.state.memory["sum"] / 2}
        return r.state.replace(memory=memory)

    memory = {"seen": jnp.zeros(0), "sum": jnp.zeros(2, int)}
    names, text = broken_rules(linear, toy, memory=memory, finish=finish)
    assert names == ["shapes"]
    assert "state.memory['seen']: float32[0] became float32[6]," in text
    assert " state.memory['sum']: int32[2] became float32[2]); return every array" in text


@pytest.mark.nightly
def test_a_number_without_a_type_compiles_twice(linear, toy):
    def finish(r):
        return r.state.replace(memory=jnp.float32(1.0) + r.state.memory)

    names, text = broken_rules(linear, toy, memory=0.0, finish=finish)
    assert names == ["compiled once"]
    assert "(state.memory comes from a Python number in one of them); give every array" in text


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (lambda upload: 1.0 if upload.loss[0] > 0 else 0.0, "TracerBoolConversionError"),
        (lambda upload: upload.loss @ jnp.zeros(3), "TypeError: dot_general"),
    ],
)
def test_what_cannot_be_traced(linear, toy, hook, said):
    def aggregate(r):
        step, mass = weighted_mean(r)
        return step, mass * hook(r.upload)

    names, text = broken_rules(linear, toy, aggregate=aggregate)
    assert names == ["traced"]
    assert (
        said in text
        and "round cannot be traced" in text
        and "use jnp.where or jax.lax.cond" in text
    )


def test_rules_that_a_composed_method_cannot_break(linear, toy, local):
    """Of methods that write `Algorithm` themselves: models of another form, who took part and has
    no group, a count that stands still, what a Python variable remembers.
    """
    few, algorithm = take_few(toy), method(linear, local, in_any_order(cfl.select.uniform(6)))
    trial = try_rounds(algorithm, linear, few)
    assert list(find_broken_rules(trial)) == []

    def rules(**changed):
        return [line.partition(":")[0] for line in find_broken_rules(trial._replace(**changed))]

    one = jax.tree.map(lambda leaf: leaf[0], trial.states[0].groups)
    for served, said in (
        (cfl.ServedModels(one, jnp.zeros(12, int)), "not stacked models of the task"),
        (cfl.ServedModels(trial.states[0].groups, jnp.zeros(3, int)), "for each of 12 clients"),
        (cfl.ServedModels(trial.states[0].groups, jnp.zeros(12)), "for each of 12 clients"),
        (trial.algorithm.serve(trial.states[0])._replace(weights=jnp.ones((12, 2))), "shares"),
    ):
        other = algorithm._replace(serve=lambda state, served=served: served)
        lines = find_broken_rules(trial._replace(algorithm=other))
        assert any(said in line for line in lines)
    nobody = [state.replace(assignment=jnp.full(12, -1)) for state in trial.states]
    assert rules(states=nobody, turned=nobody[2], resumed=nobody[2]) == ["selected"]
    still = [state.replace(round=jnp.zeros((), int)) for state in trial.states]
    assert rules(states=still)[0] == "rounds"
    assert rules(traces=[0, 1]) == ["compiled once"]
    assert rules(resumed=trial.states[3]) == ["resume"]
    idle = [info.replace(clients=jnp.zeros((), int)) for info in trial.infos]
    assert rules(infos=idle) == ["updates"]
    lost = [i.replace(fault_counts=i.fault_counts.replace(nonfinite=2)) for i in trial.infos]
    assert rules(infos=lost) == ["updates"]


def test_new_clients_need_rows_of_their_own(linear, toy, local):
    def make(select, width, field):
        def start(key, data):
            kept = jnp.zeros(width * data.num_clients)
            kept = {"losses": kept} if field == "rows" else kept
            return random_groups(linear, 2)(key, data)._replace(**{field: kept})

        return method(linear, local, select, start=start)

    def check(width, field):
        return list(check_newcomers(functools.partial(make, width=width, field=field), few))

    few, remedy = take_few(toy), "; keep what there is of each client in Method.client_rows,"
    new = "newcomers: with one client more "
    assert not check(1, "rows")
    (line,) = check(1, "memory")
    assert line.startswith(f"{new}state.memory: float32[11] became float32[12]" + remedy)
    (line,) = check(2, "rows")
    assert line.startswith(f"{new}state.rows['losses']: [24] of 12 clients" + remedy)


def test_a_trial_has_a_client_without_samples(toy):
    few = take_few(toy)
    assert few.num_clients == 12 and few.train.size[-1] == 0 and (few.train.size[:-1] > 0).all()
    held = np.asarray(few.owner)[np.asarray(few.train.order)]
    assert (np.bincount(held, minlength=12) == few.train.size).all()
    assert np.sum(few.owner == 11) == few.test.size[11] > 0


@pytest.mark.nightly
def test_a_method_is_tried_with_training_of_ones_own(linear, toy, local):
    """A method for momentum is not tried without it."""
    seen = []

    def watched(task, local, system):
        seen.append(local.momentum)
        return method(task, local, system)

    cfl.check_algorithm(watched, linear, toy, local.replace(momentum=0.5))
    assert set(seen) == {0.5}
