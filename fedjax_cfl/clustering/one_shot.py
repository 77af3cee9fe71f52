"""Clients that are clustered once, before any training, by what each of them measures; and those
that come later.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import make_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering.distances import euclidean
from fedjax_cfl.clustering.measure import Measure, Question
from fedjax_cfl.clustering.metric_kmeans import clusters_in_use
from fedjax_cfl.method import MigrateFn, Round, Start, StartFn
from fedjax_cfl.round.start import common_model
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.tree import one_hot, take_rows
from fedjax_cfl.types import Bill, FederatedData, Key, Params, Report, State, Task

CompareFn = Callable[[jax.Array], jax.Array]  # (values [K, ...]) -> distances [K, K]
# (key, values [K, ...], who [K] bool) -> group [K] from 0 to m - 1
FoundFn = Callable[[Key, jax.Array, jax.Array], jax.Array]
# (key, the model [1, ...] that all groups start from, data, who [K] bool) -> the values of these
# clients [K, ...], 0 for others
DescribeFn = Callable[[Key, Params, FederatedData, jax.Array], jax.Array]
# (values [K, ...], data, who [K] bool) -> what these clients pay for them, [K]
CostFn = Callable[[jax.Array, FederatedData, jax.Array], Bill]


FEATURES = "features"


class ClientFeatures(struct.PyTreeNode):
    """What the server keeps of every client, the row `FEATURES`. Its memory is the model [1, ...]
    that all groups start from.
    """

    points: jax.Array  # [K, ...] float32, 0 where `known` is not
    known: jax.Array  # [K] bool


def find_groups_once(
    task: Task,
    local: Local,
    m: int,
    measure: Measure,
    found: FoundFn,
    compare: CompareFn = euclidean,
    threshold: ArrayLike | None = None,
) -> tuple[StartFn, MigrateFn]:
    """Returns the start, in which all clients with samples measure the first model and `found`
    clusters them, and what assigns clients that come later.

    Args: `m` is the most groups; `measure` is what clients measure, a number that is not finite
    counts as 0; `compare` and `threshold` are those of `join_or_found`.
    """
    mesh = local.execution.mesh

    def describe(key: Key, first: Params, data: FederatedData, who: jax.Array) -> jax.Array:
        ids = jnp.where(who, jnp.arange(who.size, dtype=jnp.int32), who.size)
        cohort = make_cohort(ids, data, local.execution)
        values = measure.ask(Question(key, first, jnp.ones(1, bool), data, cohort, {}))
        values = jnp.where(jnp.isfinite(values), values, 0.0)
        return cohort.put(jnp.zeros((who.size, *values.shape[1:])), values)

    def cost(values: jax.Array, data: FederatedData, who: jax.Array) -> Bill:
        models = measure.models(1)
        samples = who * models * measure.samples(data.train.size)
        return make_bill(who * models, words_up=who * measure.count_words(values), samples=samples)

    def start(key: Key, data: FederatedData) -> Start:
        begun, who = common_model(task, m)(key, data), data.train.size > 0
        first = take_rows(begun.groups, slice(1))
        points = describe(key, first, data, who)
        label = on_every_device(found, mesh)(jax.random.fold_in(key, 1), points, who)
        label = jnp.where(who, label, -1).astype(jnp.int32)
        return begun._replace(
            assignment=label,
            active=clusters_in_use(label, who, m),
            memory=first,
            rows={FEATURES: ClientFeatures(points, who)},
            report=make_report(cost(points, data, who)),
        )

    return start, join_or_found(describe, cost, compare, threshold, mesh)


def join_or_found(
    describe: DescribeFn,
    cost: CostFn,
    compare: CompareFn,
    threshold: ArrayLike | None,
    mesh: Mesh,
) -> MigrateFn:
    """Returns what takes in clients of which the server knows nothing yet, as soon as they have
    samples: those of lowest number first, each to the group of least mean distance, or, if that is
    more than `threshold` (None: never), to the next group that is not in use, whose model is still
    the first.

    Args: `describe` has them measure; `cost` is what they pay; `compare` gives distances.
    """
    limit = jnp.inf if threshold is None else threshold

    def migrate(r: Round) -> tuple[State, Report]:
        state, data = r.state, r.data
        kept = state.rows[FEATURES]
        known = kept.known & (state.assignment >= 0)
        waits = (data.train.size > 0) & ~known

        def assign_newcomers(first):
            waiting = waits & first  # so that no compiler takes this out of the loop below
            features = describe(r.key, state.memory, data, waiting)
            points = jax.vmap(jnp.where)(waiting, features, kept.points)
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
            return assignment, active, points, cost(points, data, waiting)

        nothing = make_bill(jnp.zeros(data.num_clients))
        stay = state.assignment, state.active, kept.points, nothing
        # a loop of one pass or none: mapped over the runs of a grid, a branch would be taken always
        passes = jnp.any(waits).astype(jnp.int32)
        found = lax.fori_loop(0, passes, lambda i, _: assign_newcomers(i == 0), stay)
        assignment, active, points, paid = found
        state = state.replace(assignment=assignment, active=active)
        new = kept.replace(points=points, known=kept.known | waits)
        return state.put_rows({FEATURES: new}), make_report(paid)

    return migrate
