"""Simulated faults of clients, fixed by the seed and counted; and the server's guard against updates that are not finite.

Faults are data: which client fails in which round is drawn per client and round, whatever the algorithm, chunks or devices.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.errors import InputError, require
from fedjax_cfl.round.tree import squares
from fedjax_cfl.types import Cohort, FederatedData, Lost, Upload

ATTACKS = ("sign_flip", "noise", "label_flip")
POLICIES = ("skip", "raise", "zero")
DROPOUT, STRAGGLER, NAN, NOISE = range(4)  # purposes, below the engine's own


class Faults(NamedTuple):
    """What goes wrong with clients, as chances per client and round (fractions), and what the server does about it."""

    dropout: float = 0.0  # never answers: downloads, but uploads nothing
    straggler: float = 0.0  # only manages a uniformly drawn part of its local steps
    nan: float = 0.0  # sends an update that is not finite
    byzantine: float = 0.0  # share of ALL clients that attack in every round they take part in
    attack: str = "sign_flip"  # sign_flip: -scale * delta | noise: delta + scale * ||delta|| * unit noise | label_flip: trains on C - 1 - y
    scale: float = 1.0
    nonfinite: str = "skip"  # update not finite: skip (weight 0) | zero (its bad entries become 0) | raise (the run stops, naming it)

    def checked(self) -> "Faults":
        """Returns itself. Raises InputError for a value that is not allowed."""
        for name in ("dropout", "straggler", "nan", "byzantine"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"faults.{name}={getattr(self, name)}: must be a number from 0 to 1")
        require("faults.attack", self.attack, ATTACKS)
        require("faults.nonfinite", self.nonfinite, POLICIES)
        return self


def own_keys(key, purpose: int, cohort: Cohort):
    """Returns a key [S] for each client of the cohort, by its id."""
    return jax.vmap(lambda client: jax.random.fold_in(jax.random.fold_in(key, purpose), client))(cohort.ids)


def drawn(key, purpose: int, cohort: Cohort, chance: float):
    """Returns [S] bool: each client of the cohort fails with this chance, by its id."""
    return jax.vmap(jax.random.uniform)(own_keys(key, purpose, cohort)) < chance


def hostile(faults: Faults, key, num_clients: int):
    """Returns [K] bool: the clients that attack, round(byzantine * K) of them, the same in every round."""
    count = round(faults.byzantine * num_clients)
    lots = jax.random.permutation(key, num_clients)
    return lots < count


def slowed(faults: Faults, key, cohort: Cohort, effort):
    """Returns the share [S] of its local steps that each client manages."""
    if not faults.straggler:
        return effort
    late, part = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(own_keys(key, STRAGGLER, cohort)).T
    return jnp.where(late < faults.straggler, effort * part, effort)


def flipped(faults: Faults, hostile_clients, data: FederatedData) -> FederatedData:
    """Returns the data that are trained on: under label_flip hostile clients see C - 1 - y."""
    if not faults.byzantine or faults.attack != "label_flip":
        return data
    theirs = (data.owner >= 0) & hostile_clients[data.owner]
    return data.replace(y=jnp.where(theirs, data.num_classes - 1 - data.y, data.y))


def attacked(faults: Faults, key, cohort: Cohort, upload: Upload, by):
    """Returns the upload with the deltas of the clients `by` [S] bool attacked."""
    if faults.attack == "sign_flip":
        factor = jnp.where(by, -faults.scale, 1.0)
        return upload.replace(delta=jax.tree.map(partial(jax.vmap(jnp.multiply), factor), upload.delta))
    if faults.attack != "noise":
        return upload
    leaves, shape = jax.tree.flatten(upload.delta)
    size = sum(leaf[0].size for leaf in leaves)
    norm = jnp.sqrt(squares(upload.delta).sum(0))
    reach = jnp.where(by, faults.scale * norm / size**0.5, 0.0)
    keys = jax.vmap(lambda key: jax.random.split(key, len(leaves)))(own_keys(key, NOISE, cohort))  # [S, leaves]

    def noisy(number, leaf):
        noise = jax.vmap(lambda key, reach: reach * jax.random.normal(key, leaf.shape[1:]))
        return leaf + noise(keys[:, number], reach)

    return upload.replace(delta=jax.tree.unflatten(shape, [noisy(number, leaf) for number, leaf in enumerate(leaves)]))


def screened(policy: str, upload: Upload):
    """Applies the policy; returns (upload, bad [S] bool, number of the first bad leaf [S], -1 for none). No NaN leaves here.

    An update whose square is beyond float32 counts as not finite.
    """
    each = squares(upload.delta)
    finite, whole = jnp.isfinite(each), each.sum(0)
    bad = ~jnp.isfinite(whole)
    losses = (jnp.where(bad & ~jnp.isfinite(loss), 0.0, loss) for loss in (upload.loss, upload.last_loss))
    if policy == "zero":
        delta, weight = jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), upload.delta), upload.weight
        whole = squares(delta).sum(0)
    else:
        delta, weight = filled(bad, 0.0, upload.delta), jnp.where(bad, 0.0, upload.weight)
        whole = jnp.where(bad, 0.0, whole)
    return Upload(delta, weight, *losses, upload.steps, whole), bad, jnp.where(bad, jnp.argmin(finite, axis=0), -1)


def suffered(faults: Faults, key, cohort: Cohort, upload: Upload, hostile_clients):
    """Lets faults happen to what the cohort sends, then screens it; returns (upload, Lost)."""
    real = upload.weight > 0
    attackers = real & hostile_clients[jnp.minimum(cohort.ids, hostile_clients.size - 1)] if faults.byzantine else jnp.zeros_like(real)
    if faults.byzantine:
        upload = attacked(faults, key, cohort, upload, attackers)
    if faults.nan:
        broken = real & drawn(key, NAN, cohort, faults.nan)
        upload = upload.replace(delta=filled(broken, jnp.nan, upload.delta))
    silent = real & drawn(key, DROPOUT, cohort, faults.dropout) if faults.dropout else jnp.zeros_like(real)
    if faults.dropout:
        upload = upload.replace(delta=filled(silent, 0.0, upload.delta), weight=jnp.where(silent, 0.0, upload.weight))
    upload, bad, layer = screened(faults.nonfinite, upload)
    first = jnp.argmin(jnp.where(bad, cohort.rank, cohort.rank.size))  # by selection, whatever the slots
    culprit = jnp.where(jnp.any(bad), jnp.stack([cohort.ids[first], layer[first]]), -1).astype(jnp.int32)
    return upload, Lost(silent.sum(), bad.sum(), attackers.sum(), culprit)


def suffering(faults: Faults, solve):
    """Returns visit(...) -> (Upload, Lost) of one client, whose faults happen while its update is still in the cache.

    Its `shared` is (that of `solve`, (the key and the attackers of `suffered`)).
    """

    def visit(solve, client, bucket, data, shared, mine):
        own, (key, attackers) = shared
        upload = jax.tree.map(lambda leaf: leaf[None], solve(client, bucket, data, own, mine))
        upload, lost = suffered(faults, key, Cohort(client[None], jnp.zeros(1, jnp.int32)), upload, attackers)
        return jax.tree.map(lambda leaf: leaf[0], upload), lost

    return Partial(visit, solve if isinstance(solve, Partial) else Partial(solve))


def total(lost: Lost, cohort: Cohort) -> Lost:
    """Returns what went wrong in a cohort from what did with each client [S]."""
    bad = lost.nonfinite > 0
    first = jnp.argmin(jnp.where(bad, cohort.rank, cohort.rank.size))  # by selection, whatever the slots
    culprit = jnp.where(jnp.any(bad), lost.culprit[first], -1)
    return Lost(lost.dropped.sum(), lost.nonfinite.sum(), lost.hostile.sum(), culprit)


def filled(by, value, tree):
    """Returns `tree` [S, ...] with `value` everywhere in the rows `by` [S] bool."""
    return jax.tree.map(lambda leaf: jax.vmap(jnp.where, (0, None, 0))(by, value, leaf), tree)
