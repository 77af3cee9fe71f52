"""Counts what clients compute, receive and send while a compiled round runs, and what is billed to
them for it (`test_bills.py`).

A watched task tells the host of each batch: the model, the samples that are no padding, whether
the model is differentiated, and whose program it is part of. A model that a client's program begins
with, it has received.
"""

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.client import cohort as cohorts
from fedjax_cfl.client.executor import Cases, Loop, Program, as_program
from fedjax_cfl.round import engine
from fedjax_cfl.system.system import System
from fedjax_cfl.types import Bill

ENTERING = ("flux", "md_icfl.md_icfl", "tkm")  # methods that enter bills into the ledger themselves


class Work(NamedTuple):
    """One call of a task on a batch, with one model."""

    trains: bool  # the model is differentiated
    model: bytes
    samples: int  # that are no padding
    client: int  # whose program it is part of, -1: nobody's
    first: bool  # in the first step of that program
    before: bool  # the selection
    program: int  # the number of the call of `over_clients`
    batch: tuple  # the step of the program, and its samples


class Watch:
    """What tasks are called for, and what is billed meanwhile, filled while a program runs."""

    def __init__(self):
        self.work: list[Work] = []
        self.delivered: list[Any] = []
        self.started: list[Any] = []
        self.entered: list[Any] = []
        self.place = [(-1, -1, 0)]  # (client, step, number of the program), while traced
        self.clients: list[jax.Array] = []  # [S], of the cohort that is traced
        self.programs = 0
        self.before = self.on_server = False

    @contextlib.contextmanager
    def at(self, client: Any, step: Any, program: int) -> Iterator[None]:
        """Says whose step is traced."""
        self.place.append((-1 if self.on_server else client, step, program))
        try:
            yield
        finally:
            self.place.pop()

    def note(self, trains, before, model, x, owner, client, step, program):
        self.work.append(
            Work(
                trains,
                model.tobytes(),
                int((owner >= 0).sum()),
                int(client),
                int(step) == 0,
                before,
                int(program),
                (int(step), x.tobytes()),
            )
        )


def flatten(model: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(model)])


def watch_task(task: cfl.Task, watch: Watch) -> cfl.Task:
    """Returns the task whose losses and predictions tell the watch of each batch."""

    def tell(model, x, owner):
        before = watch.before
        place = [jnp.float32(number) for number in watch.place[-1]]

        # told apart by the rule that is used
        @jax.custom_jvp
        def told(model, *rest):
            jax.debug.callback(partial(watch.note, False, before), model, *rest)
            return jnp.sum(model)

        @told.defjvp
        def _(primals, tangents):
            jax.debug.callback(partial(watch.note, True, before), *primals)
            return jnp.sum(primals[0]), jnp.sum(tangents[0])

        owner = jnp.zeros(len(x)) if owner is None else owner.astype(jnp.float32)
        told(flatten(model), x.reshape(len(x), -1).astype(jnp.float32), owner, *place)

    def loss(each):
        def call(model, x, y, key=None, owner=None):
            tell(model, x, owner)
            return each(model, x, y, key, owner)

        return call

    def predict(model, x, owner=None):
        tell(model, x, owner)
        return task.predict(model, x, owner)

    sample_loss = task.sample_loss and loss(task.sample_loss)
    return task._replace(
        loss=loss(task.loss), predict=predict, sample_loss=sample_loss, first_layer=None
    )


def watch_programs(watch: Watch, patch: pytest.MonkeyPatch, server_tests: bool = False) -> None:
    """Makes the watch know whose program is traced, and in which part of a round. `server_tests`:
    what is computed once updates have arrived, the server does.
    """
    over_devices, run_clients = cohorts.over_devices, cohorts.run_clients

    def over(block, mesh):
        def named(shared, client_inputs):
            watch.clients.append(client_inputs[0])
            try:
                return block(shared, client_inputs)
            finally:
                watch.clients.pop()

        return over_devices(named, mesh)

    def run(solve, real, execution):
        ids, number = watch.clients[-1], watch.programs
        watch.programs += 1

        def at(slot, step):
            return watch.at(ids[slot], step, number)

        def follow(slot: jax.Array, loop: Loop) -> Loop:
            def step(i, carry):
                with at(slot, i):
                    return loop.step(i, carry)

            def end(carry):
                with at(slot, -1):
                    return loop.end(carry)

            return loop._replace(step=step, end=end)

        def choose(slot, case):
            with at(slot, 0):
                return follow(slot, case())

        def watched(slot: jax.Array) -> Program:
            with at(slot, 0):
                program = as_program(solve(slot))
            if isinstance(program, Cases):
                cases = [partial(choose, slot, case) for case in program.cases]
                return program._replace(cases=cases)
            return follow(slot, program)

        return run_clients(watched, real, execution)

    def flag(name, step):
        def flagged(*given):
            setattr(watch, name, True)
            try:
                return step(*given)
            finally:
                setattr(watch, name, False)

        return flagged

    patch.setattr(cohorts, "over_devices", over)
    patch.setattr(cohorts, "run_clients", run)
    patch.setattr(engine, "migrate", flag("before", engine.migrate))
    if server_tests:
        for step in ("regroup", "update_groups"):
            patch.setattr(engine, step, flag("on_server", getattr(engine, step)))


def watch_bills(watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """Makes the watch get all bills, and the updates that go with them."""
    deliver, add = System.deliver, engine.reports.add_to_ledger

    def delivered(self, data, cohort, upload, *rest):
        after = deliver(self, data, cohort, upload, *rest)
        log = after[1]
        bills = log.migration, log.poll, (*log.planned, log.training)
        jax.debug.callback(lambda *given: watch.delivered.append(given), cohort.ids, upload, *bills)
        return after

    def started(traffic, *bills):
        jax.debug.callback(lambda *given: watch.started.append(given), *bills)
        return add(traffic, *bills)

    def entered(traffic, *bills):
        jax.debug.callback(lambda *given: watch.entered.extend(given), *bills)
        return add(traffic, *bills)

    patch.setattr(System, "deliver", delivered)
    patch.setattr(engine.reports, "add_to_ledger", started)
    for name in ENTERING:
        module = importlib.import_module(f"fedjax_cfl.algorithms.{name}")
        patch.setattr(module, "add_to_ledger", entered)


class Counts(NamedTuple):
    """What clients did and what was billed to them, in one round, [K] each."""

    inferred: np.ndarray  # samples x models
    trained: np.ndarray
    before: np.ndarray  # models received before the selection
    after: np.ndarray  # and after it
    bill: Bill
    steps: np.ndarray
    selected: np.ndarray  # bool
    uploads: np.ndarray  # models in its update
    extra: np.ndarray  # words sent beside it
    state: Any  # at the beginning of the round
    data: Any


def count_work(work: list[Work], clients: int, unused: Any = frozenset()) -> tuple:
    """Returns (inferred, trained, models received before the selection, and after it), [K] each.

    A model that a program tests twice on the same batch is tested once, so that copies in places
    of groups that are not in use do not count, and neither do other models there, `unused`, that
    are tested beside those in use.
    """
    work = [each for each in work if each.samples and 0 <= each.client < clients]
    done, received, tested = np.zeros((2, clients), int), set(), defaultdict(set)
    for each in work:
        if each.trains:
            done[1, each.client] += each.samples
        else:
            where = each.client, each.program, each.batch, each.samples
            tested[where].add(each.model)
    idle = set()
    for (client, program, batch, samples), models in tested.items():
        used = models - unused or models
        idle |= {(client, program, batch, model) for model in models - used}
        done[0, client] += samples * len(used)
    for each in work:
        what = each.client, each.program, each.batch, each.model
        if each.first and (each.trains or what not in idle):
            received.add((each.before, each.client, each.model))
    models = np.zeros((2, clients), int)
    for before, client, _ in received:
        models[int(not before), client] += 1
    return (*done, *models)


def rows_of(models: Any) -> np.ndarray:
    """Returns models [n, ...] as rows [n, P]."""
    return np.asarray(jax.vmap(flatten)(models), np.float32)


def find_unused(state: Any) -> set[bytes]:
    """Returns the models of the groups that are not in use, unless they are in use elsewhere."""
    active, rows = np.asarray(state.active), rows_of(state.groups)
    used, others = ({row.tobytes() for row in rows[which]} for which in (active, ~active))
    return others - used


def count_round(watch: Watch, state: Any, data: Any) -> Counts:
    """Returns what the watch has seen of a round that began with `state`."""
    ((ids, upload, migration, poll, planned),) = watch.delivered
    ids, clients = np.asarray(ids), data.num_clients

    def by_client(rows, at=ids):
        total = np.zeros(clients + 1)
        np.add.at(total, at, np.asarray(rows))
        return total[:clients]

    everybody = partial(by_client, at=np.arange(clients))
    bills = [(everybody, each) for each in (migration.bill, migration.early, poll)]
    bills += [(by_client, bill) for report in planned for bill in (report.bill, report.early)]
    bills += [(everybody, bill) for bill in watch.entered]
    given = [jax.tree.map(place, bill) for place, bill in bills if bill.samples.size]
    leaf = jax.tree.leaves(state.groups)[0]
    models = jax.tree.leaves(upload.delta)[0][0].size // leaf[0].size
    words = sum(leaf[0].size for leaf in jax.tree.leaves(upload.extra))
    selected = np.isin(np.arange(clients), ids)
    return Counts(
        *count_work(watch.work, clients, find_unused(state)),
        jax.tree.map(lambda *each: sum(each), *given),
        by_client(upload.steps),
        selected,
        models * selected,
        words * selected,
        state,
        data,
    )
