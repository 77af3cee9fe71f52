"""Centers that grow: FeSEM-MA with units that no model uses at first (PFNM, SPAHM, see
`matching`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.algorithms.fesem import rows_of
from fedjax_cfl.algorithms.matching import (
    MIN_VARIANCE_RATIO,
    Layer,
    align_to_posterior,
    atom_parts,
    find_used_units,
    layer_atoms,
    permute_hidden_units,
)
from fedjax_cfl.data.federated import train_label_counts
from fedjax_cfl.round import tree
from fedjax_cfl.round.hooks import AggregateFn, RegroupFn
from fedjax_cfl.round.tree import group_sum
from fedjax_cfl.types import Cohort, FederatedData, Key, Params, State, Upload


class MatchedModels(struct.PyTreeNode):
    """What the server keeps of every client."""

    models: Params  # [K, ...], W_i, the model it last sent, with its units in a center's order
    # [K] bool; False: the client never trained, does not count in the means, stays in its group
    known: jax.Array
    counts: jax.Array  # [K, C] int32, training samples per class when it last trained


def recount(
    key: Key, state: State, data: FederatedData, cohort: Cohort, gid: jax.Array, upload: Upload
) -> tuple[State, jax.Array]:
    """Renews the class counts of the clients that trained (a `RegroupFn`): their data may
    have changed.
    """
    rows = rows_of(cohort, upload, state.memory)
    new = train_label_counts(data)[jnp.minimum(cohort.ids, data.num_clients - 1)]
    return (
        state.replace(
            memory=state.memory.replace(counts=state.memory.counts.at[rows].set(new, mode="drop"))
        ),
        gid,
    )


def nearest_center_in_use(layers: tuple[Layer, ...], models: Params, centers: Params) -> jax.Array:
    """Returns the center [N] int32 nearest to each of `models` [N, ...], without the units
    that the model does not have.

    With them, a center that grows would move away from its clients' earlier models.
    """
    total, before = 0.0, None
    for layer in layers:
        own = (
            jax.vmap(find_used_units, (None, 0))(layer, models)
            if layer is not layers[-1]
            else jnp.ones((1, layer.width))
        )
        for name, part in atom_parts(layer, centers):
            model, center = models[name][part], centers[name][part]
            mean = jnp.mean(center, axis=0)
            apart = center - mean
            inputs = before if part == "kernel" and before is not None else jnp.ones((1, 1))
            blocks = (
                ((center + mean) * apart)
                .reshape(len(center), -1, inputs.shape[1], layer.width)
                .sum(1)
            )
            product = jnp.matmul(
                model.reshape(len(model), -1),
                apart.reshape(len(center), -1).T,
                precision=jax.lax.Precision.HIGHEST,
            )
            total += (
                jnp.einsum("ni,gio,no->ng", inputs.astype(float), blocks, own.astype(float))
                - 2 * product
            )
        before = own
    return jnp.argmin(total, axis=1).astype(jnp.int32)


def store_matched_models(layers: tuple[Layer, ...]) -> RegroupFn:
    """Renews class counts, and stores the cohort's models with their units in the order of
    the posterior of their group.

    Models are placed one after another, each by the models of earlier rounds and those
    placed before it: two clients with the same new unit share one.
    """

    def regroup(
        key: Key, state: State, data: FederatedData, cohort: Cohort, gid: jax.Array, upload: Upload
    ) -> tuple[State, jax.Array]:
        state, gid = recount(key, state, data, cohort, gid, upload)
        memory, m, rows, trained = (
            state.memory,
            state.active.size,
            rows_of(cohort, upload, state.memory),
            upload.weight > 0,
        )
        assignment = state.assignment.at[cohort.ids].set(gid, mode="drop")
        others = tree.membership_weights(
            memory.known.at[rows].set(False, mode="drop").astype(jnp.float32), assignment, m
        )
        number = others.sum(0) + tree.membership_weights(trained.astype(jnp.float32), gid, m).sum(0)
        owns = [jax.vmap(find_used_units, (None, 0))(layer, memory.models) for layer in layers[:-1]]
        known = tree.membership_weights(memory.known.astype(jnp.float32), assignment, m)
        spreads = [
            estimate_variances(layer, memory.models, own, state.groups, known)
            for layer, own in zip(layers[:-1], owns, strict=True)
        ]

        place = partial(place_model, layers, state.groups, spreads, number)
        initial = group_sum(others, memory.models), [others.T @ own for own in owns]
        models = jax.lax.scan(place, initial, (gid, upload.delta, trained))[1]
        stored = jax.tree.map(
            lambda old, new: old.at[rows].set(new, mode="drop"), memory.models, models
        )
        return (
            state.replace(
                memory=memory.replace(
                    models=stored, known=memory.known.at[rows].set(True, mode="drop")
                )
            ),
            gid,
        )

    return regroup


def place_model(
    layers: tuple[Layer, ...],
    groups: Params,
    spreads: Sequence[tuple[jax.Array, jax.Array, jax.Array]],
    number: jax.Array,
    carry: tuple[Params, list[jax.Array]],
    one: tuple[jax.Array, Params, jax.Array],
) -> tuple[tuple[Params, list[jax.Array]], Params]:
    """Brings the units of one model into the order of its group's posterior, and adds the
    model to it.

    `carry` is what the posterior is made of: the sums [m, ...] of the groups' models and
    the counts [m, W] of their units. `one` is (group, delta, whether it counts), `number`
    [m] that of each group's models. Returns (carry, model).
    """
    sums, counts = carry
    group, delta, counted = one
    center, own_sums, own_counts, own_spreads = jax.tree.map(
        lambda leaf: leaf[group], (groups, sums, counts, spreads)
    )
    model = jax.tree.map(jnp.add, center, delta)
    orders = align_to_posterior(
        layers, model, center, own_sums, own_counts, own_spreads, number[group]
    )
    model = permute_hidden_units(layers, model, orders)
    used = [find_used_units(layer, model) for layer in layers[:-1]]
    added = jax.tree.map(
        lambda leaf, new: leaf.at[group].add(jnp.where(counted, new, 0)), carry, (model, used)
    )
    return added, model


def estimate_variances(
    layer: Layer, models: Params, owns: jax.Array, groups: Params, members: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Estimates the prior mean [m, D] of a layer's atoms, and the variances [m] of a
    parameter around its atom and of the atoms, by moments.

    Args: `models` [K, ...] that have the units `owns` [K, W] bool; the atoms of a group are
    those of its center, `groups` [m, ...]; `members` [K, m] is 1 in the column of a
    client's group.
    """
    centers, used = (
        jax.vmap(layer_atoms, (None, 0))(layer, groups),
        jax.vmap(find_used_units, (None, 0))(layer, groups),
    )
    count = jnp.maximum(used.sum(1), 1)
    mean = jnp.sum(centers, axis=1) / count[:, None]
    apart = jnp.sum(jnp.where(used[..., None], centers - mean[:, None], 0) ** 2, axis=(1, 2))
    sigma0 = apart / (mean.shape[1] * jnp.maximum(count - 1, 1))

    def gap(model, owned, weight):
        center = jax.tree.map(lambda leaf: leaf[jnp.argmax(weight)], groups)
        return jnp.sum(
            jnp.where(owned[:, None], layer_atoms(layer, model) - layer_atoms(layer, center), 0)
            ** 2
        )

    within = members.T @ jax.lax.map(lambda one: gap(*one), (models, owns, members))
    sigma = within / (mean.shape[1] * jnp.maximum((members.T @ owns).sum(1) - count, 1))
    return (
        mean,
        jnp.maximum(sigma, MIN_VARIANCE_RATIO * sigma0),
        jnp.maximum(sigma0, MIN_VARIANCE_RATIO**2),
    )


def mean_over_owners(mean: AggregateFn, layers: tuple[Layer, ...]) -> AggregateFn:
    """Averages, by `mean`, the models that `store_matched_models` has stored; each hidden
    unit over the models that have it.
    """

    def aggregate(
        upload: Upload, gid: jax.Array, cohort: Cohort, client_extra: Any, state: State
    ) -> tuple[Params, jax.Array]:
        step, mass = mean(
            upload.replace(weight=jnp.zeros_like(upload.weight)), gid, cohort, client_extra, state
        )
        members = tree.membership_weights(
            state.memory.known.astype(jnp.float32), state.assignment, state.active.size
        )
        for layer in layers[:-1]:
            owners = members.T @ jax.vmap(find_used_units, (None, 0))(layer, state.memory.models)
            share = jnp.maximum(owners, 1) / jnp.maximum(mass, 1)[:, None]

            def shared(center, part, share=share):
                return (center + part) / share.reshape(
                    len(share), *(1,) * (center.ndim - 2), -1
                ) - center

            step = {
                **step,
                layer.name: jax.tree.map(shared, state.groups[layer.name], step[layer.name]),
            }
        return step, mass

    return aggregate
