"""Server aggregation: functions (upload, gid [S], cohort, client_extra, state) -> (step
[m, ...], mass [m]).

`step` is what the server adds to each group's model; a group of mass 0 keeps its model.
`state` is that of the round's beginning, but for the assignment, which already is `gid`
for the cohort.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.round.local import Local
from fedjax_cfl.round.traffic import make_traffic
from fedjax_cfl.round.tree import group_mean, group_sum, membership_weights, squared_norms
from fedjax_cfl.types import Cohort, State, Upload


def weighted_mean(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Means weighted by training samples (FedAvg)."""
    return group_mean(upload.weight, gid, upload.delta, state.active.size)


def uniform_mean(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Plain means of the clients that have data (IFCA, FeSEM)."""
    return group_mean((upload.weight > 0).astype(jnp.float32), gid, upload.delta, state.active.size)


def first_client(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Only the update of the group's first selected client, times L / (L + 1e-5), L
    clients: the FlexCFL code's "simple average" (D4).
    """
    present = membership_weights((upload.weight > 0).astype(jnp.float32), gid, state.active.size)
    count = present.sum(0)
    rank = jnp.where(present > 0, cohort.rank[:, None], jnp.iinfo(jnp.int32).max)
    first = (rank == rank.min(0)) & (present > 0)
    return group_sum(first * (count / (count + 1e-5)), upload.delta), count


def cohort_mean(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
    """Sums divided by ALL participants, not the group's: gradient averaging of IFCA
    (Algorithm 1, option I).
    """
    present = membership_weights((upload.weight > 0).astype(jnp.float32), gid, state.active.size)
    return group_sum(present / jnp.maximum(present.sum(), 1.0), upload.delta), present.sum(0)


def count_trimmed(count, share):
    """Returns how many of `count` values are trimmed at one end, floor(share * count);
    1/2 leaves the middle one or two: the median.
    """
    return jnp.minimum(jnp.floor(share * count + 1e-3), (jnp.maximum(count, 1) - 1) // 2).astype(
        jnp.int32
    )  # 1e-3: shares are rounded


def trimmed_group_mean(present, gid, tree, num_groups, share):
    """Returns the coordinate-wise trimmed mean of `tree` [S, ...] within each group [m,
    ...], and its clients [m]; 0 for an empty group.

    At either end of each coordinate `count_trimmed` values of the clients `present` [S]
    bool play no part. Rows are sorted by group and then by value, so that a row has the
    same group and rank in every coordinate: one sort and one matrix product a leaf, for
    all groups.
    """
    group = jnp.where(present, gid, num_groups)
    count = jnp.bincount(group, length=num_groups + 1)[:num_groups]
    drop = count_trimmed(count, share)
    row = jnp.sort(group)
    rank = jnp.arange(row.size) - (jnp.cumsum(count) - count)[row]
    kept = (rank >= drop[row]) & (rank < (count - drop)[row])
    coefficient = membership_weights(kept / jnp.maximum(count - 2 * drop, 1)[row], row, num_groups)

    def ordered(leaf):
        key = jax.vmap(lambda group: jnp.full(leaf.shape[1:], group))(group)
        return lax.sort((key, leaf), dimension=0, num_keys=2)[1]

    return group_sum(coefficient, jax.tree.map(ordered, tree)), count


def trimmed_mean(beta):
    """Plain means of each coordinate without the fraction `beta` of a group's clients
    at either end (Yin et al. 2018); 0.5: the median.
    """

    def aggregate(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
        return trimmed_group_mean(upload.weight > 0, gid, upload.delta, state.active.size, beta)

    return aggregate


def q_fair(q: float, local: Local):
    """Weighs clients by their loss to the power q (q-FedAvg, "Fair Resource Allocation
    in Federated Learning", Algorithm 2).

    `client_extra` [S] is each client's loss F_i of the received model. The Lipschitz
    constant is one over the step size. q = 0 is the plain mean. A client with so high a
    loss that its share is beyond float32 is left out.
    """

    def aggregate(upload: Upload, gid, cohort: Cohort, client_extra, state: State):
        lipschitz = 1.0 / (local.lr * local.lr_scale(state.round))
        present = upload.weight > 0
        loss = jnp.where(present, client_extra, 0.0) + 1e-10  # an absent client's may be anything
        gain = loss**q
        bend = q * loss ** (q - 1) * lipschitz**2 * upload.squared_norm + lipschitz * gain
        present &= jnp.isfinite(bend)
        bend, gain = (jnp.where(present, value, 0.0) for value in (bend, gain))
        total = membership_weights(bend, gid, state.active.size).sum(0)
        coefficient = membership_weights(gain * lipschitz, gid, state.active.size)
        return group_sum(coefficient / jnp.where(total > 0, total, 1.0), upload.delta), total

    return aggregate


def inter_group(eta_g, normalize: bool = True) -> Callable:
    """Mixes the group models with each other after aggregation (FlexCFL, Algorithm 2
    and eq. 20), from simultaneous old values.

    Divides by the total weight, a convex combination (the reference code).
    Returns the `finish` of a round; groups that own no client take no part. The exchange
    costs m models (none where a traced eta_g is 0).
    """

    def finish(state: State, before: State, cohort: Cohort, gid, upload: Upload):
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
        sent = make_traffic(units_down=jnp.where(jnp.equal(eta_g, 0), 0, pull.size))
        return state.replace(groups=group_sum(weights.T, groups)), sent

    return finish


def add_inter_group(eta_g) -> Callable:
    """As `inter_group`, but adds without dividing, as eq. 20 is printed (D14)."""
    return inter_group(eta_g, normalize=False)
