"""Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.04088. The same method is HypCluster
in Mansour, Mohri, Ro, Suresh 2020, https://arxiv.org/abs/2002.10619 ("HypoCluster(K)"
in the FeSEM paper), with means weighted by samples.

Every round each client tries all m models on its own training data, trains the best,
and the server averages within each choice.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.clustering.assign import best_model, every_round, training_loss
from fedjax_cfl.clustering.migrate import DETECTORS, ShiftReference, init_reference, on_shift
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.round import traffic
from fedjax_cfl.round.aggregate import cohort_mean, first_client, uniform_mean, weighted_mean
from fedjax_cfl.round.cohort import make_cohort, over_clients
from fedjax_cfl.round.engine import (
    SELECT,
    START,
    TRAIN,
    Start,
    derive_key,
    federated,
    no_clients,
    random_groups,
)
from fedjax_cfl.round.local import full_work
from fedjax_cfl.round.sgd import gradient_step, sgd
from fedjax_cfl.types import Algorithm


class ShiftMemory(struct.PyTreeNode):
    """The memory of IFCA-MIG."""

    shift_reference: ShiftReference


WEIGHTINGS = {"uniform": uniform_mean, "samples": weighted_mean, "first_client": first_client}


def ifca(
    task,
    local,
    select,
    *,
    m: int,
    average: str = "model",
    weighting: str = "uniform",
    start: str = "random",
    share: float = 0.1,
    restarts: int = 1,
    restart_rounds: int = 10,
    with_l2: bool = False,
    migrate: bool = False,
    detector: str = "tv",
    charge: str = "detected",
) -> Algorithm:
    """IFCA with `average` model | gradient (one full-batch step, divided by all
    participants; its `weighting` must be uniform).

    Starts: `random` m independent models | `reject_unbalanced` redrawn until every
    model attracts at least `share` of the first cohort | `kmeanspp_loss` models of
    trained clients, each next one the client worst served so far. `restarts` > 1 trains
    that many starts for `restart_rounds` and keeps the one of lowest training loss.
    `migrate` is IFCA-MIG of the FlexCFL paper: clients met before whose data shifted
    (`detector`) download all models and choose at once; `charge` is
    `migrate.on_shift`'s.
    Raises InputError for an unknown choice or gradient averaging with another
    weighting.
    """
    starts = {
        "random": random_groups,
        "reject_unbalanced": reject_unbalanced(local, select, share),
        "kmeanspp_loss": spread_models(local, select),
    }
    require("algorithm.average", average, ("model", "gradient"))
    require("algorithm.weighting", weighting, WEIGHTINGS)
    require("algorithm.start", start, starts)
    require("algorithm.detector", detector, DETECTORS)
    require("algorithm.charge", charge, ("detected", "swapped"))
    if average == "gradient" and weighting != "uniform":
        raise InputError(
            f"algorithm.weighting={weighting}: gradient averaging divides by the participants; use"
            " weighting=uniform"
        )
    local = local.resolve()
    by_gradient = average == "gradient"
    solve = gradient_step(task, local) if by_gradient else sgd(task, local)
    combine = cohort_mean if by_gradient else WEIGHTINGS[weighting]
    choose = best_model(task, local, with_l2)
    move = on_shift(choose, local, detector, units_each=m, charge=charge) if migrate else None

    def build(begin):
        parts = {
            "start": begin,
            "migrate": move,
            "assign": every_round(choose),
            "aggregate": combine,
        }
        plain = start == "random" and restarts == 1 and not migrate
        return federated(
            task, local, select=select, solve=solve, founders=no_clients if plain else None, **parts
        )

    begin = with_shift_reference(starts[start](task, m)) if migrate else starts[start](task, m)
    return (
        build(begin)
        if restarts == 1
        else build(best_of_restarts(restarts, restart_rounds, begin, build(begin)))
    )


def with_shift_reference(begin):
    """Adds to a start the memory that `on_shift` needs."""

    def start(key, data):
        return begin(key, data)._replace(memory=ShiftMemory(init_reference(data)))

    return start


def first_cohort(local, select, key, data):
    """Returns the clients that the method's first round would select, dealt to devices."""
    ids = select(derive_key(key, SELECT, 0), 0, data.num_clients)
    return make_cohort(ids, data, local)


def reject_unbalanced(local, select, share: float, tries: int = 100):
    """Redraws m random models until each attracts at least `share` of the first cohort
    (IFCA's CIFAR code); the last draw stands.
    """
    local = local.resolve()

    def with_task(task, num_groups):
        losses = over_clients(training_loss(task), local)
        draw = random_groups(task, num_groups)

        def start(key, data):
            cohort = first_cohort(local, select, key, data)
            real = cohort.ids < data.num_clients

            def unbalanced(carry):
                attempt, groups = carry
                best = jnp.argmin(losses(cohort, data, groups), axis=1)
                attracted = jnp.sum(
                    (best[:, None] == jnp.arange(num_groups)) & real[:, None], axis=0
                )
                return (attempt < tries) & (attracted.min() < share * real.sum())

            def redraw(carry):
                attempt, _ = carry
                return attempt + 1, draw(jax.random.fold_in(key, attempt), data).groups

            drawn, groups = lax.while_loop(unbalanced, redraw, redraw((0, draw(key, data).groups)))
            asked = drawn * real.sum()
            return Start(
                groups, traffic=traffic.make_traffic(units_down=asked * num_groups, words_up=asked)
            )

        return start

    return with_task


def spread_models(local, select):
    """Models of trained clients of the first cohort: a random one, then again and again
    the client whose best loss is largest.
    """
    local = local.resolve()

    def with_task(task, num_groups):
        train = over_clients(sgd(task, local), local)
        losses = over_clients(training_loss(task), local)

        def start(key, data):
            cohort = first_cohort(local, select, key, data)
            real = cohort.ids < data.num_clients
            common = random_groups(task, 1)(key, data).groups
            upload = train(
                cohort,
                data,
                (derive_key(key, TRAIN), common),
                full_work(jnp.zeros_like(cohort.ids)),
            )
            models = jax.tree.map(jnp.add, common, upload.delta)
            first = jnp.argmin(jnp.where(real, cohort.rank, cohort.rank.size))

            def next_center(best, _):
                best_loss, chosen = best
                center = jax.tree.map(lambda leaf: leaf[chosen][None], models)
                best_loss = jnp.minimum(best_loss, losses(cohort, data, center)[:, 0])
                return (best_loss, jnp.argmax(jnp.where(real, best_loss, -jnp.inf))), chosen

            _, chosen = lax.scan(
                next_center, (jnp.full(real.shape, jnp.inf), first), length=num_groups
            )
            clients = real.sum()
            spent = traffic.make_traffic(
                units_down=clients * (1 + num_groups),
                units_up=clients,
                words_up=clients * num_groups,
            )
            return Start(jax.tree.map(lambda leaf: leaf[chosen], models), traffic=spent)

        return start

    return with_task


def best_of_restarts(restarts: int, rounds: int, begin, algorithm: Algorithm):
    """Begins from the one of `restarts` starts whose short training ended with the
    lowest training loss; all of them are charged.
    """

    def start(key, data):
        def attempt(number):
            attempt_key = jax.random.fold_in(key, number)
            state = algorithm.init(attempt_key, data)
            begun = begin(derive_key(attempt_key, START), data).groups
            state, info = lax.scan(
                lambda state, _: algorithm.round(attempt_key, state, data), state, length=rounds
            )
            return begun, info.last_loss[-1], state.traffic

        groups, loss, spent = lax.map(attempt, jnp.arange(restarts))
        chosen = jax.tree.map(lambda leaf: leaf[jnp.argmin(loss)], groups)
        return begin(key, data)._replace(groups=chosen, traffic=jax.tree.map(jnp.sum, spent))

    return start
