"""Which group each client of the cohort trains, of clients that have none yet.

All are `AssignFn`s (see `method`). The engine stores the groups as the assignment of the cohort;
other clients keep theirs. `train_without_recording` trains outside of a round: the first updates of
founders, newcomers and clients whose data shifted.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import ClientFn, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.clustering.distances import cosine
from fedjax_cfl.method import AssignFn, Round
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.faults import Faults, with_faults
from fedjax_cfl.system.reports import add_bills, make_bill, make_report, sum_fault_counts
from fedjax_cfl.system.select import current_groups, is_unassigned
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.tree import squared_leaf_norms
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, Report, Upload


class TrainFn(Protocol):
    """Trains a cohort, all of it from one `model` [1, ...]. Its report has faults and the
    samples [S] of its steps. The caller adds what is sent.

    Args: `lr_scale` multiplies the step size; the others are those of a round.
    """

    def __call__(
        self,
        key: Key,
        model: Params,
        cohort: Cohort,
        data: FederatedData,
        lr_scale: ArrayLike = 1.0,
    ) -> tuple[Upload, Report]: ...


def train_without_recording(solve: ClientFn, local: Local, system: SystemLike) -> TrainFn:
    """Returns a function that trains a cohort by `solve`, without simulated faults.

    An update that is not finite is counted and treated as `faults.nonfinite` of the system says:
    by default its weight and its delta are 0.
    """
    guard = Faults(nonfinite=as_system(system).faults.nonfinite)
    train = over_clients(with_faults(guard, solve), local.execution)

    def run(key, model, cohort, data, lr_scale: ArrayLike = 1.0) -> tuple[Upload, Report]:
        work = full_work(jnp.zeros_like(cohort.ids), lr_scale)
        upload, counts = train(cohort, data, ((key, model), (key, ())), work)
        samples = TRAIN_TO_INFERENCE * local.batch_size * upload.steps
        inferred = make_bill(samples=samples)
        return upload, make_report(inferred, fault_counts=sum_fault_counts(counts, cohort))

    return run


def ask_newcomers(choose: AssignFn, after: int = -1) -> AssignFn:
    """Returns `choose` for the clients with samples that have no group yet; others keep theirs.
    Nobody is asked up to the round `after`.
    """

    def assign(r: Round) -> tuple[jax.Array, Report]:
        state, cohort = r.state, r.cohort
        able = (cohort.take(r.data.train.size) > 0) & (state.round > after)
        new = is_unassigned(state, cohort) & able
        chosen, report = choose(r._replace(cohort=cohort.keep(new, r.data.num_clients)))
        kept = jnp.maximum(current_groups(state, cohort), 0)
        return jnp.where(new, chosen, kept).astype(jnp.int32), report

    return assign


def cold_start(
    choose: AssignFn, downloads: Callable[[ArrayLike], ArrayLike] = lambda groups: groups
) -> AssignFn:
    """Asks newcomers, each of which downloads m vectors when it is first selected, and chooses by
    itself (FlexCFL, Algorithm 3 from line 18).

    Args: `downloads` is (groups in use []) -> models that a newcomer receives for its choice,
    beside the one that it trains.
    """

    def choose_downloaded(r: Round) -> tuple[jax.Array, Report]:
        gid, report = choose(r)
        sent = make_bill(units_down=r.real * downloads(r.state.active.sum()))
        return gid, report.replace(bill=add_bills(report.bill, sent))

    return ask_newcomers(choose_downloaded)


def nearest_direction(pretrain: TrainFn) -> AssignFn:
    """Chooses the group of most similar direction: clients pre-train from the initial model,
    and the cosine dissimilarity of their update is smallest (FlexCFL, eq. 8).

    `state.memory` holds `initial` [1, ...], `directions` [m, ...] and `has_founders` [m]; a
    group without founders is never chosen, nor one whose direction is not finite. A client whose
    own update is not finite has no direction, and gets the first group that can be chosen.
    """

    def choose(r: Round) -> tuple[jax.Array, Report]:
        memory = r.state.memory
        upload, report = pretrain(r.key, memory.initial, r.cohort, r.data)
        similarity = cosine(upload.delta, memory.directions)
        finite = jnp.isfinite(squared_leaf_norms(memory.directions).sum(0))
        usable = memory.has_founders & finite & jnp.isfinite(similarity)
        return jnp.argmax(jnp.where(usable, similarity, -jnp.inf), axis=1), report

    return choose


def random_group(r: Round) -> tuple[jax.Array, Report]:
    """Draws a uniformly random group for each client (ablation RAC; an `AssignFn`)."""
    keys = jax.vmap(lambda client: jax.random.fold_in(r.key, client))(r.cohort.ids)
    gid = jax.vmap(lambda k: jax.random.randint(k, (), 0, r.state.active.sum()))(keys)
    return gid, make_report()
