"""Server aggregation: each function is an `AggregateFn` (see `hooks`) or returns one.

The server adds the step [m, ...] to the group models; a group of mass 0 keeps its model.
`state` is the state before the server's step, with the cohort's groups `gid` already
in its assignment.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.client.local import Local
from fedjax_cfl.round.client_models import split_by_parameter
from fedjax_cfl.round.hooks import AggregateFn, FinishFn
from fedjax_cfl.system.traffic import make_traffic
from fedjax_cfl.tree import group_mean, group_sum, membership_weights, squared_norms
from fedjax_cfl.types import Cohort, Params, State, Traffic, Upload


def weighted_mean(
    upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
) -> tuple[Params, jax.Array]:
    """Averages the updates of each group, weighted by training samples (FedAvg).

    Args: as those of `AggregateFn`.
    """
    return group_mean(upload.weight, gid, upload.delta, state.active.size)


def uniform_mean(
    upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
) -> tuple[Params, jax.Array]:
    """Averages the updates of each group's clients whose update is used, unweighted (IFCA, FeSEM).

    Args: as those of `AggregateFn`.
    """
    return group_mean((upload.weight > 0).astype(jnp.float32), gid, upload.delta, state.active.size)


def first_client(
    upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
) -> tuple[Params, jax.Array]:
    """Takes only the update of each group's first selected client, times L / (L + 1e-5)
    for L clients: the "simple average" of the FlexCFL code (D4).

    Args: as those of `AggregateFn`.
    """
    present = membership_weights((upload.weight > 0).astype(jnp.float32), gid, state.active.size)
    count = present.sum(0)
    rank = jnp.where(present > 0, cohort.rank[:, None], jnp.iinfo(jnp.int32).max)
    first = (rank == rank.min(0)) & (present > 0)
    return group_sum(first * (count / (count + 1e-5)), upload.delta), count


def cohort_mean(
    upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
) -> tuple[Params, jax.Array]:
    """Divides each group's sum of updates by the clients of ALL groups: gradient averaging
    of IFCA (Algorithm 1, option I).

    Args: as those of `AggregateFn`.
    """
    present = membership_weights((upload.weight > 0).astype(jnp.float32), gid, state.active.size)
    return group_sum(present / jnp.maximum(present.sum(), 1.0), upload.delta), present.sum(0)


def count_trimmed(count: ArrayLike, share: ArrayLike) -> jax.Array:
    """Returns how many of `count` values are trimmed at one end, floor(share * count).

    A share of 1/2 leaves the middle one or two values: the median.
    """
    # 1e-3: shares are rounded
    return jnp.minimum(jnp.floor(share * count + 1e-3), (jnp.maximum(count, 1) - 1) // 2).astype(
        jnp.int32
    )


def trimmed_group_mean(
    present: jax.Array, gid: jax.Array, tree: Params, num_groups: int, share: ArrayLike
) -> tuple[Params, jax.Array]:
    """Returns the trimmed mean [m, ...] of each coordinate of `tree` [S, ...] within each
    group, and the number of its clients [m]. Both are 0 for an empty group.

    Only the clients `present` [S] bool count. At both ends of each coordinate
    `count_trimmed` of their values are left out. Rows are sorted by group and then by
    value, so that a row has the same group and rank in every coordinate: one sort and one
    matrix product per leaf serve all groups.

    Args: `present` [S] bool are the clients that count; `gid` [S] int32 is the group of each
    slot, 0 .. m - 1; `tree` [S, ...] is what is averaged; `num_groups` is m, static; `share`
    from 0 to 0.5 is the fraction of a group's clients left out at each end, 0.5: the median.
    """
    group = jnp.where(present, gid, num_groups)
    count = jnp.bincount(group, length=num_groups + 1)[:num_groups]
    drop = count_trimmed(count, share)
    row = jnp.sort(group)
    rank = jnp.arange(row.size) - (jnp.cumsum(count) - count)[row]
    kept = (rank >= drop[row]) & (rank < (count - drop)[row])
    coefficient = membership_weights(kept / jnp.maximum(count - 2 * drop, 1)[row], row, num_groups)

    def sort_rows(leaf):
        key = jax.vmap(lambda group: jnp.full(leaf.shape[1:], group))(group)
        return lax.sort((key, leaf), dimension=0, num_keys=2)[1]

    return group_sum(coefficient, jax.tree.map(sort_rows, tree)), count


def trimmed_mean(beta: ArrayLike, mesh: Mesh | None = None) -> AggregateFn:
    """Averages each coordinate without the fraction `beta` of a group's clients at both
    ends (Yin et al. 2018), unweighted; 0.5 is the median. The devices of `mesh` share the
    coordinates.
    """

    def aggregate(
        upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
    ) -> tuple[Params, jax.Array]:
        delta = split_by_parameter(upload.delta, mesh)
        return trimmed_group_mean(upload.weight > 0, gid, delta, state.active.size, beta)

    return aggregate


def q_fair(q: float, local: Local) -> AggregateFn:
    """Weighs clients by their loss to the power q (q-FedAvg, "Fair Resource Allocation
    in Federated Learning", Algorithm 2).

    `client_extra` [S] is the loss F_i of the model that each client received. The
    Lipschitz constant is one over the step size. q = 0 is the plain mean. A client with so
    high a loss that its share is beyond float32 is left out.
    """

    def aggregate(
        upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
    ) -> tuple[Params, jax.Array]:
        lipschitz = 1.0 / (local.lr * local.lr_scale(state.round))
        present = upload.weight > 0
        # the loss of an absent client may be anything
        loss = jnp.where(present, client_extra, 0.0) + 1e-10
        gain = loss**q
        bend = q * loss ** (q - 1) * lipschitz**2 * upload.squared_norm + lipschitz * gain
        present &= jnp.isfinite(bend)
        bend, gain = (jnp.where(present, value, 0.0) for value in (bend, gain))
        total = membership_weights(bend, gid, state.active.size).sum(0)
        coefficient = membership_weights(gain * lipschitz, gid, state.active.size)
        return group_sum(coefficient / jnp.where(total > 0, total, 1.0), upload.delta), total

    return aggregate


def inter_group(eta_g: ArrayLike, normalize: bool = True) -> FinishFn:
    """Mixes the group models with each other after aggregation, all at once (FlexCFL,
    Algorithm 2 and eq. 20).

    With `normalize` the new model is divided by the total weight, as the reference code
    does: a convex combination. Groups without clients take no part. The exchange costs m
    models down, none where `eta_g` is 0.
    """

    def finish(
        state: State, before: State, cohort: Cohort, gid: jax.Array, upload: Upload
    ) -> tuple[State, Traffic]:
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
        sent = make_traffic(units_down=jnp.where(jnp.equal(eta_g, 0), 0, state.active.sum()))
        return state.replace(groups=group_sum(weights.T, groups)), sent

    return finish


def add_inter_group(eta_g: ArrayLike) -> FinishFn:
    """Mixes as `inter_group`, but without dividing, as eq. 20 is printed (D14)."""
    return inter_group(eta_g, normalize=False)
