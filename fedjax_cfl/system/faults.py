"""Simulated faults of clients, and the server's guard against updates that are not finite.

What clients send beside their model, `Upload.extra`, is lost with an update that is dropped or
comes too late, and is as good as an update that is not finite if one of its numbers is not. `nan`
and attacks change the model alone.

Every fault is drawn by client and round: the seed alone says which client fails in which
round, whatever the algorithm, the executor or the devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedjax_cfl.client.executor import as_program, map_result
from fedjax_cfl.data.federated import check_classes
from fedjax_cfl.keys import draw_permutation
from fedjax_cfl.tree import squared_leaf_norms, squared_norms, take_rows
from fedjax_cfl.types import Cohort, FaultCounts, FederatedData, Key, Params, Upload
from fedjax_cfl.validation import Fraction, NonNegativeFloat

DROPOUT, STRAGGLER, NAN, NOISE = range(4)  # purposes of draws, see `client_keys`


class Faults(NamedTuple):
    """What goes wrong with clients, as probabilities per client and round, and what the
    server does about it.
    """

    # downloads, but uploads nothing: neither its model nor what goes up with it
    dropout: Fraction = 0.0
    straggler: Fraction = 0.0  # completes only a uniformly drawn share of its local steps
    nan: Fraction = 0.0  # sends a model that is not finite
    byzantine: Fraction = 0.0  # share of ALL clients that attack whenever they take part
    # sign_flip: -scale * delta | noise: delta + scale * ||delta|| * unit noise | label_flip:
    # trains on labels C - 1 - y
    attack: Literal["sign_flip", "noise", "label_flip"] = "sign_flip"
    scale: NonNegativeFloat = 1.0
    # an update that is not finite: skip (weight 0) | zero (its bad entries become 0) | raise (the
    # run stops and names it)
    nonfinite: Literal["skip", "zero", "raise"] = "skip"


def client_keys(key: Key, purpose: int, cohort: Cohort) -> Key:
    """Returns one key [S] for each client of the cohort, derived from its id."""
    return jax.vmap(lambda client: jax.random.fold_in(jax.random.fold_in(key, purpose), client))(
        cohort.ids
    )


def draw_failures(key: Key, purpose: int, cohort: Cohort, chance: float) -> jax.Array:
    """Returns which clients [S] bool of the cohort fail, each with this probability."""
    return jax.vmap(jax.random.uniform)(client_keys(key, purpose, cohort)) < chance


def draw_byzantine(faults: Faults, key: Key, num_clients: int) -> jax.Array:
    """Returns the clients [K] bool that attack: round(byzantine * K), the same in every
    round.
    """
    count = round(faults.byzantine * num_clients)
    return draw_permutation(key, num_clients) < count


def apply_stragglers(
    faults: Faults, key: Key, cohort: Cohort, step_fraction: jax.Array
) -> jax.Array:
    """Returns the share [S] of its local steps that each client completes: `step_fraction`,
    or for a straggler a part of it.
    """
    if not faults.straggler:
        return step_fraction
    late, part = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(
        client_keys(key, STRAGGLER, cohort)
    ).T
    return jnp.where(late < faults.straggler, step_fraction * part, step_fraction)


def flip_labels(faults: Faults, attackers: jax.Array, data: FederatedData) -> FederatedData:
    """Returns the data that clients train on: with label_flip, attackers [K] see C - 1 - y."""
    if not faults.byzantine or faults.attack != "label_flip":
        return data
    check_classes(data, "faults.attack=label_flip", "use sign_flip or noise")
    of_attackers = (data.owner >= 0) & attackers[data.owner]
    return data.replace(y=jnp.where(of_attackers, data.num_classes - 1 - data.y, data.y))


def apply_attack(
    faults: Faults, key: Key, cohort: Cohort, upload: Upload, attackers: jax.Array
) -> Upload:
    """Returns the upload with the deltas of the `attackers` [S] bool changed by their attack.

    Args: `key` is the round's for faults, from which noise is derived by client; `attackers`
    [S] bool are the slots whose clients attack; `faults.scale` is the attack's strength.
    """
    if faults.attack == "sign_flip":
        factor = jnp.where(attackers, -faults.scale, 1.0)
        delta = jax.tree.map(partial(jax.vmap(jnp.multiply), factor), upload.delta)
        return upload.replace(delta=delta)
    if faults.attack != "noise":
        return upload
    leaves, shape = jax.tree.flatten(upload.delta)
    size = sum(leaf[0].size for leaf in leaves)
    norm = jnp.sqrt(squared_norms(upload.delta).sum(0))
    reach = jnp.where(attackers, faults.scale * norm / size**0.5, 0.0)
    # [S, leaves]
    keys = jax.vmap(lambda key: jax.random.split(key, len(leaves)))(client_keys(key, NOISE, cohort))

    def noisy(number, leaf):
        noise = jax.vmap(lambda key, reach: reach * jax.random.normal(key, leaf.shape[1:]))
        return leaf + noise(keys[:, number], reach)

    return upload.replace(
        delta=jax.tree.unflatten(shape, [noisy(number, leaf) for number, leaf in enumerate(leaves)])
    )


def guard_nonfinite(policy: str, upload: Upload) -> tuple[Upload, jax.Array, jax.Array]:
    """Applies the policy to updates that are not finite; the result is finite, except that a
    loss is as the client reports it, and that `extra` is left to `clear_extra`.

    An update whose squared norm is beyond float32 counts as not finite, and one with a number
    in its `extra` that is not. Returns (upload, bad [S] bool, number of the first bad leaf [S],
    that after the last one for `extra`, -1 for none).
    """
    each = squared_leaf_norms(upload.delta)
    spoilt = (upload.weight > 0) & find_nonfinite(upload.extra, upload.weight.shape)
    finite = jnp.concatenate([jnp.isfinite(each), ~spoilt[None]])
    bad = ~jnp.isfinite(each.sum(0)) | spoilt
    upload = clear_losses(bad | (upload.weight == 0), upload)
    if policy == "zero":
        delta, weight = jax.tree.map(clear_nonfinite, upload.delta), upload.weight
        whole = squared_norms(delta).sum(0)
    else:
        delta, weight = fill_rows(bad, 0.0, upload.delta), jnp.where(bad, 0.0, upload.weight)
        whole = jnp.where(bad, 0.0, squared_norms(upload.delta).sum(0))
    return (
        upload.replace(delta=delta, weight=weight, squared_norm=whole),
        bad,
        jnp.where(bad, jnp.argmin(finite, axis=0), -1),
    )


def clear_extra(upload: Upload, bad: jax.Array) -> Upload:
    """Returns the upload of a cohort with 0 for what clients sent beside a model that is skipped,
    and for any other number of it that is not finite.

    `bad` [S] bool is that of `guard_nonfinite`, which looks at one client at a time. This is done
    for all of them afterwards: within a client's program it would change how that is compiled.
    """
    extra = fill_rows(bad & (upload.weight == 0), 0.0, upload.extra)
    return upload.replace(extra=jax.tree.map(clear_nonfinite, extra))


def inject_faults(
    faults: Faults, key: Key, cohort: Cohort, upload: Upload, attackers: jax.Array
) -> tuple[Upload, FaultCounts]:
    """Applies faults to what the cohort sends, and then the guard against updates that are not
    finite. Returns also what went wrong with each slot [S], see `FaultCounts`.

    Args: `key` is the round's for faults, from which every draw is derived by client;
    `attackers` [K] bool are the clients that attack, see `draw_byzantine`.
    """
    real = upload.weight > 0
    attacks = silent = jnp.zeros_like(real)
    if faults.byzantine:
        attacks = real & cohort.take(attackers)
        upload = apply_attack(faults, key, cohort, upload, attacks)
    if faults.nan:
        broken = real & draw_failures(key, NAN, cohort, faults.nan)
        upload = upload.replace(delta=fill_rows(broken, jnp.nan, upload.delta))
    if faults.dropout:
        silent = real & draw_failures(key, DROPOUT, cohort, faults.dropout)
        upload = drop_updates(silent, upload)
    upload, bad, layer = guard_nonfinite(faults.nonfinite, upload)
    dropped, nonfinite, attacked = (each.astype(jnp.int32) for each in (silent, bad, attacks))
    culprit = jnp.where(bad[:, None], jnp.stack([cohort.ids, layer], axis=1), -1)
    return upload, FaultCounts(dropped, nonfinite, attacked, culprit.astype(jnp.int32))


def with_faults(faults: Faults, solve: Callable[..., Any]) -> Partial:
    """Returns a function of one client, as `solve`, that gives (Upload, FaultCounts).

    Faults are applied while the client's update is still in the cache. Its `shared` is
    (that of `solve`, (the key, the attackers [K] bool of `inject_faults`)).
    """

    def solve_with_faults(solve, client, data, shared, client_inputs):
        own, (key, attackers) = shared

        def send(upload: Upload) -> tuple[Upload, FaultCounts]:
            cohort = Cohort(client[None], jnp.zeros(1, jnp.int32))
            each = jax.tree.map(lambda leaf: leaf[None], upload)
            return take_rows(inject_faults(faults, key, cohort, each, attackers), 0)

        return map_result(as_program(solve(client, data, own, client_inputs)), send)

    return Partial(solve_with_faults, solve if isinstance(solve, Partial) else Partial(solve))


def drop_updates(dropped: jax.Array, upload: Upload) -> Upload:
    """Returns the upload without the updates of the slots `dropped` [S] bool."""
    norm = upload.squared_norm
    return clear_losses(dropped, upload).replace(
        delta=fill_rows(dropped, 0.0, upload.delta),
        weight=jnp.where(dropped, 0.0, upload.weight),
        squared_norm=None if norm is None else jnp.where(dropped, 0.0, norm),
        extra=fill_rows(dropped, 0.0, upload.extra),
    )


def clear_losses(unused: jax.Array, upload: Upload) -> Upload:
    """Returns the upload with losses of 0 in place of those that are not finite, in the slots
    `unused` [S] bool: in a mean their weight is 0, and 0 times infinity is not.
    """
    loss, last_loss = (
        jnp.where(unused & ~jnp.isfinite(loss), 0.0, loss)
        for loss in (upload.loss, upload.last_loss)
    )
    return upload.replace(loss=loss, last_loss=last_loss)


def fill_rows(rows: jax.Array, value: ArrayLike, tree: Params) -> Params:
    """Returns `tree` [S, ...] with `value` everywhere in the `rows` [S] bool."""

    def fill(leaf):
        return jax.vmap(jnp.where, (0, None, 0))(rows, jnp.asarray(value, leaf.dtype), leaf)

    return jax.tree.map(fill, tree)


def find_nonfinite(tree: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns which rows [S] bool of `tree` [S, ...] have a number that is not finite; `shape`
    is (S,).
    """
    bad = jnp.zeros(shape, bool)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            bad |= ~jnp.isfinite(leaf).all(axis=tuple(range(1, leaf.ndim)))
    return bad


def clear_nonfinite(leaf: jax.Array) -> jax.Array:
    """Returns an array with 0 in the place of every number that is not finite."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    return jnp.where(jnp.isfinite(leaf), leaf, 0.0)
