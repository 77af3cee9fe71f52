"""Simulated faults of clients, fixed by the seed and counted; and the server's guard
against updates that are not finite.

Faults are data: which client fails in which round is drawn per client and round,
whatever the algorithm, chunks or devices.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.errors import require
from fedjax_cfl.round.tree import squared_norms
from fedjax_cfl.types import Cohort, FaultCounts, FederatedData, Upload
from fedjax_cfl.validation import Fraction, NonNegativeFloat, check_arguments

ATTACKS = ("sign_flip", "noise", "label_flip")
POLICIES = ("skip", "raise", "zero")
DROPOUT, STRAGGLER, NAN, NOISE = range(4)  # purposes, below the engine's own


class Faults(NamedTuple):
    """What goes wrong with clients, as chances per client and round (fractions), and
    what the server does about it.
    """

    dropout: Fraction = 0.0  # never answers: downloads, but uploads nothing
    straggler: Fraction = 0.0  # only manages a uniformly drawn part of its local steps
    nan: Fraction = 0.0  # sends an update that is not finite
    byzantine: Fraction = 0.0  # share of ALL clients that attack in every round they take part in
    # sign_flip: -scale * delta | noise: delta + scale * ||delta|| * unit noise | label_flip:
    # trains on C - 1 - y
    attack: str = "sign_flip"
    scale: NonNegativeFloat = 1.0
    # update not finite: skip (weight 0) | zero (its bad entries become 0) | raise (the run
    # stops, naming it)
    nonfinite: str = "skip"

    def validate(self) -> "Faults":
        """Returns itself. Raises InputError for a value that is not allowed."""
        check_arguments(Faults, self._asdict(), "faults")
        require("faults.attack", self.attack, ATTACKS)
        require("faults.nonfinite", self.nonfinite, POLICIES)
        return self


def client_keys(key, purpose: int, cohort: Cohort):
    """Returns a key [S] for each client of the cohort, by its id."""
    return jax.vmap(lambda client: jax.random.fold_in(jax.random.fold_in(key, purpose), client))(
        cohort.ids
    )


def draw_failures(key, purpose: int, cohort: Cohort, chance: float):
    """Returns [S] bool: each client of the cohort fails with this chance, by its id."""
    return jax.vmap(jax.random.uniform)(client_keys(key, purpose, cohort)) < chance


def draw_byzantine(faults: Faults, key, num_clients: int):
    """Returns [K] bool: the clients that attack, round(byzantine * K) of them, the same
    in every round.
    """
    count = round(faults.byzantine * num_clients)
    lots = jax.random.permutation(key, num_clients)
    return lots < count


def apply_stragglers(faults: Faults, key, cohort: Cohort, effort):
    """Returns the share [S] of its local steps that each client manages."""
    if not faults.straggler:
        return effort
    late, part = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(
        client_keys(key, STRAGGLER, cohort)
    ).T
    return jnp.where(late < faults.straggler, effort * part, effort)


def flip_labels(faults: Faults, byzantine, data: FederatedData) -> FederatedData:
    """Returns the data that are trained on: under label_flip hostile clients see C - 1 - y."""
    if not faults.byzantine or faults.attack != "label_flip":
        return data
    theirs = (data.owner >= 0) & byzantine[data.owner]
    return data.replace(y=jnp.where(theirs, data.num_classes - 1 - data.y, data.y))


def apply_attack(faults: Faults, key, cohort: Cohort, upload: Upload, by):
    """Returns the upload with the deltas of the clients `by` [S] bool attacked."""
    if faults.attack == "sign_flip":
        factor = jnp.where(by, -faults.scale, 1.0)
        return upload.replace(
            delta=jax.tree.map(partial(jax.vmap(jnp.multiply), factor), upload.delta)
        )
    if faults.attack != "noise":
        return upload
    leaves, shape = jax.tree.flatten(upload.delta)
    size = sum(leaf[0].size for leaf in leaves)
    norm = jnp.sqrt(squared_norms(upload.delta).sum(0))
    reach = jnp.where(by, faults.scale * norm / size**0.5, 0.0)
    keys = jax.vmap(lambda key: jax.random.split(key, len(leaves)))(
        client_keys(key, NOISE, cohort)
    )  # [S, leaves]

    def noisy(number, leaf):
        noise = jax.vmap(lambda key, reach: reach * jax.random.normal(key, leaf.shape[1:]))
        return leaf + noise(keys[:, number], reach)

    return upload.replace(
        delta=jax.tree.unflatten(shape, [noisy(number, leaf) for number, leaf in enumerate(leaves)])
    )


def guard_nonfinite(policy: str, upload: Upload):
    """Applies the policy; returns (upload, bad [S] bool, number of the first bad leaf
    [S], -1 for none). No NaN leaves here.

    An update whose square is beyond float32 counts as not finite.
    """
    each = squared_norms(upload.delta)
    finite, whole = jnp.isfinite(each), each.sum(0)
    bad = ~jnp.isfinite(whole)
    losses = (
        jnp.where(bad & ~jnp.isfinite(loss), 0.0, loss) for loss in (upload.loss, upload.last_loss)
    )
    if policy == "zero":
        delta, weight = (
            jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), upload.delta),
            upload.weight,
        )
        whole = squared_norms(delta).sum(0)
    else:
        delta, weight = fill_rows(bad, 0.0, upload.delta), jnp.where(bad, 0.0, upload.weight)
        whole = jnp.where(bad, 0.0, whole)
    loss, last_loss = losses
    return (
        upload.replace(
            delta=delta, weight=weight, loss=loss, last_loss=last_loss, squared_norm=whole
        ),
        bad,
        jnp.where(bad, jnp.argmin(finite, axis=0), -1),
    )


def inject_faults(faults: Faults, key, cohort: Cohort, upload: Upload, byzantine):
    """Lets faults happen to what the cohort sends, then screens it; returns (upload,
    FaultCounts)."""
    real = upload.weight > 0
    attackers = (
        real & byzantine[jnp.minimum(cohort.ids, byzantine.size - 1)]
        if faults.byzantine
        else jnp.zeros_like(real)
    )
    if faults.byzantine:
        upload = apply_attack(faults, key, cohort, upload, attackers)
    if faults.nan:
        broken = real & draw_failures(key, NAN, cohort, faults.nan)
        upload = upload.replace(delta=fill_rows(broken, jnp.nan, upload.delta))
    silent = (
        real & draw_failures(key, DROPOUT, cohort, faults.dropout)
        if faults.dropout
        else jnp.zeros_like(real)
    )
    if faults.dropout:
        upload = drop_updates(silent, upload)
    upload, bad, layer = guard_nonfinite(faults.nonfinite, upload)
    first = jnp.argmin(
        jnp.where(bad, cohort.rank, cohort.rank.size)
    )  # by selection, whatever the slots
    culprit = jnp.where(jnp.any(bad), jnp.stack([cohort.ids[first], layer[first]]), -1).astype(
        jnp.int32
    )
    return upload, FaultCounts(silent.sum(), bad.sum(), attackers.sum(), culprit)


def with_faults(faults: Faults, solve):
    """Returns visit(...) -> (Upload, FaultCounts) of one client, whose faults happen while its
    update is still in the cache.

    Its `shared` is (that of `solve`, (the key and the attackers of
    `inject_faults`)).
    """

    def visit(solve, client, bucket, data, shared, client_inputs):
        own, (key, attackers) = shared
        upload = jax.tree.map(
            lambda leaf: leaf[None], solve(client, bucket, data, own, client_inputs)
        )
        upload, lost = inject_faults(
            faults, key, Cohort(client[None], jnp.zeros(1, jnp.int32)), upload, attackers
        )
        return jax.tree.map(lambda leaf: leaf[0], upload), lost

    return Partial(visit, solve if isinstance(solve, Partial) else Partial(solve))


def sum_fault_counts(lost: FaultCounts, cohort: Cohort) -> FaultCounts:
    """Returns what went wrong in a cohort from what did with each client [S]."""
    bad = lost.nonfinite > 0
    first = jnp.argmin(
        jnp.where(bad, cohort.rank, cohort.rank.size)
    )  # by selection, whatever the slots
    culprit = jnp.where(jnp.any(bad), lost.first_nonfinite[first], -1)
    return FaultCounts(lost.dropped.sum(), lost.nonfinite.sum(), lost.byzantine.sum(), culprit)


def drop_updates(by, upload: Upload) -> Upload:
    """Returns the upload without the updates of the slots `by` [S] bool."""
    norm = upload.squared_norm
    return upload.replace(
        delta=fill_rows(by, 0.0, upload.delta),
        weight=jnp.where(by, 0.0, upload.weight),
        squared_norm=None if norm is None else jnp.where(by, 0.0, norm),
    )


def no_faults() -> FaultCounts:
    """Returns the counts of a cohort in which nothing went wrong."""
    zero = jnp.zeros((), jnp.int32)
    return FaultCounts(zero, zero, zero, jnp.full(2, -1, jnp.int32))


def add_fault_counts(*counts: FaultCounts) -> FaultCounts:
    """Returns the sum of counts; the first client with a bad update is that of the first
    that has one.
    """
    culprits = jnp.stack([each.first_nonfinite for each in counts])
    first = jnp.argmax(culprits[:, 0] >= 0)
    total = jax.tree.map(lambda *each: sum(each[1:], each[0]), *counts)
    return total.replace(first_nonfinite=culprits[first])


def fill_rows(by, value, tree):
    """Returns `tree` [S, ...] with `value` everywhere in the rows `by` [S] bool."""
    return jax.tree.map(lambda leaf: jax.vmap(jnp.where, (0, None, 0))(by, value, leaf), tree)
