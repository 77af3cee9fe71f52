"""How clients of FLUX describe their data: means and standard deviations of latent features of a
model, of all of their samples and of those of each class.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.client.cohort import SAMPLE_BLOCK, client_range, map_clients, read_block
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local
from fedjax_cfl.clustering.distances import divide
from fedjax_cfl.decompose import qr
from fedjax_cfl.errors import InputError
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import ClientIndex, FederatedData, Params, Task

# (model [1, ...], data, who [K] bool) -> the descriptions [K, R, L] of the training samples of the
# clients `who`, 0 for others. R = 2 (C + 1) rows are the mean and the standard deviation of all
# samples, and then means and standard deviations of each class
DescribeFn = Callable[[Params, FederatedData, jax.Array], jax.Array]


class Moments(struct.PyTreeNode):
    """Of latent features, of all samples and then of those of each class. A description has the
    means of both, and the standard deviations.
    """

    count: jax.Array  # [C + 1] samples
    mean: jax.Array  # [C + 1, L]
    square: jax.Array  # [C + 1, L] sums of squared distances from the mean


def describe_clients(task: Task, local: Local, latent: int | None) -> DescribeFn:
    """Returns what describes clients by `latent` dimensions, None: as many as classes; there are
    never more than features. In the rows of a class of which a client has fewer than two samples
    stands -1.
    """

    def of_client(client, data: FederatedData, shared, work) -> Loop:
        (model, projection), classes = shared, data.num_classes
        count, first = client_range(client, data)

        def block(b, moments: Moments) -> Moments:
            x, y, owner = read_block(client, data, (count, first), b)
            real = owner >= 0
            z = dense_inputs(task, take_rows(model, 0), x, owner)
            z = jnp.matmul(z, projection, precision=lax.Precision.HIGHEST)
            member = jnp.concatenate([real[None], real & (y == jnp.arange(classes)[:, None])])
            return add_samples(moments, z, member.astype(jnp.float32))

        zeros = jnp.zeros((classes + 1, projection.shape[1]))
        nothing = Moments(jnp.zeros(classes + 1), zeros, zeros)
        return Loop(-(-count // SAMPLE_BLOCK), nothing, block, finish_description)

    def describe(model: Params, data: FederatedData, who: jax.Array) -> jax.Array:
        width = count_dense_inputs(task, data)
        dimensions = min(latent or data.num_classes, width)
        # the same for all clients and runs, and known to all
        projection = qr(jax.random.normal(jax.random.key(1), (width, dimensions)))[0]
        flat = map_clients(of_client, local.execution, (model, projection), data, who)
        return flat.reshape(len(who), -1, dimensions)

    return describe


def add_samples(moments: Moments, z: jax.Array, member: jax.Array) -> Moments:
    """Returns the moments with those of further samples z [B, L]; `member` [C + 1, B] is 1 where a
    sample counts. Means are subtracted before anything is squared, so that nothing cancels.
    """
    count = member.sum(1)
    mean = divide(jnp.matmul(member, z, precision=lax.Precision.HIGHEST), count[:, None])
    square = jnp.sum(member[..., None] * jnp.square(z - mean[:, None]), axis=1)
    both, gap = moments.count + count, mean - moments.mean
    share = divide(count, both)[:, None]
    square += moments.square + jnp.square(gap) * share * moments.count[:, None]
    return Moments(both, moments.mean + gap * share, square)


def finish_description(moments: Moments) -> jax.Array:
    """Returns the description [R L] from the moments of all samples of a client."""
    spread = jnp.sqrt(divide(moments.square, moments.count[:, None]))
    enough = (moments.count >= 2) | (jnp.arange(moments.count.size) == 0)
    mean, spread = (jnp.where(enough[:, None], part, -1.0) for part in (moments.mean, spread))
    return jnp.concatenate([mean[:1], spread[:1], mean[1:], spread[1:]]).reshape(-1)


def list_inputs(data: FederatedData) -> ClientIndex:
    """Returns which samples each client is described by: its training samples, or else its test
    samples, of which only the inputs are used.
    """
    train, test = data.train, data.test
    has = train.size > 0
    return ClientIndex(
        jnp.concatenate([train.order, test.order]),
        jnp.where(has, train.start, train.order.size + test.start),
        jnp.where(has, train.size, test.size),
    )


def dense_inputs(
    task: Task, params: Params, x: jax.Array, owner: jax.Array | None = None
) -> jax.Array:
    """Returns the flat inputs [B, D] of the first dense layer that `task.predict` calls on samples
    x [B, ...]: the samples themselves, where it is the first layer. Raises InputError if there is
    none.
    """
    seen = []

    def watch(call, arguments, options, context):
        if isinstance(context.module, nn.Dense) and context.method_name == "__call__":
            seen.append(arguments[0])
        return call(*arguments, **options)

    with nn.intercept_methods(watch):
        task.predict(params, x, owner)
    if not seen:
        raise InputError(
            "model: has no dense layer (flax.linen.Dense), before which samples are described; use"
            " another model, or another algorithm"
        )
    return seen[0].reshape(len(x), -1)


def count_dense_inputs(task: Task, data: FederatedData) -> int:
    """Returns D, the width of `dense_inputs`. Raises InputError as that does."""
    sample = jax.ShapeDtypeStruct((1, *data.x.shape[1:]), data.x.dtype)
    params = jax.eval_shape(task.init, jax.random.key(0))
    found = jax.eval_shape(lambda params, x: dense_inputs(task, params, x), params, sample)
    return math.prod(found.shape)
