"""Zeng, Hu, Liu, Yu, Wang, Xu, "Stochastic Clustered Federated Learning", 2023,
https://arxiv.org/abs/2303.00897 (StoCFL).

A client that takes part for the first time trains the first model, the anchor, and sends its
update. A client is a group of its own until the server unites groups whose mean updates have a
cosine of at least tau; they are never parted. In each round a client trains the model of its group,
which is pulled to a common model, and the common model as well.

Differs from the authors' code: a group is represented by all its clients, as in the paper, where
the code takes those of the round (`represent`); all clients of a round begin with the same common
model, which the code hands from client to client; where more than two groups unite at once, the
model is that of the one with most clients, where the code unites pair after pair; there is room
for m groups, of which the closest unite where more are needed.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import ClientInputs, own_local, sgd, train_both
from fedjax_cfl.clustering.assign import TrainFn, train_without_recording
from fedjax_cfl.clustering.distances import cosine
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.method import AggregateFn, AssignAndFoundFn, FinishFn, Method, Round
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import copy_model, no_clients, one_active_group
from fedjax_cfl.sharding import on_every_device, put_models
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import group_mean, one_hot, take_rows, where_rows, zero_rows
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Params, Report, State, Task, Upload
from fedjax_cfl.validation import Epochs, FromMinusOne, NonNegativeFloat, PositiveInt, checked, pick

ABSENT = 4.0  # added to the distance of a group that is not compared: more than any other


DIRECTIONS, KNOWN = "directions", "known"  # rows: first updates [K, ...], 0 where not known [K]


class Common(struct.PyTreeNode):
    """What the server remembers."""

    anchor: Params  # [1, ...], the model that first updates are of
    common: Params  # [1, ...], the model of all clients


@checked("algorithm")
def stocfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    tau: FromMinusOne | jax.Array = 0.3,
    mu: NonNegativeFloat | jax.Array = 0.05,
    epochs: Epochs = 20,
    represent: Literal["members", "cohort"] = "members",
    aggregate: MeanName | AggregateFn = "uniform",
) -> Algorithm:
    """StoCFL with room for m groups.

    Args: groups unite from a cosine of `tau` on (more than 1: never, -1: all); `mu` is the weight
    of the pull to the common model; `epochs` are those of the first update; a group is represented
    by the first updates of its members | of those in the cohort, and others do not unite;
    `aggregate` of models is uniform | samples.
    A client of a round gets two models down, and sends two; when it is new, one more each way. The
    server keeps an update of every client.
    """
    mean = pick(aggregate, **MEANS)
    aside = local.replace(epochs=epochs, steps=None, personal=None)
    pulled = sgd(task, local, proximal(mu, erm(task), center=lambda common: common))
    solve = train_with_common(pulled, sgd(task, own_local(local)))
    train = train_without_recording(sgd(task, aside), aside, system)
    method = Method(
        solve,
        start=one_active_group(task, m),
        memory=init_common,
        client_rows=init_directions,
        split_rows=(DIRECTIONS,),
        assign_and_found=unite_groups(train, local, tau, represent),
        prepare=send_common,
        aggregate=mean,
        finish=move_common(mean),
        start_clients=no_clients,
    )
    return federated(task, local, system, method)


def init_common(groups: Params, data: FederatedData) -> Common:
    """Returns the memory before round 0: common model and anchor are the groups' one model."""
    first = take_rows(groups, slice(1))
    return Common(first, first)


def init_directions(groups: Params, data: FederatedData) -> dict[str, Any]:
    """Returns the rows of clients of which none has sent a first update."""
    none = jnp.zeros(data.num_clients, bool)
    return {DIRECTIONS: zero_rows(none.size, take_rows(groups, 0)), KNOWN: none}


def unite_groups(train: TrainFn, local: Local, tau: ArrayLike, represent: str) -> AssignAndFoundFn:
    """Returns what takes in the new clients of a cohort, each a group of its own, and unites
    groups.

    Args: `train` makes first updates; the others are those of `stocfl`.
    """
    mesh = local.execution.mesh

    def assign_and_found(r: Round) -> tuple[State, jax.Array, Report]:
        state, data, cohort = r.state, r.data, r.cohort
        known, m = state.rows[KNOWN], state.active.size
        real = cohort.ids < data.num_clients
        new = real & (cohort.take(data.train.size) > 0) & ~cohort.take(known)
        newcomers = cohort.keep(new, data.num_clients)
        upload, report = train(r.key, state.memory.anchor, newcomers, data)
        old = jnp.where(known, state.assignment, -1)
        directions, count, compared = average_directions(state, old, m, cohort, represent)
        order = jnp.argsort(cohort.ids)  # so that no number depends on slots
        nodes = jax.tree.map(lambda a, b: jnp.concatenate([a, b[order]]), directions, upload.delta)
        compared = jnp.concatenate([compared, new[order]])
        apart = 1 - cosine(nodes, nodes)
        apart += ABSENT * ~(compared[:, None] & compared)
        united = on_every_device(partial(place_groups, m=m, limit=1 - tau), mesh)
        slot, founded = united(apart, count, new[order])

        fresh = jnp.zeros_like(order).at[order].set(slot[m:])
        moved = jnp.where(old >= 0, slot[jnp.maximum(old, 0)], -1)
        gid = jnp.where(new, fresh, jnp.maximum(cohort.take(moved), 0) * real)
        active = jnp.zeros(m, bool).at[slot].set(True, mode="drop").at[0].max(~(slot < m).any())
        common = copy_model(take_rows(state.memory.common, 0), m)
        rows = {
            DIRECTIONS: put_models(state.rows[DIRECTIONS], newcomers.ids, upload.delta, mesh),
            KNOWN: newcomers.put(known, True),
        }
        state = state.replace(
            groups=where_rows(founded, common, state.groups), active=active, assignment=moved
        ).put_rows(rows)
        sent = make_bill(units_down=new, units_up=new)
        return state, gid.astype(jnp.int32), report.replace(early=sent)

    return assign_and_found


def average_directions(
    state: State, group: jax.Array, m: int, cohort: Cohort, represent: str
) -> tuple[Params, jax.Array, jax.Array]:
    """Returns the mean first update [m, ...] of each group, how many clients [m] it has, and which
    groups [m] bool are compared.

    Args: `group` [K] int32 is the group of each client, -1: none; the others are those of
    `stocfl`, and the cohort.
    """
    met, first = state.rows[KNOWN].astype(jnp.float32), state.rows[DIRECTIONS]
    directions, count = group_mean(met, group, first, m)
    if represent == "members":
        return directions, count, count > 0
    here = cohort.put(jnp.zeros_like(met), met[jnp.minimum(cohort.ids, met.size - 1)])
    own, present = group_mean(here, group, first, m)
    return where_rows(present > 0, own, directions), count, present > 0


def place_groups(
    apart: jax.Array, count: jax.Array, new: jax.Array, m: int, limit: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Unites groups up to `limit` [] apart, and more if m are too few. Returns the slot [m + S]
    int32 of each of m groups and S clients after it, m where there is none, and which slots [m]
    bool begin with the common model.

    A united group is in the slot of the one that has most clients, the first of equals; one of
    new clients alone is in the next slot that is free then.

    Args: `apart` [m + S, m + S] are distances; `count` [m] are the clients of the groups, 0: not in
    use; `new` [S] bool are the clients that are there.
    """
    valid = jnp.concatenate([count > 0, new])
    label = agglomerate(apart, m, "single", valid, limit)
    member = one_hot(label[:m], m).T  # [component, group]
    largest = jnp.argmax(member * count, axis=1)
    keeps, used = member.any(1), jnp.arange(m) <= label.max()
    taken = jnp.zeros(m, bool).at[jnp.where(keeps, largest, m)].set(True, mode="drop")
    free = jnp.argsort(taken, stable=True)
    founds = used & ~keeps
    slot = jnp.where(keeps, largest, free[jnp.maximum(jnp.cumsum(founds) - 1, 0)])
    founded = jnp.zeros(m, bool).at[jnp.where(founds, slot, m)].set(True, mode="drop")
    return jnp.where(label >= 0, slot[jnp.maximum(label, 0)], m).astype(jnp.int32), founded


def send_common(r: Round) -> tuple[Work, Report]:
    """Gives each client the common model, and reports that it is sent both ways (a `PrepareFn`).
    That it is trained, the steps of the update say.
    """
    common = copy_model(take_rows(r.state.memory.common, 0), r.cohort.ids.size)
    sent = make_bill(units_down=r.real, units_up=r.real)
    return r.work._replace(client_extra=common), make_report(sent)


def train_with_common(solve: ClientFn, plain: ClientFn) -> ClientFn:
    """Trains one client's group model by `solve` and the common model by `plain`, whose update is
    `Upload.extra`.
    """

    def begin(c: ClientInputs) -> tuple[Params, Work]:
        return c.work.client_extra, c.work._replace(client_extra=())

    def send(c: ClientInputs, upload: Upload, common: Upload) -> Upload:
        return upload.replace(extra=common.delta)

    return train_both(solve, plain, begin, send)


def move_common(aggregate: AggregateFn) -> FinishFn:
    """Moves the common model by the mean of the cohort's updates of it."""

    def finish(r: Round) -> State:
        memory, one_group = r.state.memory, jnp.zeros_like(r.group)
        work, upload = r.work._replace(group=one_group), r.upload.replace(delta=r.upload.extra)
        step, _ = aggregate(r._replace(state=r.before, work=work, upload=upload))
        common = jax.tree.map(lambda old, all: old + all[:1], memory.common, step)
        return r.state.replace(memory=memory.replace(common=common))

    return finish
