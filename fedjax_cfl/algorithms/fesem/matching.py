"""Matched averaging: before models are averaged, their hidden units are matched by what
they compute, not by their index.

A network computes the same if the units of a hidden layer are permuted together with
their outgoing weights. An atom is the row of all parameters of one unit (or filter) of a
layer: its incoming weights, in the new order of the layer before, its bias, and the scale
and shift of a normalisation that follows.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML
2019, https://arxiv.org/abs/1905.12022 (PFNM); Yurochkin et al., "Statistical Model
Aggregation via Parameter Matching", NeurIPS 2019, https://arxiv.org/abs/1911.00218
(SPAHM); Wang et al., "Federated Learning with Matched Averaging", ICLR 2020,
https://arxiv.org/abs/2002.06440 (FedMA).

All shapes are static, for use inside a round: layers keep their width. A layer has W units of
D parameters each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Params, Task

FARTHEST = 1e30  # stands in for infinite and NaN costs


class Layer(NamedTuple):
    """One step of a chain: a kernel, and the normalisations of its output."""

    name: str  # params[name]["kernel"] is [in, W] or [..., in, W], channels last
    norms: tuple[str, ...]  # params[norm] are vectors [W]
    width: int  # W


def find_layers(task: Task) -> tuple[Layer, ...]:
    """Returns the layers of a chain of convolutions and dense layers, in the order in which
    the model calls them; the last is the output.

    Between layers there may be operations that treat all units alike: activation, dropout,
    pooling, flattening with channels last. The parameters do not show whether a connection
    skips a layer. Raises InputError for any other layer.
    """
    names: list[str] = []

    def init(key):
        params = task.init(key)
        # inside the trace a dict has the order of creation; outside it is sorted
        names.extend(getattr(params, "keys", list)())
        return params

    params, chain = jax.eval_shape(init, jax.random.key(0)), []
    for name in names:
        leaves = params[name] if hasattr(params[name], "items") else {}
        shapes = {part: jnp.shape(leaf) for part, leaf in leaves.items()}
        kernel = shapes.pop("kernel", None)
        width = kernel[-1] if kernel else chain[-1].width if chain else 0
        vectors = all(shape == (width,) for shape in shapes.values()) and (kernel or shapes)
        if not vectors or (kernel and chain and not _follows(kernel, chain[-1].width)):
            raise InputError(
                f"model layer {name}: only dense layers and convolutions of a plain chain are"
                " allowed where units are matched"
            )
        if kernel:
            chain.append(Layer(name, (), width))
        else:
            chain[-1] = chain[-1]._replace(norms=(*chain[-1].norms, name))
    if not chain:
        raise InputError(
            f"model parameters {type(params).__name__}: only a dict of layers is allowed where"
            " units are matched"
        )
    return tuple(chain)


def _follows(kernel: Sequence[int], width: int) -> bool:
    # a dense layer may get a flattened image [H W width]
    return kernel[-2] == width if len(kernel) > 2 else kernel[0] % width == 0


def solve_assignment(cost: jax.Array) -> jax.Array:
    """Returns the column [n] int32 of each row for which the sum over `cost` [n, n] is
    least: exact, O(n^3).

    Jonker and Volgenant, "A shortest augmenting path algorithm for dense and sparse
    linear assignment problems", Computing 1987: each column first takes its cheapest row,
    if that is free, which is optimal where every unit is nearest to its own atom. Each row
    that is left then takes a column along a shortest path of reassignments. On a CPU it is
    as fast as SciPy where units hardly move, and up to three times slower where they are
    unrelated, so that a host callback would not pay.
    """
    n = cost.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    cost = jnp.where(jnp.abs(cost) < FARTHEST, cost, FARTHEST)  # NaN too
    # of each row; n: none yet
    column = jnp.full(n, n, jnp.int32).at[jnp.argmin(cost, axis=0)].min(index)
    row = jnp.full(n, n, jnp.int32).at[column].set(index, mode="drop")

    def augment(carry):
        u, v, column, row = carry  # cost[i, j] - u[i] - v[j] >= 0, 0 where i has column j
        left = column == n
        # n: under vmap, this problem is solved before others; no loop below runs
        free = jnp.where(jnp.any(left), jnp.argmax(left), n).astype(jnp.int32)

        def reach(carry):
            i, _, low, distance, before, done = carry
            through = low + cost[i] - u[i] - v
            closer = ~done & (through < distance)
            distance, before = jnp.where(closer, through, distance), jnp.where(closer, i, before)
            j = jnp.argmin(jnp.where(done, jnp.inf, distance)).astype(jnp.int32)
            return row[j], j, distance[j], distance, before, done.at[j].set(True)

        far, before, done = jnp.full(n, jnp.inf), jnp.full(n, free), jnp.zeros(n, bool)
        begin = free, jnp.int32(n), jnp.float32(0), far, before, done
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


def layer_atoms(layer: Layer, params: Params) -> jax.Array:
    """Returns the atoms [W, D] of a layer: of kernel, bias and normalisations, in this order."""
    own = params[layer.name]
    leaves = [own[part] for part in ("kernel", "bias") if part in own]
    leaves += [params[norm][part] for norm in layer.norms for part in sorted(params[norm])]
    return jnp.concatenate([leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]).T


def reorder_units(
    layer: Layer, params: Params, before: jax.Array | None, order: jax.Array | None
) -> Params:
    """Returns the model with the units of one layer in the order `order` [W], and its inputs
    in the order `before` [W of the layer before].

    None leaves an order as it is. Channels are last in an image, so that the kernel [H W
    channels, out] of a dense layer consists of one block per place: a filter moves with
    its whole feature map.
    """

    def reorder(leaf):
        if before is not None and leaf.ndim > 1:
            leaf = leaf.reshape(-1, before.size, leaf.shape[-1])[:, before].reshape(leaf.shape)
        return leaf if order is None else leaf[..., order]

    names = layer.name, *layer.norms
    return {**params, **{name: jax.tree.map(reorder, params[name]) for name in names}}


def permute_hidden_units(
    layers: tuple[Layer, ...], params: Params, orders: Sequence[jax.Array]
) -> Params:
    """Returns a model of the same function with the units of each hidden layer l in the
    order `orders[l]` [W]; the classes of the output layer stay.
    """
    for layer, before, order in zip(layers, (None, *orders), (*orders, None), strict=True):
        params = reorder_units(layer, params, before, order)
    return params


def align_to_center(layers: tuple[Layer, ...], params: Params, center: Params) -> list[jax.Array]:
    """Returns the orders [W] of a model's hidden units in which, one layer after the other,
    the atoms have the least sum of squared distances from the center's.

    This is the posterior assignment of SPAHM if model and center have the same number of
    atoms, all atoms have the same count and there is no room for new ones: the scores then
    differ only by terms that all assignments have in common.
    """
    orders: list[jax.Array] = []
    for layer in layers[:-1]:
        own = layer_atoms(layer, reorder_units(layer, params, orders[-1] if orders else None, None))
        others = layer_atoms(layer, center)
        middle = jnp.mean(others, axis=0)  # minus it, inner products have smaller rounding errors
        own, others = own - middle, others - middle
        product = jnp.matmul(others, own.T, precision=lax.Precision.HIGHEST)
        cost = jnp.sum(others**2, axis=1)[:, None] + jnp.sum(own**2, axis=1) - 2 * product
        orders.append(solve_assignment(cost))
    return orders
