"""Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.04088. The same method is HypCluster
in Mansour, Mohri, Ro, Suresh 2020, https://arxiv.org/abs/2002.10619 ("HypoCluster(K)"
in the FeSEM paper), with means weighted by samples.

In every round each client of the cohort tests all m models on its training data and trains the best
one. The server averages the updates of each model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.client.cohort import ClientFn, make_cohort, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import Objective, erm, proximal, training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import best_model, every_round, train_without_recording
from fedjax_cfl.clustering.migrate import (
    ChargeFn,
    DetectFn,
    ShiftReference,
    charge_detected,
    init_reference,
    on_shift,
    tv,
)
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.method import AggregateFn, Method, Start, StartFn
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import count_groups, no_clients, random_groups
from fedjax_cfl.system.reports import (
    add_bills,
    add_fault_counts,
    add_to_ledger,
    make_bill,
    make_report,
    sum_rounds,
)
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Key, State, Task
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, check_arguments

MAX_DRAWS = 100

MakeStart = Callable[[Task, Local, SystemLike, int], StartFn]


class ShiftMemory(struct.PyTreeNode):
    """The memory of IFCA-MIG."""

    shift_reference: ShiftReference


class ShiftOptions(NamedTuple):
    """What IFCA does where clients' data shift."""

    # finds the shifts after which clients with a group download all models and choose again before
    # the round; None: they do not
    detector: DetectFn | None = None
    charge: ChargeFn = charge_detected  # which clients pay for these models


STAY = ShiftOptions()  # as published


def independent_models(task: Task, local: Local, system: SystemLike, m: int) -> StartFn:
    """Starts from m independent random models."""
    return random_groups(task, m)


def ifca(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt | jax.Array,
    max_m: PositiveInt | None = None,
    start: MakeStart = independent_models,
    solve: Callable[[Task, Local, Objective], ClientFn] = sgd,
    aggregate: AggregateFn = uniform_mean,
    with_l2: bool = False,
    mu: NonNegativeFloat | jax.Array = 0.0,
    shift: ShiftOptions = STAY,
) -> Algorithm:
    """IFCA: each client trains the group model of lowest loss on its training data
    (Algorithm 1).

    Option II of the paper is the default; option I, gradient averaging, is
    `solve=gradient_step` with `aggregate=cohort_mean`.
    Args: `start` is independent_models | reject_unbalanced(share) | spread_models; `with_l2`
    adds the L2 penalty to the losses that are compared (D10); `max_m`: room for so many models, so
    that runs of any m up to it share what is compiled. The losses of max_m models are computed
    then, and m are counted as sent; `mu` is the weight of FedProx's pull to the received model,
    which IFCA does not have; `shift` says what happens where data shift.
    Raises InputError for `max_m` below m, for an array m without it, and for more room than m with
    another start than independent_models.
    """
    check_arguments(ifca, locals(), "algorithm")
    groups = count_groups(m, max_m)
    if groups.is_padded and start is not independent_models:
        raise InputError("algorithm.max_m: needs start=random; leave out algorithm.max_m")
    draw, choose = start(task, local, system, groups.size), best_model(task, local, with_l2)
    move = on_shift(choose, local, shift.detector, m, shift.charge) if shift.detector else None

    def begin(key: Key, data: FederatedData) -> Start:
        return draw(key, data)._replace(active=groups.active)

    hooks = Method(
        solve(task, local, proximal(mu, erm(task))),
        start=begin,
        memory=(lambda groups, data: ShiftMemory(init_reference(data))) if move else None,
        migrate=move,
        assign=every_round(choose),
        aggregate=aggregate,
        start_clients=no_clients if start is independent_models and move is None else None,
    )
    return federated(task, local, system, hooks)._replace(serve=groups.serve)


def ifca_mig(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    detector: DetectFn = tv,
    charge: ChargeFn = charge_detected,
    **options: Any,
) -> Algorithm:
    """IFCA-MIG of the FlexCFL paper: IFCA whose clients choose again where their data shift.

    Args: `detector` and `charge` are those of `ShiftOptions`; `options` are the others of `ifca`.
    """
    return ifca(task, local, system, shift=ShiftOptions(detector, charge), **options)


def ifca_restarts(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    restarts: PositiveInt = 5,
    restart_rounds: PositiveInt = 10,
    start: MakeStart = independent_models,
    aggregate: AggregateFn = uniform_mean,
    with_l2: bool = False,
    mu: NonNegativeFloat | jax.Array = 0.0,
) -> Algorithm:
    """IFCA from the best of several starts: the one whose training loss is lowest after a few
    rounds. The traffic of all of them counts.

    Args: `restarts` is how many starts are tried, for `restart_rounds` rounds each; `start`,
    `aggregate`, `with_l2` and `mu` are those of `ifca`.
    """
    check_arguments(ifca_restarts, locals(), "algorithm")
    algorithm = ifca(
        task, local, system, m=m, start=start, aggregate=aggregate, with_l2=with_l2, mu=mu
    )

    def init(key: Key, data: FederatedData) -> State:
        def attempt(number):
            attempt_key = jax.random.fold_in(key, number)
            initial = algorithm.init(attempt_key, data)
            state, info = lax.scan(
                lambda state, _: algorithm.round(attempt_key, state, data),
                initial,
                length=restart_rounds,
            )
            faults = add_fault_counts(initial.start_faults, sum_rounds(info.fault_counts))
            return initial.groups, info.last_loss[-1], state.traffic, faults

        groups, loss, sent, faults = lax.map(attempt, jnp.arange(restarts))
        best = jnp.argmin(jnp.where(jnp.isfinite(loss), loss, jnp.inf))
        chosen = take_rows(groups, best)
        state = algorithm.init(key, data).replace(
            groups=chosen, traffic=add_to_ledger(sent), start_faults=sum_rounds(faults)
        )
        return as_system(system).init_received(state)

    return algorithm._replace(init=init, data_clients=None)


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


def reject_unbalanced(share: Fraction = 0.1) -> MakeStart:
    """Draws m random models until each is the best for at least `share` of the first cohort
    (IFCA's CIFAR code), at most `MAX_DRAWS` times; the last draw is used.
    """
    check_arguments(reject_unbalanced, locals(), "algorithm")

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
            sent = make_bill(units_down=drawn * real * m, words_up=drawn * real)
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
        sent = make_bill(real * (1 + m), real, words_up=real * m)
        report = report.replace(bill=add_bills(report.bill, sent))
        return Start(take_rows(models, chosen), report=report)

    return start
