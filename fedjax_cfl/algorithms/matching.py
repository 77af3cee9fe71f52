"""Matched averaging: hidden units are matched by what they do before models are
averaged, not by their index.

A network does not change if the units of a hidden layer are permuted together with what
follows them. Layer by layer, an atom is the row of everything that makes one unit's (or
filter's) output: its incoming weights, in the order that the layer before was given,
its bias, and the scale and shift of a normalisation that follows.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML
2019, https://arxiv.org/abs/1905.12022 (PFNM); Yurochkin et al., "Statistical Model
Aggregation via Parameter Matching", NeurIPS 2019, https://arxiv.org/abs/1911.00218
(SPAHM); Wang et al., "Federated Learning with Matched Averaging", ICLR 2020,
https://arxiv.org/abs/2002.06440 (FedMA).

All shapes are static, for use inside a round: `align_to_center` keeps the width,
`align_to_posterior` lets a layer grow into units that are not in use, which are units
all of whose weights are 0. W units of a layer, J models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Params, Task

FARTHEST = 1e30  # stands in for infinite and NaN costs
MIN_VARIANCE_RATIO = (
    1e-6  # least variance of a parameter around its atom, relative to that of the atoms
)
MAX_PRIOR_COUNT = 10  # models of an atom that count in its prior, at most (the PFNM code)


class Layer(NamedTuple):
    """One step of a chain: a kernel, and the normalisations of its output."""

    name: str  # params[name]["kernel"] is [in, W] or [..., in, W], channels last
    norms: tuple[str, ...]  # params[norm] are vectors [W]
    width: int  # W


def find_layers(task: Task) -> tuple[Layer, ...]:
    """Returns the layers of a chain of convolutions and dense layers in the order in
    which the model calls them; the last is the output.

    Between layers may be what treats all units alike: activation, dropout, pooling,
    flattening with channels last. That nothing bypasses a layer cannot be seen in the
    parameters. Raises InputError for a layer that is none of these.
    """
    names: list[str] = []

    def init(key):
        params = task.init(key)
        names.extend(
            getattr(params, "keys", list)()
        )  # here a dict is in the order of creation; outside of the trace it is sorted
        return params

    params, chain = jax.eval_shape(init, jax.random.key(0)), []
    for name in names:
        leaves = params[name]
        shapes = (
            {part: jnp.shape(leaf) for part, leaf in leaves.items()}
            if hasattr(leaves, "items")
            else {}
        )
        kernel = shapes.pop("kernel", None)
        width = kernel[-1] if kernel else chain[-1].width if chain else 0
        vectors = all(shape == (width,) for shape in shapes.values()) and (kernel or shapes)
        if not vectors or (kernel and chain and not _follows(kernel, chain[-1].width)):
            raise InputError(
                f"model layer {name}: a dense layer or convolution of a plain chain is allowed"
                " where units are matched"
            )
        if kernel:
            chain.append(Layer(name, (), width))
        else:
            chain[-1] = chain[-1]._replace(norms=(*chain[-1].norms, name))
    if not chain:
        raise InputError(
            f"model parameters {type(params).__name__}: a dict of layers is allowed where units are"
            " matched"
        )
    return tuple(chain)


def _follows(kernel: Sequence[int], width: int) -> bool:
    return (
        kernel[-2] == width if len(kernel) > 2 else kernel[0] % width == 0
    )  # a dense layer may see a flattened image [H W width]


def solve_assignment(cost: jax.Array) -> jax.Array:
    """Returns the column [n] int32 of each row such that the sum over `cost [n, n]` is
    least: O(n^3), exact, jittable.

    Jonker and Volgenant, "A shortest augmenting path algorithm for dense and sparse
    linear assignment problems", Computing 1987: columns take their cheapest row while
    it is free, which already is the optimum where every unit is nearest to its own
    atom; each row that is left then takes a column along a shortest path of
    reassignments. On a CPU it is as fast as SciPy where units hardly move, and up to
    three times slower where they are unrelated: no reason for a host callback.
    """
    n = cost.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    cost = jnp.where(jnp.abs(cost) < FARTHEST, cost, FARTHEST)  # NaN too
    column = (
        jnp.full(n, n, jnp.int32).at[jnp.argmin(cost, axis=0)].min(index)
    )  # of each row, n: none yet
    row = jnp.full(n, n, jnp.int32).at[column].set(index, mode="drop")

    def augment(carry):
        u, v, column, row = carry  # cost[i, j] - u[i] - v[j] >= 0, 0 where i has column j
        left = column == n
        free = jnp.where(jnp.any(left), jnp.argmax(left), n).astype(
            jnp.int32
        )  # n: under vmap, done before others; no loop below runs

        def reach(carry):
            i, _, low, distance, before, done = carry
            through = low + cost[i] - u[i] - v
            closer = ~done & (through < distance)
            distance, before = jnp.where(closer, through, distance), jnp.where(closer, i, before)
            j = jnp.argmin(jnp.where(done, jnp.inf, distance)).astype(jnp.int32)
            return row[j], j, distance[j], distance, before, done.at[j].set(True)

        begin = (
            free,
            jnp.int32(n),
            jnp.float32(0),
            jnp.full(n, jnp.inf),
            jnp.full(n, free),
            jnp.zeros(n, bool),
        )
        _, last, low, distance, before, done = lax.while_loop(
            lambda carry: carry[0] < n, reach, begin
        )
        gain = jnp.where(done, low - distance, 0)
        u = u.at[free].add(low).at[jnp.where(done, row, n)].add(gain, mode="drop")

        def reassign(carry):
            j, column, row = carry
            i = before[j]
            return column[i], column.at[i].set(j), row.at[j].set(i)

        _, column, row = lax.while_loop(lambda carry: carry[0] < n, reassign, (last, column, row))
        return u, v - gain, column, row

    begin = jnp.zeros(n), jnp.min(cost, axis=0), column, row
    return lax.while_loop(lambda carry: jnp.any(carry[2] == n), augment, begin)[2]


def atom_parts(layer: Layer, params: Params) -> list[tuple[str, str]]:
    """Returns where an atom's numbers stand, in order: kernel, bias, normalisations."""
    own = [(layer.name, part) for part in ("kernel", "bias") if part in params[layer.name]]
    return own + [(norm, part) for norm in layer.norms for part in sorted(params[norm])]


def layer_atoms(layer: Layer, params: Params) -> jax.Array:
    """Returns the atoms [W, D] of a layer."""
    leaves = [params[name][part] for name, part in atom_parts(layer, params)]
    return jnp.concatenate([leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]).T


def reorder_units(layer: Layer, params: Params, before, order) -> Params:
    """Returns a model with the units of one layer in another `order [W]`, and its
    inputs in that of the layer `before [W before]`.

    None leaves them as they are. Channels come last in an image, so that a dense
    layer's kernel [H W channels, out] is cut into blocks of one place each: a filter
    takes its whole feature map along.
    """

    def moved(leaf):
        if before is not None and leaf.ndim > 1:
            leaf = leaf.reshape(-1, before.size, leaf.shape[-1])[:, before].reshape(leaf.shape)
        return leaf if order is None else leaf[..., order]

    return {
        **params,
        **{name: jax.tree.map(moved, params[name]) for name in (layer.name, *layer.norms)},
    }


def permute_hidden_units(layers: tuple[Layer, ...], params: Params, orders) -> Params:
    """Returns the same function with the units of each hidden layer in the order
    `orders[l] [W]`; the output layer's classes stay.
    """
    for layer, before, order in zip(layers, (None, *orders), (*orders, None), strict=True):
        params = reorder_units(layer, params, before, order)
    return params


def align_to_center(layers: tuple[Layer, ...], params: Params, center: Params) -> list[jax.Array]:
    """Returns the orders [W] of a model's hidden units that bring each layer's atoms,
    one layer after the other, nearest to the center's.

    The sum of squared distances is least. With as many atoms as the center has, all of
    the same count, and none to open, that is the posterior assignment of SPAHM: its
    score differs by terms that every assignment has in common.
    """
    orders: list[jax.Array] = []
    for layer in layers[:-1]:
        mine = layer_atoms(
            layer, reorder_units(layer, params, orders[-1] if orders else None, None)
        )
        theirs = layer_atoms(layer, center)
        middle = jnp.mean(theirs, axis=0)  # distances from inner products about it cancel less
        mine, theirs = mine - middle, theirs - middle
        product = jnp.matmul(theirs, mine.T, precision=lax.Precision.HIGHEST)
        orders.append(
            solve_assignment(
                jnp.sum(theirs**2, axis=1)[:, None] + jnp.sum(mine**2, axis=1) - 2 * product
            )
        )
    return orders


def find_used_units(layer: Layer, params: Params) -> jax.Array:
    """Returns which units [W] of a layer have a weight that is not 0."""
    return jnp.any(layer_atoms(layer, params) != 0, axis=1)


def zero_spare_units(layers: tuple[Layer, ...], params: Params, spare) -> Params:
    """Returns a model whose hidden layers use all but the last `spare` (a share) of
    their units; all weights to and from the others are 0.

    Without normalisations, such a unit stays as it is in training if its activation is
    0 at 0: no gradient reaches its weights.
    """
    before = None
    for layer in layers:
        own = jnp.arange(layer.width) < (
            layer.width if layer is layers[-1] else layer.width - int(spare * layer.width)
        )

        def cut(leaf, before=before, own=own):
            if before is not None and leaf.ndim > 1:
                blocks = leaf.reshape(-1, before.size, leaf.shape[-1])
                leaf = jnp.where(before[:, None], blocks, 0).reshape(leaf.shape)
            return jnp.where(own, leaf, 0)

        params, before = {**params, layer.name: jax.tree.map(cut, params[layer.name])}, own
    return params


def posterior_gains(rows, sums, counts, models, sigma, sigma0, gamma=1.0, xp=jnp):
    """Returns the gain [W, L] in log posterior of taking each of `rows [W, D]` for each
    of L atoms, but for a number per row.

    An atom is the sum [L, D] of its `counts [L]` members, all minus the prior mean;
    those of 0 are new ones, of which each next costs more. With a posterior mean and
    variance of every atom this is the density of a row as its member: f(x + s, c + 1) -
    f(s, c) of SPAHM without its cancellation. Args: `models` J; `sigma`, `sigma0`
    variances of a member around its atom and of atoms; `xp` jax.numpy or numpy.
    """
    mass = counts * sigma0 + sigma
    means, variance = sums * (sigma0 / mass)[:, None], sigma + sigma * sigma0 / mass
    gap = xp.sum(rows**2, axis=1)[:, None] + xp.sum(means**2, axis=1) - 2 * xp.matmul(rows, means.T)
    popular, new = xp.clip(counts, 1, MAX_PRIOR_COUNT), counts == 0
    held = xp.log(popular / xp.maximum(models - popular, 1))
    prior = xp.where(new, xp.log(gamma / models) - xp.log(xp.maximum(xp.cumsum(new), 1)), held)
    return 2 * prior - gap / variance - rows.shape[1] * xp.log(variance)


def align_to_posterior(
    layers: tuple[Layer, ...], params: Params, center: Params, sums: Params, counts, spreads, models
) -> list[jax.Array]:
    """Returns the orders [W] of a model's hidden units that put each where the
    posterior takes it: with an atom of its group, or a new one.

    Args: `sums` of the group's other models, `counts[l] [W]` of them that use a unit;
    where they are none, the center stands for one; `spreads[l]` (prior mean [D], sigma,
    sigma0) of a layer; `models` of the group. A layer without units to spare opens
    none.
    """
    orders: list[jax.Array] = []
    for layer, count, (mean, sigma, sigma0) in zip(layers[:-1], counts, spreads, strict=True):
        rows = layer_atoms(
            layer, reorder_units(layer, params, orders[-1] if orders else None, None)
        )
        alone, used = count == 0, jnp.any(rows != 0, axis=1)
        total = jnp.where(alone[:, None], layer_atoms(layer, center), layer_atoms(layer, sums))
        count = jnp.where(alone, find_used_units(layer, center), count).astype(jnp.float32)
        gain = posterior_gains(
            rows - mean, total - count[:, None] * mean, count, models, sigma, sigma0
        )
        loss = jnp.max(gain, axis=1, keepdims=True) - gain  # small numbers, where it matters
        orders.append(solve_assignment(jnp.where(used[:, None], loss, 0).T))
    return orders
