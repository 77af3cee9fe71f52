"""What a round reports about its updates."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_cfl.models.statistics import drop_statistics
from fedjax_cfl.round.client_models import take_models
from fedjax_cfl.system.counts import make_count, sum_counts
from fedjax_cfl.system.faults import no_faults
from fedjax_cfl.tree import group_mean, squared_norms
from fedjax_cfl.types import Cohort, Info, Params, State, Upload


def deviation(
    state: State, groups: Params, gid: jax.Array, upload: Upload, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the distance [S] of each trained model from the new model of its group, and
    the cosine [S] of its delta to the group's step.

    Where groups are few, one matrix product of all updates with all steps gives both. Squared
    distances are exact to about 1e-7 of the update's squared norm; a distance below 1/300 of
    the update's norm is returned as 0.

    Args: `state` has the old models and `groups` [m, ...] are the new ones; `gid` [S] int32 is
    the group of each slot; `upload` has deltas relative to the old models of these groups; the
    devices of `mesh` share groups that are one client's each, None: one device.
    """
    step = jax.tree.map(jnp.subtract, groups, state.groups)
    alone = state.active.size >= gid.size  # a group for each client
    steps = take_models(step, gid, mesh) if alone else step
    pairs = zip(
        *(jax.tree.leaves(drop_statistics(tree)) for tree in (upload.delta, steps)), strict=True
    )
    if alone:
        own = sum(jnp.sum(x * y, axis=tuple(range(1, x.ndim))) for x, y in pairs)
    else:
        product = sum(x.reshape(len(x), -1) @ y.reshape(len(y), -1).T for x, y in pairs)  # [S, m]
        own = jnp.take_along_axis(product, gid[:, None], axis=1)[:, 0]
    step_square = squared_norms(step).sum(0)[gid]
    gap = upload.squared_norm - 2 * own + step_square
    norms = jnp.sqrt(upload.squared_norm * step_square)
    return jnp.sqrt(jnp.where(gap > 1e-5 * upload.squared_norm, gap, 0.0)), jnp.where(
        norms > 0, own / jnp.where(norms > 0, norms, 1.0), 0.0
    )


def part_models(upload: Upload, gid: jax.Array, groups: Params) -> tuple[Upload, jax.Array]:
    """Returns the upload with one model in each slot, and the group of each: itself, or, where
    each client has trained all m models (`upload.delta` is [S, m, ...]), that of S m slots.

    Args: `gid` [S] int32 is the group of each slot; `groups` [m, ...] are the models.
    """
    leaf, whole = (jax.tree.leaves(tree)[0] for tree in (groups, upload.delta))
    if leaf.ndim == whole.ndim:
        return upload, gid
    clients, count = whole.shape[:2]
    delta = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), upload.delta)
    parted = upload.replace(
        delta=delta,
        weight=jnp.repeat(upload.weight, count),
        squared_norm=squared_norms(delta).sum(0),
    )
    return parted, jnp.tile(jnp.arange(count, dtype=gid.dtype), clients)


def make_info(
    state: State,
    groups: Params,
    cohort: Cohort,
    gid: jax.Array,
    upload: Upload,
    mass: jax.Array,
    mesh: Mesh | None = None,
) -> Info:
    """Returns what is known from a round's updates; `System.close` adds the rest.

    The discrepancy is that of FlexCFL, eq. 3: ||trained - new model of its own group||, over
    all clients and per group.

    Args: `state`, `groups`, `gid`, `upload` and `mesh` are those of `deviation`; `mass` [m] is
    the weight behind each group's step, 0: its model stayed.
    """
    each, own = part_models(upload, gid, groups)
    distance, cosine = deviation(state, groups, own, each, mesh)
    trained = (upload.weight > 0).astype(jnp.float32)
    used = trained if each is upload else (each.weight > 0).astype(jnp.float32)
    (per_group,), count = group_mean(used, own, (distance,), state.active.size)
    known = cohort.take(state.assignment) >= 0
    real = cohort.ids < state.assignment.size
    in_cohort = jnp.any((gid[:, None] == jnp.arange(mass.size)) & real[:, None], axis=0)
    models = jnp.maximum(used.sum(), 1.0)
    samples = jnp.maximum(upload.weight.sum(), 1.0)

    def if_any(mean: jax.Array) -> jax.Array:
        """Returns a mean over clients; NaN where no client's update is used."""
        return jnp.where(trained.any(), mean, jnp.nan)

    return Info(
        loss=if_any(jnp.sum(upload.weight * upload.loss) / samples),
        last_loss=if_any(jnp.sum(upload.weight * upload.last_loss) / samples),
        discrepancy=if_any(jnp.sum(per_group * count) / models),
        group_discrepancy=jnp.where(count > 0, per_group, jnp.nan),
        dissimilarity=if_any(jnp.sum(used * (1.0 - cosine) / 2) / models),
        selected=real.sum().astype(jnp.int32),
        clients=trained.sum().astype(jnp.int32),
        steps=sum_counts(make_count(upload.steps)),
        cold=jnp.sum(real & ~known).astype(jnp.int32),
        shifted=jnp.zeros((), jnp.int32),
        migrated=jnp.zeros((), jnp.int32),
        reclustered=jnp.zeros((), jnp.int32),
        fault_counts=no_faults(),
        idle_groups=jnp.sum(in_cohort & (mass == 0)).astype(jnp.int32),
        late=jnp.zeros((), jnp.int32),
        seconds=jnp.zeros(()),
    )
