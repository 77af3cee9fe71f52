"""Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles between Client Data
Subspaces", AAAI 2023, https://arxiv.org/abs/2209.10526 (PACFL).

Before round 0 every client sends the first left singular vectors of its samples of each class.
The server clusters clients once, by the angles between these vectors. Then each group trains by
FedAvg, from the same model.

Differs from the authors' code: the sign of a singular vector means nothing, so that the largest
|cosine| counts; at most m groups are left; a class with fewer samples than directions, or in fewer
dimensions, gives fewer; clients that come later join the group of least mean angle or found one,
where the code clusters all clients at the start.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.client.cohort import client_range, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering.clustered import clustered
from fedjax_cfl.clustering.hierarchical import agglomerate_values
from fedjax_cfl.clustering.measure import Measure, Question
from fedjax_cfl.data.federated import check_classes, gather
from fedjax_cfl.decompose import eigh, svdvals
from fedjax_cfl.models.task import as_float
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.types import Algorithm, FederatedData, Task
from fedjax_cfl.validation import NonNegativeFloat, PositiveInt, checked

Angle = Literal["vectors", "principal"]
# samples of a class, for each of which there is a decomposition of its own: on a CPU core that of
# 784 x 784 takes 48 ms, that of 64 x 64 0.3 ms
SIZES = 16, 64, 256, 1024, 4096


@checked("algorithm")
def pacfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    threshold: NonNegativeFloat | jax.Array | None = None,
    directions: PositiveInt = 3,
    angle: Angle = "vectors",
    linkage: Literal["weighted", "average", "complete", "single"] = "weighted",
) -> Algorithm:
    """PACFL with at most m groups.

    Args: `threshold` is the angle in degrees up to which groups are merged even if only m are left,
    and up to which a client that comes later joins one (more than 90: all are one group; None:
    exactly m groups, it always joins);
    `directions` are q, the singular vectors of each class; `angle` of two clients is the smallest
    one between two of their vectors | principal (between the spaces that the vectors span);
    `linkage` is that of the clustering, of which weighted is the code's "average".
    A client sends F words for each of its vectors, once; the server keeps them.
    """
    compare = partial(angles, angle=angle)
    return clustered(
        task,
        local,
        system,
        m=m,
        measure=partial(class_directions, count=directions),
        found=agglomerate_values(compare, m, linkage, threshold),
        distance=compare,
        threshold=threshold,
    )


def class_directions(task: Task, local: Local, count: int) -> Measure:
    """Measures the `count` first left singular vectors of each class, [S, C count, F]; 0 in the
    place of those that a client does not have, and does not send.
    """

    def of_client(client, data: FederatedData, shared, work) -> jax.Array:
        size, first = client_range(client, data)
        place = jnp.arange(data.max_client_samples)
        x, y = gather(data, data.train.order[first + jnp.minimum(place, jnp.maximum(size - 1, 0))])
        rows = as_float(x).reshape(place.size, -1)
        sizes = [*(size for size in SIZES if size < place.size), place.size]

        def of_class(label: jax.Array) -> jax.Array:
            of_label = (place < size) & (y == label)
            held, ahead = jnp.sum(of_label), jnp.argsort(~of_label, stable=True)

            def of_first(most: int) -> jax.Array:
                part = jnp.where((place[:most] < held)[:, None], rows[ahead[:most]], 0.0)
                return leading_directions(part, count)

            none = jnp.zeros((count, rows.shape[1]))
            branches = [lambda: none, *(partial(of_first, most) for most in sizes)]
            return lax.switch(sum(jnp.int32(held > least) for least in (0, *sizes[:-1])), branches)

        # one after another: a batch would decompose a matrix for every class that is absent, too
        return lax.map(of_class, jnp.arange(data.num_classes)).reshape(-1)

    each = over_clients(of_client, local.execution)

    def ask(q: Question) -> jax.Array:
        remedy = "use another algorithm, as ifca or flexcfl"
        check_classes(q.data, "algorithm=pacfl", remedy)
        flat = each(q.cohort, q.data, (), ())
        return flat.reshape(len(flat), q.data.num_classes * count, -1)

    def words(bases: jax.Array) -> jax.Array:
        return jnp.any(bases != 0, axis=2).sum(1) * bases.shape[2]

    return Measure(ask, lambda groups: 0, words=words, of_groups=False)


def leading_directions(samples: jax.Array, count: int) -> jax.Array:
    """Returns the first `count` right singular vectors [count, F] of samples [n, F], which are the
    left ones of their transpose; 0 beyond the rank.

    They come from the smaller one of the two Gram matrices.
    """
    transposed = len(samples) <= samples.shape[1]
    rows = samples if transposed else samples.T
    values, vectors = eigh(jnp.matmul(rows, rows.T, precision=lax.Precision.HIGHEST))
    width = min(count, len(rows))
    values, found = values[::-1][:width], vectors[:, ::-1][:, :width].T
    if transposed:
        found = jnp.matmul(found, samples, precision=lax.Precision.HIGHEST)
    found /= jnp.maximum(jnp.linalg.norm(found, axis=1, keepdims=True), 1e-30)
    rounding = len(rows) * jnp.finfo(jnp.float32).eps * jnp.maximum(values[0], 0)
    kept = jnp.where((values > rounding)[:, None], found, 0.0)
    return jnp.pad(kept, ((0, count - width), (0, 0)))


def orthonormalize(vectors: jax.Array) -> jax.Array:
    """Returns orthonormal vectors [p, F] that span what `vectors` [p, F] do, 0 beyond the rank."""
    values, turned = eigh(jnp.matmul(vectors, vectors.T, precision=lax.Precision.HIGHEST))
    rounding = len(vectors) * jnp.finfo(jnp.float32).eps * jnp.maximum(values[-1], 0)
    kept = values > rounding
    spanning = jnp.matmul(turned.T, vectors, precision=lax.Precision.HIGHEST)
    return jnp.where(kept, lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)[:, None] * spanning


def angles(bases: jax.Array, angle: Angle = "vectors") -> jax.Array:
    """Returns the angles [K, K] in degrees, 0 .. 90, between clients with unit vectors `bases` [K,
    p, F], see `pacfl`.
    """

    def largest_cosine(product: jax.Array) -> jax.Array:
        return jnp.abs(product).max() if angle == "vectors" else svdvals(product)[0]

    def to_all(own: jax.Array) -> jax.Array:
        products = jnp.einsum("pf,kqf->kpq", own, bases, precision=lax.Precision.HIGHEST)
        return jax.vmap(largest_cosine)(products)

    if angle == "principal":  # vectors of one class are orthonormal, of several they are not
        bases = lax.map(orthonormalize, bases)
    cosines = lax.map(to_all, bases)
    apart = jnp.rad2deg(jnp.arccos(jnp.clip((cosines + cosines.T) / 2, 0.0, 1.0)))
    return jnp.where(jnp.eye(len(bases), dtype=bool), 0.0, apart)
