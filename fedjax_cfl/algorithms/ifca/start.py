"""Starts of IFCA: m random models, or such as suit the clients of the first round."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.client.cohort import client_range, make_cohort, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import train_without_recording
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.method import Start, StartFn
from fedjax_cfl.round.start import MakeStart, random_groups
from fedjax_cfl.system.reports import add_bills, make_bill, make_report
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Cohort, FederatedData, Key, Task
from fedjax_cfl.validation import Fraction, checked

MAX_DRAWS = 100
StartName = Literal["random", "reject_unbalanced", "kmeanspp_loss"]


def independent_models(task: Task, local: Local, system: SystemLike, m: int) -> StartFn:
    """Starts from m independent random models."""
    return random_groups(task, m)


def first_cohort(local: Local, system: SystemLike, key: Key, data: FederatedData) -> Cohort:
    """Returns a cohort drawn as that of round 0, by a key of the start: the very cohort of round 0
    only where the selection draws nothing, as a round robin.

    Raises InputError for a selection that is not known before the run.
    """
    draw = as_system(system).select.draw
    if draw is None:
        raise InputError(
            "algorithm.start: this start needs the clients of the first round, which this"
            " selection does not know before the run; use start=random"
        )
    ids = draw(derive_key(key, SELECT, 0), 0, data.train.size)
    return make_cohort(ids, data, local.execution)


@checked("algorithm")
def reject_unbalanced(share: Fraction = 0.1) -> MakeStart:
    """Draws m random models until each is the best for at least `share` of the first cohort
    (IFCA's CIFAR code), at most `MAX_DRAWS` times; the last draw is used.
    """

    def make(task: Task, local: Local, system: SystemLike, m: int) -> StartFn:
        losses = over_clients(training_loss(task), local.execution)
        draw = random_groups(task, m)

        def start(key: Key, data: FederatedData) -> Start:
            cohort = first_cohort(local, system, key, data)
            real = cohort.ids < data.num_clients

            def unbalanced(carry):
                attempt, groups = carry
                loss = losses(cohort, data, groups)
                best = jnp.argmin(jnp.where(jnp.isfinite(loss), loss, jnp.inf), axis=1)
                attracted = jnp.sum((best[:, None] == jnp.arange(m)) & real[:, None], axis=0)
                return (attempt < MAX_DRAWS) & (attracted.min() < share * real.sum())

            def redraw(carry):
                attempt, _ = carry
                return attempt + 1, draw(jax.random.fold_in(key, attempt), data).groups

            drawn, groups = lax.while_loop(unbalanced, redraw, redraw((0, None)))
            size = client_range(cohort.ids, data)[0]
            sent = make_bill(drawn * real * m, words_up=drawn * real, samples=drawn * m * size)
            return Start(groups, report=make_report(sent))

        return start

    return make


def spread_models(task: Task, local: Local, system: SystemLike, m: int) -> StartFn:
    """Starts from models that m clients of the first cohort have trained: a random one, and
    then each time that of the client whose lowest loss of the models so far is highest.

    A client whose update or loss is not finite is never taken.
    """
    train = train_without_recording(sgd(task, local), local, system)
    losses = over_clients(training_loss(task), local.execution)

    def start(key: Key, data: FederatedData) -> Start:
        cohort = first_cohort(local, system, key, data)
        common = random_groups(task, 1)(key, data).groups
        upload, report = train(derive_key(key, TRAIN), common, cohort, data)
        real, usable = cohort.ids < data.num_clients, upload.weight > 0
        models = jax.tree.map(jnp.add, common, upload.delta)
        first = jnp.argmin(jnp.where(usable, cohort.rank, cohort.rank.size))

        def next_center(best, _):
            best_loss, chosen = best
            center = jax.tree.map(lambda leaf: leaf[chosen][None], models)
            best_loss = jnp.minimum(best_loss, losses(cohort, data, center)[:, 0])
            farthest = jnp.argmax(jnp.where(usable & jnp.isfinite(best_loss), best_loss, -jnp.inf))
            return (best_loss, farthest), chosen

        _, chosen = lax.scan(next_center, (jnp.full(real.shape, jnp.inf), first), length=m)
        inferred = m * client_range(cohort.ids, data)[0]
        sent = make_bill(real * (1 + m), real, words_up=real * m, samples=inferred)
        report = report.replace(bill=add_bills(report.bill, sent))
        return Start(take_rows(models, chosen), report=report)

    return start
