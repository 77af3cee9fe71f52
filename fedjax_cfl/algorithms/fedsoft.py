"""Ruan, Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI
2022, https://arxiv.org/abs/2112.06053.

Each client's data come from m sources, in shares of its own. Every few rounds all clients estimate
their shares: a sample belongs to the model of its least loss. Each client has one model of its own,
which it trains on, pulled to all m models by its shares; each of these is the mean of the clients'
models, weighted by how many samples of its source they have.

Differs from the paper: the run's selection draws the cohort, and means are weighted by samples of
the source (the paper also draws clients for each source with these weights, and averages plainly);
clients' models begin as the first of the m models; clients that come later estimate their shares at
once, and begin with the mean of the models by these; all clients train by SGD without moments. The
reported loss has the pull to the mean of the models by the client's shares, which differs from that
to all of them by a constant. The group of a client, in reports, is that of its largest share.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import ClientFn, map_clients, pass_over_samples
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import ClientInputs, change_training, sgd
from fedjax_cfl.method import Method, MigrateFn, PrepareFn, Round
from fedjax_cfl.round.client_rows import refuse_layers
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import keep_groups, random_groups
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import group_sum, one_hot, take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Params, Report, State, Task, Upload
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked

NAME = "FedSoft"  # of the rows that clients keep
SHARES = "shares"  # of those that the server has


class Shares(struct.PyTreeNode):
    """What the server knows of every client, the row `SHARES`."""

    shares: jax.Array  # [K, m] float32 u, the last estimate, with sigma in the place of 0
    known: jax.Array  # [K] bool, the client has estimated its shares
    late: jax.Array  # [K] bool, and for the first time after round 0
    asked: jax.Array  # [K] bool, and in this round


class Given(struct.PyTreeNode):
    """What a client of the cohort trains with."""

    shares: jax.Array  # [m] u
    pull: jax.Array  # [] lambda times the sum of u
    is_late: jax.Array  # [] bool, it begins with the mean of the models by its shares


@checked("algorithm")
def fedsoft(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    lam: NonNegativeFloat | jax.Array = 0.1,
    every: PositiveInt = 2,
    sigma: NonNegativeFloat | jax.Array = 1e-4,
) -> Algorithm:
    """FedSoft with m models, from m random ones.

    Args: `lam` is lambda of the pull lambda / 2 sum_k u_k ||w - model_k||^2; all clients estimate
    their shares u in the rounds 0, `every`, 2 `every`, ...; `sigma` stands in for a share of 0.
    A client that is asked gets all m models, and sends m words; a client of the cohort gets them,
    too, unless it has been asked in that round. Clients are tested on models of their own, or, as
    long as they have not trained, on that of their group.
    Raises InputError for clients that keep something else of their own.
    """
    refuse_layers(local)
    own = Method(name=NAME, rows=lambda model: model, serve=lambda row, model: row)
    pulled = proximal(lambda given: given[0], erm(task), center=lambda given: given[1])
    method = Method(
        train_own(sgd(task, local, pulled)),
        start=random_groups(task, m),
        client_rows=partial(init_shares, m),
        migrate=estimate_shares(task, local, every, sigma),
        assign=keep_groups,
        prepare=give_shares(lam),
        ships_model=False,
        aggregate=mean_by_source,
    )
    return federated(task, local.replace(personal=own), system, method)


def init_shares(m: int, groups: Params, data: FederatedData) -> dict[str, Shares]:
    """Returns the shares of clients that have not estimated them: equal ones."""
    none = jnp.zeros(data.num_clients, bool)
    equal = jnp.full((none.size, m), 1 / m, jnp.float32)
    return {SHARES: Shares(equal, none, none, none)}


def count_best(
    task: Task, client: jax.Array, data: FederatedData, models: Params, client_inputs: tuple
) -> Loop:
    """Returns the program of one client: how many [m] of its training samples have their least
    loss with each of the `models` [m, ...], the first of equals.
    """
    count = jax.tree.leaves(models)[0].shape[0]

    def add(total, x, y, owner, number) -> jax.Array:
        logits = jax.vmap(task.predict, (0, None, None))(models, x, owner)
        loss = jax.vmap(task.targets.loss_value, (0, None))(logits, y)
        best = jnp.argmin(jnp.where(jnp.isfinite(loss), loss, jnp.inf), axis=0)
        return total + one_hot(best, count, owner >= 0).sum(0)

    return pass_over_samples(client, data, jnp.zeros(count), add)


def estimate_shares(task: Task, local: Local, every: int, sigma: ArrayLike) -> MigrateFn:
    """Lets all clients with samples estimate their shares, every few rounds; in between those that
    never have.

    Args: as those of `fedsoft`.
    """
    count = partial(map_clients, partial(count_best, task), local.execution)

    def migrate(r: Round) -> tuple[State, Report]:
        state, data = r.state, r.data
        old, size = state.rows[SHARES], data.train.size
        asked = (size > 0) & ((state.round % every == 0) | ~old.known)
        best = count(state.groups, data, asked)
        shares = best / jnp.maximum(best.sum(1, keepdims=True), 1.0)
        shares = jnp.where(shares > 0, shares, sigma)
        table = jnp.where(asked[:, None], shares, old.shares)
        largest = jnp.argmax(table, axis=1).astype(jnp.int32)
        group = jnp.where(asked, largest, state.assignment)
        moved = asked & old.known & (group != state.assignment)
        late = old.late | (asked & ~old.known & (state.round > 0))
        new = Shares(table, old.known | asked, late, asked)
        models = asked * best.shape[1]
        sent = make_bill(units_down=models, words_up=models, samples=models * size)
        state = state.replace(assignment=group).put_rows({SHARES: new})
        return state, make_report(sent, moved.sum())

    return migrate


def give_shares(lam: ArrayLike) -> PrepareFn:
    """Gives each client its shares, and the weight of its pull; reports all m models down to those
    that have not been asked in this round.
    """

    def prepare(r: Round) -> tuple[Work, Report]:
        state, cohort = r.state, r.cohort
        kept, m = cohort.take(state.rows[SHARES]), state.active.size
        is_late = kept.late & ~cohort.take(state.rows[NAME].trained)
        given = Given(kept.shares, lam * kept.shares.sum(1), is_late)
        lacks = r.real & ~kept.asked
        return r.work._replace(client_extra=given), make_report(make_bill(units_down=m * lacks))

    return prepare


def train_own(solve: ClientFn) -> ClientFn:
    """Trains one client's own model by `solve`, pulled to the mean of the models by its shares. The
    update is relative to the model of its group.
    """

    def begin(c: ClientInputs) -> tuple[Params, Work]:
        given = c.work.client_extra
        mean = group_sum(given.shares / jnp.maximum(given.shares.sum(), 1e-30), c.models)
        model = jax.tree.map(partial(jnp.where, given.is_late), mean, c.work.rows[NAME])
        return model, c.work._replace(client_extra=(given.pull, mean))

    def relate(c: ClientInputs, model: Params, upload: Upload) -> Upload:
        trained = jax.tree.map(jnp.add, model, upload.delta)
        delta = jax.tree.map(jnp.subtract, trained, c.model)
        return upload.replace(delta=delta, rows={NAME: trained})

    return change_training(solve, relate, begin)


def mean_by_source(r: Round) -> tuple[Params, jax.Array]:
    """Averages the clients' models for each of the m models, weighted by the samples of its source
    that each client has.
    """
    upload = r.upload
    weight = r.work.client_extra.shares * upload.weight[:, None]
    mass = weight.sum(0)
    share = weight / jnp.where(mass > 0, mass, 1.0)
    trained = jax.tree.map(jnp.add, upload.delta, take_rows(r.state.groups, upload.start_group))
    return jax.tree.map(jnp.subtract, group_sum(share, trained), r.state.groups), mass
