"""What a round reports of its updates."""

import jax
import jax.numpy as jnp

from fedjax_cfl.round.counts import make_count, sum_counts
from fedjax_cfl.round.faults import no_faults
from fedjax_cfl.round.tree import group_mean, squared_norms
from fedjax_cfl.types import Cohort, Info, State


def deviation(state: State, groups, gid, upload):
    """Returns each trained model's distance [S] from its own group's new model, and the
    cosine [S] of its delta to the group's step.

    By one matrix product of all updates with all steps; squares are right to about 1e-7
    of the update's own square, and a distance within 1/300 of its length is 0.
    """
    shift = jax.tree.map(jnp.subtract, groups, state.groups)
    pairs = zip(jax.tree.leaves(upload.delta), jax.tree.leaves(shift), strict=True)
    product = sum(x.reshape(len(x), -1) @ y.reshape(len(y), -1).T for x, y in pairs)  # [S, m]
    own = jnp.take_along_axis(product, gid[:, None], axis=1)[:, 0]
    walked = squared_norms(shift).sum(0)[gid]
    gap = upload.squared_norm - 2 * own + walked
    norms = jnp.sqrt(upload.squared_norm * walked)
    return jnp.sqrt(jnp.where(gap > 1e-5 * upload.squared_norm, gap, 0.0)), jnp.where(
        norms > 0, own / jnp.where(norms > 0, norms, 1.0), 0.0
    )


def make_info(state: State, groups, cohort: Cohort, gid, upload, mass) -> Info:
    """Returns what the updates of a round tell; the engine adds the rest. Discrepancy:
    FlexCFL eq. 3, ||trained - own group's new model||, whole and per group.
    """
    distance, cosine = deviation(state, groups, gid, upload)
    trained = (upload.weight > 0).astype(jnp.float32)
    (per_group,), count = group_mean(trained, gid, (distance,), state.active.size)
    known = state.assignment[jnp.minimum(cohort.ids, state.assignment.size - 1)] >= 0
    real = cohort.ids < state.assignment.size
    asked = jnp.any((gid[:, None] == jnp.arange(mass.size)) & real[:, None], axis=0)
    clients = jnp.maximum(trained.sum(), 1.0)
    samples = jnp.maximum(upload.weight.sum(), 1.0)
    return Info(
        loss=jnp.sum(upload.weight * upload.loss) / samples,
        last_loss=jnp.sum(upload.weight * upload.last_loss) / samples,
        discrepancy=jnp.sum(per_group * count) / clients,
        group_discrepancy=jnp.where(count > 0, per_group, jnp.nan),
        dissimilarity=jnp.sum(trained * (1.0 - cosine) / 2) / clients,
        selected=real.sum().astype(jnp.int32),
        clients=trained.sum().astype(jnp.int32),
        steps=sum_counts(make_count(upload.steps)),
        cold=jnp.sum(real & ~known).astype(jnp.int32),
        shifted=jnp.zeros((), jnp.int32),
        migrated=jnp.zeros((), jnp.int32),
        fault_counts=no_faults(),
        idle_groups=jnp.sum(asked & (mass == 0)).astype(jnp.int32),
        late=jnp.zeros((), jnp.int32),
        seconds=jnp.zeros(()),
    )
