"""Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.04088. The same method is HypCluster in Mansour, Mohri, Ro, Suresh 2020, https://arxiv.org/abs/2002.10619
("HypoCluster(K)" in the FeSEM paper), with means weighted by samples.

Every round each client tries all m models on its own training data, trains the best, and the server averages within each choice.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl import aggregate, sharding, traffic
from fedjax_cfl import local as training
from fedjax_cfl.assign import lowest_loss, training_loss
from fedjax_cfl.engine import SELECT, START, TRAIN, Start, federated, random_groups, stream
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.types import Algorithm

WEIGHTINGS = {"uniform": aggregate.uniform_mean, "samples": aggregate.weighted_mean, "first_client": aggregate.first_client}


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
) -> Algorithm:
    """IFCA with `average` model | gradient (one full-batch step, divided by all participants; its `weighting` must be uniform).

    Starts: `random` m independent models | `reject_unbalanced` redrawn until every model attracts at least `share` of the first cohort |
    `kmeanspp_loss` models of trained clients, each next one the client worst served so far. `restarts` > 1 trains that many starts for
    `restart_rounds` and keeps the one of lowest training loss.
    Raises InputError for an unknown choice or gradient averaging with another weighting.
    """
    starts = {
        "random": random_groups,
        "reject_unbalanced": reject_unbalanced(local, select, share),
        "kmeanspp_loss": spread_models(local, select),
    }
    require("algorithm.average", average, ("model", "gradient"))
    require("algorithm.weighting", weighting, WEIGHTINGS)
    require("algorithm.start", start, starts)
    if average == "gradient" and weighting != "uniform":
        raise InputError(f"algorithm.weighting={weighting}: gradient averaging divides by the participants; use weighting=uniform")
    local = local.resolved()
    by_gradient = average == "gradient"
    solve = training.one_gradient(task, local) if by_gradient else training.sgd(task, local)
    combine = aggregate.over_cohort if by_gradient else WEIGHTINGS[weighting]
    begin = starts[start](task, m)

    def build(begin):
        return federated(task, local, select=select, solve=solve, start=begin, assign=lowest_loss(task, local, with_l2), aggregate=combine)

    return build(begin) if restarts == 1 else build(best_of(restarts, restart_rounds, begin, build(begin)))


def first_cohort(local, select, key, data):
    """Returns the clients that the method's first round would select, dealt to devices."""
    ids = select(stream(key, SELECT, 0), 0, data.num_clients)
    return sharding.deal(ids, data.train.size[ids] + 16.0, data.num_clients, local.mesh.size, local.width)


def reject_unbalanced(local, select, share: float, tries: int = 100):
    """Redraws m random models until each attracts at least `share` of the first cohort (IFCA's CIFAR code); the last draw stands."""
    local = local.resolved()

    def with_task(task, num_groups):
        losses = training.over_clients(training_loss(task), local)
        draw = random_groups(task, num_groups)

        def start(key, data):
            cohort = first_cohort(local, select, key, data)
            real = cohort.ids < data.num_clients

            def unbalanced(carry):
                attempt, groups = carry
                best = jnp.argmin(losses(cohort, data, groups), axis=1)
                attracted = jnp.sum((best[:, None] == jnp.arange(num_groups)) & real[:, None], axis=0)
                return (attempt < tries) & (attracted.min() < share * real.sum())

            def redraw(carry):
                attempt, _ = carry
                return attempt + 1, draw(jax.random.fold_in(key, attempt), data).groups

            drawn, groups = lax.while_loop(unbalanced, redraw, redraw((0, draw(key, data).groups)))
            asked = drawn * real.sum()
            return Start(groups, spent=traffic.traffic(units_down=asked * num_groups, words_up=asked))

        return start

    return with_task


def spread_models(local, select):
    """Models of trained clients of the first cohort: a random one, then again and again the client whose best loss is largest."""
    local = local.resolved()

    def with_task(task, num_groups):
        train = training.over_clients(training.sgd(task, local), local)
        losses = training.over_clients(training_loss(task), local)

        def start(key, data):
            cohort = first_cohort(local, select, key, data)
            real = cohort.ids < data.num_clients
            common = random_groups(task, 1)(key, data).groups
            upload = train(cohort, data, (stream(key, TRAIN), common), (jnp.zeros_like(cohort.ids), ()))
            models = jax.tree.map(jnp.add, common, upload.delta)
            first = jnp.argmin(jnp.where(real, cohort.rank, cohort.rank.size))

            def next_center(best, _):
                best_loss, chosen = best
                center = jax.tree.map(lambda leaf: leaf[chosen][None], models)
                best_loss = jnp.minimum(best_loss, losses(cohort, data, center)[:, 0])
                return (best_loss, jnp.argmax(jnp.where(real, best_loss, -jnp.inf))), chosen

            _, chosen = lax.scan(next_center, (jnp.full(real.shape, jnp.inf), first), length=num_groups)
            clients = real.sum()
            spent = traffic.traffic(units_down=clients * (1 + num_groups), units_up=clients, words_up=clients * num_groups)
            return Start(jax.tree.map(lambda leaf: leaf[chosen], models), spent=spent)

        return start

    return with_task


def best_of(restarts: int, rounds: int, begin, algorithm: Algorithm):
    """Begins from the one of `restarts` starts whose short training ended with the lowest training loss; all of them are charged."""

    def start(key, data):
        def attempt(number):
            attempt_key = jax.random.fold_in(key, number)
            state = algorithm.init(attempt_key, data)
            begun = begin(stream(attempt_key, START), data).groups
            state, info = lax.scan(lambda state, _: algorithm.round(attempt_key, state, data), state, length=rounds)
            return begun, info.last_loss[-1], state.traffic

        groups, loss, spent = lax.map(attempt, jnp.arange(restarts))
        best = jnp.argmin(loss)
        return Start(jax.tree.map(lambda leaf: leaf[best], groups), spent=jax.tree.map(jnp.sum, spent))

    return start
