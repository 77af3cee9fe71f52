"""Clients that are clustered once, before any training, by what each of them tells the server; and
those that come later.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.method import MigrateFn, Round, Start, StartFn
from fedjax_cfl.round.start import common_model
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.tree import one_hot, take_rows
from fedjax_cfl.types import Bill, FederatedData, Key, Params, Report, State, Task

CompareFn = Callable[[jax.Array], jax.Array]  # (points [K, ...]) -> distances [K, K]
# (distances [K, K], valid [K] bool) -> the distance [] up to which groups are merged
CutFn = Callable[[jax.Array, jax.Array], jax.Array]


# (key, the model [1, ...] that all groups start from, data, who [K] bool) -> what these clients
# tell [K, ...], 0 for others
DescribeFn = Callable[[Key, Params, FederatedData, jax.Array], jax.Array]
# (what clients tell [K, ...], data, who [K] bool) -> what it takes these to tell it, [K]
BillFn = Callable[[jax.Array, FederatedData, jax.Array], Bill]


class Described(struct.PyTreeNode):
    """What the server keeps of every client, and of the start."""

    points: jax.Array  # [K, ...] float32, 0 where `known` is not
    known: jax.Array  # [K] bool
    first: Params  # [1, ...], the model that all groups start from


def cluster_at_start(
    task: Task,
    m: int,
    describe: DescribeFn,
    bill: BillFn,
    compare: CompareFn,
    linkage: str,
    threshold: ArrayLike | CutFn | None,
    mesh: Mesh,
) -> StartFn:
    """Starts from one model for all groups, into which the clients with samples are clustered.

    Args: `m` is the most groups; `linkage` is that of `agglomerate`; groups up to `threshold` apart
    are merged even if only m are left, None: exactly m; each device of `mesh` clusters by itself.
    """

    def cluster(points: jax.Array, able: jax.Array) -> jax.Array:
        apart = compare(points)
        limit = threshold(apart, able) if callable(threshold) else threshold
        return agglomerate(apart, m, linkage, able, limit)

    def start(key: Key, data: FederatedData) -> Start:
        begun, able = common_model(task, m)(key, data), data.train.size > 0
        first = take_rows(begun.groups, slice(1))
        points = describe(key, first, data, able)
        label = on_every_device(cluster, mesh)(points, able)
        return begun._replace(
            assignment=jnp.maximum(label, 0),  # the engine withholds those without samples
            active=jnp.arange(m) <= jnp.maximum(label.max(), 0),
            memory=Described(points, able, first),
            report=make_report(bill(points, data, able)),
        )

    return start


def join_or_found(
    describe: DescribeFn,
    bill: BillFn,
    compare: CompareFn,
    threshold: ArrayLike | None,
    mesh: Mesh,
) -> MigrateFn:
    """Returns what takes in clients of which the server knows nothing yet, as soon as they have
    samples: those of lowest number first, each to the group of least mean distance, or, if that is
    more than `threshold` (None: never), to the next group that is not in use, whose model is still
    the first.

    Args: as those of `cluster_at_start`.
    """
    limit = jnp.inf if threshold is None else threshold

    def migrate(r: Round) -> tuple[State, Report]:
        state, data = r.state, r.data
        memory = state.memory
        known = memory.known & (state.assignment >= 0)
        waits = (data.train.size > 0) & ~known

        def take_in(first):
            waiting = waits & first  # so that no compiler takes this out of the loop below
            told = describe(r.key, memory.first, data, waiting)
            points = jax.vmap(jnp.where)(waiting, told, memory.points)
            apart = on_every_device(compare, mesh)(points)

            def place(i, carry):
                assignment, active, met = carry
                member = one_hot(assignment, active.size, met)
                count = member.sum(0)
                mean = jnp.where(count > 0, apart[i] @ member / jnp.maximum(count, 1.0), jnp.inf)
                nearest = jnp.argmin(mean)
                far = jnp.isfinite(mean[nearest]) & (mean[nearest] > limit) & ~active.all()
                group = jnp.where(far, jnp.argmin(active), nearest)
                group = jnp.where(waiting[i], group, assignment[i]).astype(jnp.int32)
                active |= waiting[i] & (jnp.arange(active.size) == group)
                return assignment.at[i].set(group), active, met.at[i].set(met[i] | waiting[i])

            begin = state.assignment, state.active, known
            assignment, active, _ = lax.fori_loop(0, waiting.size, place, begin)
            return assignment, active, points, bill(points, data, waiting)

        nothing = make_bill(jnp.zeros(data.num_clients))
        stay = state.assignment, state.active, memory.points, nothing
        # a loop of one pass or none: mapped over the runs of a grid, a branch would be taken always
        passes = jnp.any(waits).astype(jnp.int32)
        found = lax.fori_loop(0, passes, lambda i, _: take_in(i == 0), stay)
        assignment, active, points, paid = found
        memory = memory.replace(points=points, known=memory.known | waits)
        state = state.replace(assignment=assignment, active=active, memory=memory)
        return state, make_report(paid)

    return migrate
