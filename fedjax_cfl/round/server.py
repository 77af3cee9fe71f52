"""What the server does with updates before it averages them, and with the average."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_cfl.models.statistics import copy_statistics
from fedjax_cfl.tree import squared_norms, where_rows
from fedjax_cfl.types import Params, State, Upload


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
