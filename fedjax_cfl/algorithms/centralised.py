"""Training in one place: one model on the training samples of all clients, without federation. It
has no paper; tables call it centralised, or pooled.

It bounds one model for all from above, and not groups that contradict each other. A round draws
from all samples without repeats, for as long as a cohort's clients would train together. So a run
sees as many samples as FedAvg's with the same settings: rounds x E x (cohort / K) passes.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import put_first
from fedjax_cfl.method import Method, PrepareFn, Round
from fedjax_cfl.round.engine import federated
from fedjax_cfl.system.reports import add_to_ledger, make_bill, make_report, no_bill
from fedjax_cfl.system.select import drawn_ahead
from fedjax_cfl.system.system import System, SystemLike, as_system
from fedjax_cfl.types import (
    Algorithm,
    Bill,
    ClientIndex,
    FederatedData,
    Info,
    Key,
    Report,
    Selection,
    State,
    Task,
)


def centralised(task: Task, local: Local, system: SystemLike) -> Algorithm:
    """SGD on the training samples of all clients.

    In a round it takes cohort / K of the steps of E passes over all samples, in a new order, with
    a new velocity; with `local.steps`, as many as the cohort's clients together. Of the selection
    only the size of the cohort counts. Reports call the one place a client. Every sample is sent
    once: a 4-byte word for each of its F features and one for its label; a client whose data have
    changed sends all of its samples again.
    Raises InputError for what only clients can have: models of their own, faults, a clock, models
    that they have received.
    """
    system = as_system(system)
    refuse_clients(local, system)
    method = Method(sgd(task, local), prepare=train_as_long_as(system.select, local))
    one_place = drawn_ahead(lambda key, round, size: jnp.zeros(1, jnp.int32))
    algorithm = federated(task, local, system._replace(select=one_place), method)

    def init(key: Key, data: FederatedData) -> State:
        state = algorithm.init(key, data)
        return state.replace(traffic=add_to_ledger(state.traffic, send_samples(data, True)))

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        after, info = algorithm.round(key, state, pool_samples(data))
        sent = send_samples(data, data.shifted) if data.has_drift else no_bill()
        return after.replace(traffic=add_to_ledger(state.traffic, sent)), info

    return algorithm._replace(init=init, round=round)


def refuse_clients(local: Local, system: System) -> None:
    """Raises InputError for settings of clients that train: here none do."""
    kinds = ("dropout", "straggler", "nan", "byzantine")
    failing = [name for name in kinds if getattr(system.faults, name)]
    wrong = {
        "personal=none": bool(local.layers),
        "clock=none": system.clock is not None,
        **{f"faults.{name}=0": True for name in failing},
    }
    for setting in (setting for setting, given in wrong.items() if given):
        raise InputError(
            f"algorithm=centralised: no clients train, all samples are in one place; use {setting}"
        )


def send_samples(data: FederatedData, who: ArrayLike) -> Bill:
    """Returns what the clients `who` [K] bool send up: F + 1 words for each training sample."""
    words = math.prod(data.x.shape[1:]) + 1
    return make_bill(words_up=jnp.where(who, data.train.size * words, 0))


def pool_samples(data: FederatedData) -> FederatedData:
    """Returns data in which every client has the training samples that any client has now."""
    train, total = data.train, data.train.order.size
    edges = jnp.zeros(total + 1, jnp.int32).at[train.start].add(jnp.minimum(train.size, 1))
    edges = edges.at[train.start + train.size].add(-jnp.minimum(train.size, 1))
    order = train.order[put_first(jnp.cumsum(edges)[:-1] > 0)]
    all_samples = jnp.full_like(train.size, train.size.sum())
    pooled = ClientIndex(order, jnp.zeros_like(train.start), all_samples)
    return data.replace(train=pooled, max_client_samples=total)


def train_as_long_as(select: Selection, local: Local) -> PrepareFn:
    """Takes the share of the steps of E passes that makes it as many samples as a cohort sees."""

    def prepare(r: Round) -> tuple[Work, Report]:
        data = r.data
        drawn = jax.eval_shape(lambda: select.select(r.key, select.init(data), r.state, data))
        share = drawn.size if local.steps is not None else drawn.size / data.num_clients
        return r.work._replace(step_fraction=share * r.work.step_fraction), make_report()

    return prepare
