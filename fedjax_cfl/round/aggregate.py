"""Server aggregation: each function is an `AggregateFn` (see `method`) or returns one; the server's
step with what they return, and how far from it each update is.

The server adds the step [m, ...] to the group models; a group of mass 0 keeps its model.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.client.local import Local
from fedjax_cfl.method import AggregateFn, FinishFn, Round
from fedjax_cfl.sharding import split_by_parameter
from fedjax_cfl.system.reports import add_to_ledger, make_bill
from fedjax_cfl.tree import (
    copy_statistics,
    drop_statistics,
    group_mean,
    group_sum,
    membership_weights,
    squared_norms,
    where_rows,
)
from fedjax_cfl.types import Params, State, Upload


def weighted_mean(r: Round) -> tuple[Params, jax.Array]:
    """Averages the updates of each group, weighted by training samples (FedAvg)."""
    return group_mean(r.upload.weight, r.group, r.upload.delta, r.state.active.size)


def uniform_mean(r: Round) -> tuple[Params, jax.Array]:
    """Averages the updates of each group that are used, unweighted (IFCA, FeSEM)."""
    used = (r.upload.weight > 0).astype(jnp.float32)
    return group_mean(used, r.group, r.upload.delta, r.state.active.size)


MeanName = Literal["uniform", "samples"]  # of a mean within a group, as settings have it
MEANS: dict[str, AggregateFn] = {"uniform": uniform_mean, "samples": weighted_mean}


def cohort_mean(r: Round) -> tuple[Params, jax.Array]:
    """Divides each group's sum of updates by the clients of ALL groups: gradient averaging
    of IFCA (Algorithm 1, option I).
    """
    used = (r.upload.weight > 0).astype(jnp.float32)
    present = membership_weights(used, r.group, r.state.active.size)
    return group_sum(present / jnp.maximum(present.sum(), 1.0), r.upload.delta), present.sum(0)


def count_trimmed(count: ArrayLike, share: ArrayLike) -> jax.Array:
    """Returns how many of `count` values are trimmed at one end, floor(share * count).

    A share of 1/2 leaves the middle one or two values: the median.
    """
    # 1e-3: shares are rounded
    most = (jnp.maximum(count, 1) - 1) // 2
    return jnp.minimum(jnp.floor(share * count + 1e-3), most).astype(jnp.int32)


def sort_coordinates(tree: Params) -> tuple[Params, Params]:
    """Returns the values [S, ...] of each coordinate of a tree in ascending order, and the rows
    [S, ...] int32 they are from.
    """

    def sort(leaf):
        rows = lax.broadcasted_iota(jnp.int32, leaf.shape, 0)
        return tuple(lax.sort((leaf, rows), dimension=0, num_keys=1))

    leaves, treedef = jax.tree.flatten(tree)
    values, rows = zip(*map(sort, leaves), strict=True)
    return treedef.unflatten(values), treedef.unflatten(rows)


def trimmed_group_mean(
    present: jax.Array,
    gid: jax.Array,
    ordered: tuple[Params, Params],
    num_groups: int,
    share: ArrayLike,
) -> tuple[Params, jax.Array]:
    """Returns the trimmed mean [m, ...] of each coordinate within each group, and the number of
    its clients [m]. Both are 0 for an empty group.

    At both ends of each coordinate `count_trimmed` of a group's values are left out. Values are
    taken in ascending order, and each is counted in its group: what is sorted once serves any
    groups.

    Args: `present` [S] bool are the clients that count; `gid` [S] int32 is the group of each
    slot, 0 .. m - 1; `ordered` is what is averaged, as `sort_coordinates` returns it; `num_groups`
    is m, static; `share` from 0 to 0.5 is the fraction of a group's clients left out at each end,
    0.5: the median.
    """
    group = jnp.where(present, gid, num_groups)
    count = jnp.bincount(group, length=num_groups + 1)[:num_groups]
    drop = count_trimmed(count, share)

    def average(values, rows):
        low, high = (each.reshape(-1, *[1] * (rows.ndim - 1)) for each in (drop, count - drop))
        groups = jnp.arange(num_groups).reshape(low.shape)

        def add(carry, row):
            (seen, total), (value, own) = carry, row
            own = own == groups
            kept = own & (seen >= low) & (seen < high)
            return (seen + own, total + jnp.where(kept, value, 0.0)), None

        seen = jnp.zeros((num_groups, *rows.shape[1:]), jnp.int32)
        (_, total), _ = lax.scan(add, (seen, seen.astype(values.dtype)), (values, group[rows]))
        return total / jnp.maximum(high - low, 1)

    return jax.tree.map(average, *ordered), count


def trimmed_mean(beta: ArrayLike, mesh: Mesh | None = None) -> AggregateFn:
    """Averages each coordinate without the fraction `beta` of a group's clients at both
    ends (Yin et al. 2018), unweighted; 0.5 is the median. The devices of `mesh` share the
    coordinates.
    """

    def aggregate(r: Round) -> tuple[Params, jax.Array]:
        delta = split_by_parameter(r.upload.delta, mesh)
        ordered = sort_coordinates(delta)
        return trimmed_group_mean(r.upload.weight > 0, r.group, ordered, r.state.active.size, beta)

    return aggregate


def q_fair(q: float, local: Local) -> AggregateFn:
    """Weighs clients by their loss to the power q (q-FedAvg, "Fair Resource Allocation
    in Federated Learning", Algorithm 2).

    `client_extra` [S] is the loss F_i of the model that each client received. The
    Lipschitz constant is one over the step size. q = 0 is the plain mean. A client with so
    high a loss that its share is beyond float32 is left out.
    """

    def aggregate(r: Round) -> tuple[Params, jax.Array]:
        upload, state = r.upload, r.state
        lipschitz = 1.0 / (local.lr * local.lr_scale(state.round))
        present = upload.weight > 0
        # the loss of an absent client may be anything
        loss = jnp.where(present, r.work.client_extra, 0.0) + 1e-10
        gain = loss**q
        bend = q * loss ** (q - 1) * lipschitz**2 * upload.squared_norm + lipschitz * gain
        present &= jnp.isfinite(bend)
        bend, gain = (jnp.where(present, value, 0.0) for value in (bend, gain))
        total = membership_weights(bend, r.group, state.active.size).sum(0)
        coefficient = membership_weights(gain * lipschitz, r.group, state.active.size)
        return group_sum(coefficient / jnp.where(total > 0, total, 1.0), upload.delta), total

    return aggregate


def inter_group(eta_g: ArrayLike, normalize: bool = True) -> FinishFn:
    """Mixes the group models with each other after aggregation, all at once (FlexCFL,
    Algorithm 2 and eq. 20).

    With `normalize` the new model is divided by the total weight, as the reference code
    does: a convex combination; without, it is a sum as eq. 20 is printed (D14). Groups without
    clients take no part. The exchange costs m models down, none where `eta_g` is 0.
    """

    def finish(r: Round) -> State:
        state = r.state
        groups = state.groups
        owning = jnp.any(state.assignment[:, None] == jnp.arange(state.active.size), axis=0)
        square = squared_norms(groups).sum(0)
        pull = jnp.where(
            owning & (square > 0), eta_g / jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0
        )
        others = pull[None, :] * (1.0 - jnp.eye(pull.size))  # [g, l], l != g
        total = 1.0 + others.sum(1) if normalize else jnp.ones(pull.size)
        weights = jnp.where(
            owning[:, None], (jnp.eye(pull.size) + others) / total[:, None], jnp.eye(pull.size)
        )
        sent = make_bill(units_down=jnp.where(jnp.equal(eta_g, 0), 0, state.active.sum()))
        traffic = add_to_ledger(state.traffic, sent)
        return state.replace(groups=group_sum(weights.T, groups), traffic=traffic)

    return finish


def zero_step(r: Round) -> tuple[Params, jax.Array]:
    """Leaves every model as it is: what clients train is not for them (an `AggregateFn`)."""
    mass = membership_weights(r.upload.weight, r.group, r.state.active.size).sum(0)
    return jax.tree.map(jnp.zeros_like, r.state.groups), mass


def rebase(upload: Upload, sent: Params, groups: Params, gid: jax.Array) -> Upload:
    """Returns the upload with each delta relative to the model of the client's present
    group `gid` [S]: start + delta - group.

    A client that changed its group, or whose group was given another model, trained from
    what was `sent` [m, ...]. Its group can use its model, but not its delta.
    """

    def differs(old, new):
        return jnp.any((old != new).reshape(len(old), -1), axis=1)

    changed = jax.tree.reduce(jnp.logical_or, jax.tree.map(differs, sent, groups))  # [m]
    elsewhere = ((gid != upload.start_group) | changed[gid]) & (upload.weight > 0)

    def shift() -> Upload:
        def from_new_group(delta, sent, groups):
            return delta + sent[upload.start_group] - groups[gid]

        moved = jax.tree.map(from_new_group, upload.delta, sent, groups)
        delta = where_rows(elsewhere, moved, upload.delta)
        return upload.replace(delta=delta, squared_norm=squared_norms(delta).sum(0))

    return jax.lax.cond(jnp.any(elsewhere), shift, lambda: upload)


def apply_server_optimizer(
    server: optax.GradientTransformation, state: State, step: Params, mass: jax.Array
) -> tuple[Params, Any]:
    """Applies the server optimizer to every group of positive `mass` [m]; the others keep
    their model and optimizer state. Returns both, [m, ...].
    """
    changed = (mass > 0) & state.active
    updates, new_server = jax.vmap(server.update)(
        jax.tree.map(jnp.negative, step), state.server, state.groups
    )
    updated = jax.vmap(optax.apply_updates)(state.groups, updates)
    # running statistics are averaged, whatever the optimizer does with weights
    updated = copy_statistics(updated, jax.tree.map(jnp.add, state.groups, step))

    before = state.groups, state.server
    return where_rows(changed, (updated, new_server), before)


def deviation(
    state: State, groups: Params, gid: jax.Array, upload: Upload
) -> tuple[jax.Array, jax.Array]:
    """Returns the distance [S] of each trained model from the new model of its group, and
    the cosine [S] of its delta to the group's step.

    One matrix product of all updates with all steps gives both. Squared distances are exact to
    about 1e-7 of the update's squared norm; a distance below 1/300 of the update's norm is returned
    as 0.

    Args: `state` has the old models and `groups` [m, ...] are the new ones; `gid` [S] int32 is
    the group of each slot; `upload` has deltas relative to the old models of these groups.
    """
    step = jax.tree.map(jnp.subtract, groups, state.groups)
    pairs = zip(
        *(jax.tree.leaves(drop_statistics(tree)) for tree in (upload.delta, step)), strict=True
    )
    product = sum(x.reshape(len(x), -1) @ y.reshape(len(y), -1).T for x, y in pairs)  # [S, m]
    own = jnp.take_along_axis(product, gid[:, None], axis=1)[:, 0]
    step_square = squared_norms(step).sum(0)[gid]
    gap = upload.squared_norm - 2 * own + step_square
    norms = jnp.sqrt(upload.squared_norm * step_square)
    return jnp.sqrt(jnp.where(gap > 1e-5 * upload.squared_norm, gap, 0.0)), jnp.where(
        norms > 0, own / jnp.where(norms > 0, norms, 1.0), 0.0
    )
