"""Perturbations of an experiment with drift (Fielding, https://arxiv.org/abs/2411.01580,
section 3.3): clients that report false label counts, and samples that the server
shares with all clients, so that they differ less.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.federated import check_classes, read_labels, take_holdings
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Key, Partition, Pool
from fedjax_cfl.validation import Fraction, NaturalInt, Seed, checked

__all__ = ["draw_false_orders", "report_falsely", "share_samples"]


def draw_false_orders(key: Key, clients: int, classes: int, fraction: Fraction) -> jax.Array:
    """Draws in which order [K, C] each client reports its labels: a random `fraction` of the
    clients in a random one, the others in the true one.
    """
    who, how = jax.random.split(key)
    honest = jax.random.permutation(who, clients) >= round(fraction * clients)
    orders = jax.random.permutation(
        how, jnp.tile(jnp.arange(classes), (clients, 1)), axis=1, independent=True
    )
    return jnp.where(honest[:, None], jnp.arange(classes), orders)


def report_falsely(labels: jax.Array, orders: jax.Array) -> jax.Array:
    """Returns label counts or shares [K, C] as the clients report them."""
    return jnp.take_along_axis(labels, orders, axis=1)


@checked("shared_samples")
def share_samples(
    pool: Pool,
    holdings: Partition,
    per_label: NaturalInt = 0,
    label_share: Fraction = 1.0,
    seed: Seed = 0,
) -> Partition:
    """Adds training samples of each label, drawn at random, to what every client holds: the
    same samples for all, and none that is a test sample of any client.

    Args: `per_label` >= 0 samples are added of a label, 0: none; `label_share`, from 0 to 1, is
    the share of the labels of which samples are added, the rarest first (Fielding: 1 sample of
    half of the labels, 1 of each, 2 of each); `seed` fixes all draws. Raises InputError if a
    label has too few.
    """
    if not per_label:
        return holdings
    what = f"shared_samples.per_label={per_label}"
    check_classes(pool, what, "use shared_samples.per_label=0")
    label = read_labels(pool, holdings)
    counts = np.bincount(label, minlength=pool.num_classes)
    rarest = np.argsort(counts, kind="stable")[: round(label_share * pool.num_classes)]
    apart = holdings.test if holdings.validation is None else holdings.test | holdings.validation
    tested = holdings.sample[apart]
    free = np.flatnonzero(~np.isin(holdings.sample, tested))
    rng, drawn = np.random.RandomState(seed), []
    for wanted in np.sort(rarest):
        of_label = free[label[free] == wanted]
        _, first = np.unique(holdings.sample[of_label], return_index=True)
        if len(first) < per_label:
            raise InputError(
                f"shared_samples.per_label={per_label}: label {wanted} has {len(first)} training"
                " samples, expected at least as many"
            )
        drawn.append(rng.choice(of_label[first], per_label, replace=False))
    return _give_to_all(holdings, np.concatenate([np.zeros(0, int), *drawn]))


def _give_to_all(holdings: Partition, given: np.ndarray) -> Partition:
    """Returns holdings with a copy of those `given`, which are for training, for each client."""
    count, clients = len(holdings.owner), int(holdings.owner.max()) + 1
    rows = np.concatenate([np.arange(count), np.tile(given, clients)])
    made = take_holdings(holdings, rows)
    made.owner[count:] = np.repeat(np.arange(clients), given.size)
    return made._replace(shared=np.arange(rows.size) >= count)
