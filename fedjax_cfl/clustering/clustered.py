"""`clustered` makes a clustered method from what its idea is: how groups are chosen from what
clients measure.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import client_range
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import ask_newcomers
from fedjax_cfl.clustering.distances import euclidean
from fedjax_cfl.clustering.measure import MakeMeasure, Measure, Question, losses
from fedjax_cfl.clustering.migrate import (
    ChargeFn,
    DetectFn,
    charge_detected,
    on_shift,
    with_shift_reference,
)
from fedjax_cfl.clustering.one_shot import FoundFn, find_groups_once
from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.method import AssignFn, Method, RegroupFn, Round, Start, StartFn
from fedjax_cfl.round.client_rows import take_cohort_rows
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import count_groups, keep_groups, no_clients, random_groups
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.select import current_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, Cohort, FederatedData, Key, Report, State, Task
from fedjax_cfl.validation import checked

ChooseFn = Callable[[Any, jax.Array], jax.Array]  # (values [S, ...], present group [S]) -> [S]
# (key, values [n, ...], present group [n], who [n] bool) -> group [n]
ClusterFn = Callable[[Key, Any, jax.Array, jax.Array], jax.Array]
PARTS = ("solve", "prepare", "aggregate", "server", "finish", "memory", "client_rows")  # `Method`s


@checked()
def clustered(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: int | jax.Array,
    choose: ChooseFn | None = None,
    cluster: ClusterFn | None = None,
    found: FoundFn | None = None,
    distance: Callable[[jax.Array], jax.Array] = euclidean,
    threshold: ArrayLike | None = None,
    measure: MakeMeasure = losses,
    once: bool = False,
    regroup: RegroupFn | Callable[[Round], jax.Array] | None = None,
    detector: DetectFn | None = None,
    charge: ChargeFn = charge_detected,
    start: StartFn | None = None,
    max_m: int | None = None,
    **parts: Any,
) -> Algorithm:
    """Makes a clustered method: clients measure something, and groups are chosen from it.

    In each round the clients of the cohort measure (`measure`), each gets a group, trains the model
    of that group, and the server averages the updates of each group. Write one of `choose`,
    `cluster` and `found`. What is sent and inferred for the measure is counted by the engine: you
    write no bill.

    Args:
        task, local, system: what every method takes: the model and its loss, how clients train,
            who takes part.
        m: the number of groups, the most that there can be.
        choose: each client chooses for itself: (values, old) -> group [S] int32 from 0 to m - 1.
            `values` [S, ...] are what the clients in the S slots of the cohort measured, by
            default the losses [S, m] of all models; `old` [S] is the present group of each, -1:
            none. Decide each row by itself: there may be rows of empty slots, all 0, and rows are
            in no order; what couples clients belongs into `cluster`. It sends its choice in one
            word. None, without the others: the model of least loss (IFCA).
        cluster: the server chooses for the whole cohort by what clients send: (key, values, old,
            who) -> group [n]. `who` [n] bool are the clients with samples to measure; rows are in
            the order of clients, whatever the devices. Values are sent before the training.
        found: the server clusters all clients once, before round 0: (key, values [K, d], who [K]
            bool) -> group [K]. A client that gets its first samples later joins the group of the
            least mean distance of values.
        distance, threshold: of `found`: (values [K, d]) -> [K, K], and the distance beyond which a
            later client gets a group of its own, as long as there is room; None: it joins one.
        measure: `losses` (of all models), `gradients`, `embeddings`, `label_counts`, or
            `average_over_samples(...)` of `clustering.measure`.
        once: True: a client is asked when it takes part for the first time, and keeps its group.
        regroup: once updates are known, (r) -> groups [S] of the cohort, or (state, groups), see
            `method.Round`: `r.upload.delta` are the updates, `r.group` the groups that trained.
        detector: finds clients whose label counts shifted, which `choose` again before the round:
            `clustering.migrate.tv` and others; None: nobody does. `charge` names who pays for it.
        start: the first group models, by default m independent random ones; with `found` one for
            all groups.
        max_m: room for so many groups: runs of any m up to it share what is compiled.
        parts: solve, prepare, aggregate, server, finish, memory of the full contract, `Method`,
            such as aggregate=fedjax_cfl.round.aggregate.uniform_mean.

    Raises InputError for more than one of `choose`, `cluster` and `found`, for what these cannot be
    used with, and for parts of other names.

    Example (a client changes its group for a loss that is a tenth lower):

        def sticky(task, local, system, *, m, gain=0.1):
            def choose(loss, old):
                best, least = loss.argmin(1), loss.min(1)
                kept = jnp.take_along_axis(loss, old.clip(0)[:, None], 1)[:, 0]
                return jnp.where((old >= 0) & (least > (1 - gain) * kept), old, best)
            return cfl.clustered(task, local, system, m=m, choose=choose)
    """
    settings, asked = locals(), measure(task, local)
    check_choice(settings, asked, parts)
    groups = count_groups(m, max_m)
    if found is not None:
        begin, move = find_groups_once(task, local, groups.size, asked, found, distance, threshold)
        assign: AssignFn = keep_groups
    else:
        ask = partial(ask_cohort, local, asked, choose or least_loss, cluster)
        assign = ask_newcomers(ask()) if once else ask()
        begin, move = use_groups(start or random_groups(task, groups.size), groups.active), None
        if detector is not None:
            begin = with_shift_reference(begin)
            move = on_shift(ask(sends=False), local, detector, asked.models(m), charge)
    method = Method(
        parts.pop("solve", None) or sgd(task, local),
        start=begin,
        migrate=move,
        assign=assign,
        regroup=None if regroup is None else as_regroup(regroup),
        start_clients=no_clients if start is None and move is None else None,
        **parts,
    )
    return federated(task, local, system, method)._replace(serve=groups.serve)


def check_choice(settings: dict[str, Any], measure: Measure, parts: dict[str, Any]) -> None:
    """Raises InputError for `settings` of `clustered`, by name, that contradict each other, and for
    `parts` that it does not take.
    """
    other = next((name for name in parts if name not in PARTS), None)
    if other is not None:
        near = suggest_nearest(other, {*PARTS, *settings} - {"parts"})
        raise InputError(f"clustered: has no {other!r}{near}; it takes {', '.join(PARTS)} as well")
    given = {
        name
        for name, value in {**settings, **parts}.items()
        if value is not None and value is not False
    }
    names = sorted(given & {"choose", "cluster", "found"})
    if len(names) > 1:
        raise InputError(f"clustered: takes one of choose, cluster and found, not {names}")
    others = sorted(given & {"cluster", "found"})
    if "detector" in given and others:
        raise InputError(
            "clustered: detector makes clients choose again for themselves; leave out"
            f" {' and '.join(others)}"
        )
    unused = sorted(given & {"max_m", "memory", "once", "start"})
    if "found" in given and unused:
        raise InputError(
            "clustered: found asks each client once, before round 0, of one model; leave out"
            f" {' and '.join(unused)}"
        )
    if not names and not measure.of_groups:
        raise InputError(
            "clustered: only losses name the model of least loss; to choose by another measure,"
            " give choose, cluster or found"
        )


def use_groups(start: StartFn, active: jax.Array) -> StartFn:
    """Returns `start` with the groups `active` [m] bool in use, unless it says which are."""

    def begin(key: Key, data: FederatedData) -> Start:
        begun = start(key, data)
        return begun._replace(active=active) if begun.active is None else begun

    return begin


def least_loss(loss: jax.Array, old: jax.Array) -> jax.Array:
    """Chooses the model of least loss [S]; ties go to the lowest group. A model whose loss is not
    finite is chosen only if all are so.
    """
    return jnp.argmin(loss, axis=1)


def ask_cohort(
    local: Local, measure: Measure, choose: ChooseFn, cluster: ClusterFn | None, sends: bool = True
) -> AssignFn:
    """Returns what asks the clients of the cohort to measure, chooses their groups, and bills it.

    Args: as those of `clustered`; `sends` False: the bill has no traffic, which the caller counts.
    """
    mesh = local.execution.mesh

    def assign(r: Round) -> tuple[jax.Array, Report]:
        state, cohort = r.state, r.cohort
        size = client_range(cohort.ids, r.data)[0]
        rows = take_cohort_rows(state, cohort, mesh)
        question = Question(r.key, state.groups, state.active, r.data, cohort, rows)
        values = measure.ask(question)
        old, real = current_groups(state, cohort), r.real
        if cluster is None:
            gid, words = choose(values, old), 1
            check_groups("choose", gid, cohort)
        else:
            order, whole = jnp.argsort(cohort.ids), on_every_device(cluster, mesh)
            key, given = (
                jax.random.fold_in(r.key, 1),
                (values[order], old[order], (size > 0)[order]),
            )
            found = whole(key, *given)
            check_groups("cluster", found, cohort)
            gid = jnp.zeros_like(old).at[order].set(found.astype(jnp.int32))
            words = measure.count_words(values)
        models = measure.models(state.active.sum())
        more = models - 1 if measure.of_groups else models  # the one that it trains is counted
        inferred = models * measure.samples(size)
        if not sends:
            return gid.astype(jnp.int32), make_report(make_bill(samples=inferred))
        paid = make_bill(real * more, words_up=real * words, samples=inferred)
        return gid.astype(jnp.int32), make_report(**{"bill" if cluster is None else "early": paid})

    return assign


def check_groups(name: str, found: Any, cohort: Cohort) -> None:
    """Raises InputError where the function `name` of `clustered` returned no group [S] of each."""
    shape, kind = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape == cohort.ids.shape and kind is not None and jnp.issubdtype(kind, jnp.integer):
        return
    shown = type(found).__name__ if shape is None else f"{kind}{list(shape)}"
    raise InputError(
        f"{name}: returned {shown}; return one whole number from 0 to m - 1 for each row of values,"
        f" int32[{cohort.ids.size}]"
    )


def as_regroup(regroup: Callable[[Round], Any]) -> RegroupFn:
    """Returns a function (r) -> groups [S] or (state, groups) as a `RegroupFn`."""

    def moved(r: Round) -> tuple[State, jax.Array]:
        result = regroup(r)
        state, gid = result if isinstance(result, tuple) else (r.state, result)
        return state, gid.astype(jnp.int32)

    return moved
