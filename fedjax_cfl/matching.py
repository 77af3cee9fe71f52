"""Matched averaging: hidden units are matched by what they do before models are averaged, not by their index.

A network does not change if the units of a hidden layer are permuted together with what follows them. Layer by layer, an atom is the row of
everything that makes one unit's (or filter's) output: its incoming weights, in the order that the layer before was given, its bias, and
the scale and shift of a normalisation that follows.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, https://arxiv.org/abs/1905.12022 (PFNM);
Yurochkin et al., "Statistical Model Aggregation via Parameter Matching", NeurIPS 2019, https://arxiv.org/abs/1911.00218 (SPAHM);
Wang et al., "Federated Learning with Matched Averaging", ICLR 2020, https://arxiv.org/abs/2002.06440 (FedMA).

`aligned` keeps the width: pure and of static shape, for use inside a round. `matched_average` lets layers grow: NumPy, on the host.
W units of a layer, J models.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Params, Task

FARTHEST = 1e30  # stands in for infinite and NaN costs
TINY = 1e-6  # least variance of a parameter around its atom, relative to that of the atoms
POPULAR = 10  # models of an atom that count in its prior, at most (the PFNM code)


class Layer(NamedTuple):
    """One step of a chain: a kernel, and the normalisations of its output."""

    name: str  # params[name]["kernel"] is [in, W] or [..., in, W], channels last
    norms: tuple[str, ...]  # params[norm] are vectors [W]
    width: int  # W


def layers_of(task: Task) -> tuple[Layer, ...]:
    """Returns the layers of a chain of convolutions and dense layers in the order in which the model calls them; the last is the output.

    Between layers may be what treats all units alike: activation, dropout, pooling, flattening with channels last. That nothing
    bypasses a layer cannot be seen in the parameters. Raises InputError for a layer that is none of these.
    """
    names: list[str] = []

    def init(key):
        params = task.init(key)
        names.extend(getattr(params, "keys", list)())  # here a dict is in the order of creation; outside of the trace it is sorted
        return params

    params, chain = jax.eval_shape(init, jax.random.key(0)), []
    for name in names:
        leaves = params[name]
        shapes = {part: jnp.shape(leaf) for part, leaf in leaves.items()} if hasattr(leaves, "items") else {}
        kernel = shapes.pop("kernel", None)
        width = kernel[-1] if kernel else chain[-1].width if chain else 0
        vectors = all(shape == (width,) for shape in shapes.values()) and (kernel or shapes)
        if not vectors or (kernel and chain and not _follows(kernel, chain[-1].width)):
            raise InputError(f"model layer {name}: a dense layer or convolution of a plain chain is allowed where units are matched")
        if kernel:
            chain.append(Layer(name, (), width))
        else:
            chain[-1] = chain[-1]._replace(norms=(*chain[-1].norms, name))
    if not chain:
        raise InputError(f"model parameters {type(params).__name__}: a dict of layers is allowed where units are matched")
    return tuple(chain)


def _follows(kernel: tuple[int, ...], width: int) -> bool:
    return kernel[-2] == width if len(kernel) > 2 else kernel[0] % width == 0  # a dense layer may see a flattened image [H W width]


def assignment(cost: jax.Array) -> jax.Array:
    """Returns the column [n] int32 of each row such that the sum over `cost [n, n]` is least: O(n^3), exact, jittable.

    Jonker and Volgenant, "A shortest augmenting path algorithm for dense and sparse linear assignment problems", Computing 1987: columns
    take their cheapest row while it is free, which already is the optimum where every unit is nearest to its own atom; each row that is
    left then takes a column along a shortest path of reassignments. On a CPU it is as fast as SciPy where units hardly move, and up to
    three times slower where they are unrelated: no reason for a host callback.
    """
    n = cost.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    cost = jnp.where(jnp.abs(cost) < FARTHEST, cost, FARTHEST)  # NaN too
    column = jnp.full(n, n, jnp.int32).at[jnp.argmin(cost, axis=0)].min(index)  # of each row, n: none yet
    row = jnp.full(n, n, jnp.int32).at[column].set(index, mode="drop")

    def augment(carry):
        u, v, column, row = carry  # cost[i, j] - u[i] - v[j] >= 0, 0 where i has column j
        left = column == n
        free = jnp.where(jnp.any(left), jnp.argmax(left), n).astype(jnp.int32)  # n: under vmap, done before others; no loop below runs

        def reach(carry):
            i, _, low, distance, before, done = carry
            through = low + cost[i] - u[i] - v
            closer = ~done & (through < distance)
            distance, before = jnp.where(closer, through, distance), jnp.where(closer, i, before)
            j = jnp.argmin(jnp.where(done, jnp.inf, distance)).astype(jnp.int32)
            return row[j], j, distance[j], distance, before, done.at[j].set(True)

        begin = free, jnp.int32(n), jnp.float32(0), jnp.full(n, jnp.inf), jnp.full(n, free), jnp.zeros(n, bool)
        _, last, low, distance, before, done = lax.while_loop(lambda carry: carry[0] < n, reach, begin)
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


def _parts(layer: Layer, params: Params) -> list[tuple[str, str]]:
    """Returns where an atom's numbers stand, in order: kernel, bias, normalisations."""
    own = [(layer.name, part) for part in ("kernel", "bias") if part in params[layer.name]]
    return own + [(norm, part) for norm in layer.norms for part in sorted(params[norm])]


def atoms(layer: Layer, params: Params) -> jax.Array:
    """Returns the atoms [W, D] of a layer."""
    leaves = [params[name][part] for name, part in _parts(layer, params)]
    return jnp.concatenate([leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]).T


def reordered(layer: Layer, params: Params, before, order) -> Params:
    """Returns a model with the units of one layer in another `order [W]`, and its inputs in that of the layer `before [W before]`.

    None leaves them as they are. Channels come last in an image, so that a dense layer's kernel [H W channels, out] is cut into blocks
    of one place each: a filter takes its whole feature map along.
    """

    def moved(leaf):
        if before is not None and leaf.ndim > 1:
            leaf = leaf.reshape(-1, before.size, leaf.shape[-1])[:, before].reshape(leaf.shape)
        return leaf if order is None else leaf[..., order]

    return {**params, **{name: jax.tree.map(moved, params[name]) for name in (layer.name, *layer.norms)}}


def permuted(layers: tuple[Layer, ...], params: Params, orders) -> Params:
    """Returns the same function with the units of each hidden layer in the order `orders[l] [W]`; the output layer's classes stay."""
    for layer, before, order in zip(layers, (None, *orders), (*orders, None), strict=True):
        params = reordered(layer, params, before, order)
    return params


def aligned(layers: tuple[Layer, ...], params: Params, center: Params) -> list[jax.Array]:
    """Returns the orders [W] of a model's hidden units that bring each layer's atoms, one layer after the other, nearest to the center's.

    The sum of squared distances is least. With as many atoms as the center has, all of the same count, and none to open, that is the
    posterior assignment of SPAHM: its score differs by terms that every assignment has in common.
    """
    orders: list[jax.Array] = []
    for layer in layers[:-1]:
        mine = atoms(layer, reordered(layer, params, orders[-1] if orders else None, None))
        theirs = atoms(layer, center)
        middle = jnp.mean(theirs, axis=0)  # distances from inner products about it cancel less
        mine, theirs = mine - middle, theirs - middle
        product = jnp.matmul(theirs, mine.T, precision=lax.Precision.HIGHEST)
        orders.append(assignment(jnp.sum(theirs**2, axis=1)[:, None] + jnp.sum(mine**2, axis=1) - 2 * product))
    return orders


def matched_average(
    models: list[Params], layers: tuple[Layer, ...], class_counts=None, *, sigma=1.0, sigma0=1.0, gamma=1.0, sweeps: int = 8
) -> tuple[Params, list[list[np.ndarray]]]:
    """Averages J models of any widths into one that is as wide as they are unlike (FedMA without retraining); NumPy, for the host.

    Units of different models that the posterior takes for one atom are merged, others open an atom of their own, and what a model does not
    have is 0 in its share of the next layer. Output layers are averaged, each class weighted by `class_counts [J, C]` samples if given.
    Returns the model and places[j][l] [W of model j], the unit of its hidden layer l that each of a model's units became.
    Args: `sigma`, `sigma0` variances of a parameter around its atom and of atoms, `gamma` their rate, to begin with (the FeSEM code: 1).
    """
    merged: Params = {}
    places: list[list[np.ndarray]] = [[] for _ in models]
    counts = np.ones((len(models), 1)) if class_counts is None else np.asarray(class_counts, np.float64)
    share = np.where(counts.sum(0) > 0, counts / np.maximum(counts.sum(0), 1), 1 / len(models))  # [J, C]
    width = 0
    for layer in layers:
        seen = [_widened(layer, model, place[-1], width) if merged else model for model, place in zip(models, places, strict=True)]
        rows = [np.asarray(atoms(layer, model), np.float64) for model in seen]
        if layer is layers[-1]:
            found = sum(part[:, None] * row for part, row in zip(share, rows, strict=True))
        else:
            found, labels = matched_atoms(rows, sigma, sigma0, gamma, sweeps)
            places = [[*place, label] for place, label in zip(places, labels, strict=True)]
        width = len(found)
        merged |= _unrolled(layer, seen[0], found)
    return merged, places


def _widened(layer: Layer, params: Params, place: np.ndarray, width: int) -> Params:
    """Returns a model whose layer has its inputs at their `place` among `width` units of the layer before, and zeros elsewhere."""
    kernel = np.asarray(params[layer.name]["kernel"])
    blocks = kernel.reshape(-1, place.size, kernel.shape[-1])
    wide = np.zeros((len(blocks), width, kernel.shape[-1]), kernel.dtype)
    wide[:, place] = blocks
    return {**params, layer.name: {**params[layer.name], "kernel": wide.reshape(*kernel.shape[:-2], -1, kernel.shape[-1])}}


def _unrolled(layer: Layer, like: Params, found: np.ndarray) -> Params:
    """Returns the layer and its normalisations, shaped `like` those of a model, that have the atoms `found [W, D]`."""
    columns, layers = found.T.astype(np.float32), {}
    for name, part in _parts(layer, like):
        shape = like[name][part].shape[:-1]
        leaf, columns = np.split(columns, [math.prod(shape)])
        layers.setdefault(name, {})[part] = leaf.reshape(*shape, -1)
    return layers


def matched_atoms(rows: list[np.ndarray], sigma=1.0, sigma0=1.0, gamma=1.0, sweeps: int = 8) -> tuple[np.ndarray, list[np.ndarray]]:
    """Clusters J sets of rows [W, D], no two rows of a set together, under a beta-Bernoulli prior; returns atoms [L, D] and labels [J][W].

    The maximum a posteriori of SPAHM with a Gaussian base, one set at a time by the Hungarian method, widest first, then `sweeps` times
    over all of them, each time with the prior's mean and variances re-estimated by moments.
    """
    from scipy.optimize import linear_sum_assignment  # here: no run calls this, and it takes half a second to import

    order = sorted(range(len(rows)), key=lambda j: -len(rows[j]))
    labels: list = [None] * len(rows)
    mean, points = np.zeros(rows[0].shape[1]), np.concatenate(rows)
    for _ in range(1 + sweeps):
        for j in order:
            others = [i for i in order if i != j and labels[i] is not None]
            known = np.concatenate([labels[i] for i in others]) if others else np.zeros(0, int)
            held, place, counts = np.unique(known, return_inverse=True, return_counts=True)
            member = place == np.arange(held.size)[:, None]
            sums = member @ (np.concatenate([rows[i] for i in others]) - mean) if others else np.zeros((0, mean.size))
            column = linear_sum_assignment(_scores(rows[j] - mean, sums, counts, len(rows), sigma, sigma0, gamma), maximize=True)[1]
            labels[j] = np.append(held, held.max(initial=-1) + 1 + np.arange(len(rows[j])))[column]
        held, place, counts = np.unique(np.concatenate(labels), return_inverse=True, return_counts=True)
        labels = np.split(place, np.cumsum([len(row) for row in rows])[:-1])
        sums = (place == np.arange(held.size)[:, None]) @ points
        mean, sigma, sigma0 = _moments(points, sums / counts[:, None], place, counts)
    return (mean * sigma + sums * sigma0) / (counts[:, None] * sigma0 + sigma), labels


def _moments(points, means, place, counts) -> tuple[np.ndarray, float, float]:
    """Returns the mean of atoms and the variances of a parameter around its atom (next to none if no atom is shared) and of atoms."""
    atoms, dims = means.shape
    mean = means.mean(0)
    sigma = np.sum((points - means[place]) ** 2) / (dims * max(len(points) - atoms, 1))
    sigma0 = max(np.sum((means - mean) ** 2) / (dims * max(atoms - 1, 1)) - sigma * np.mean(1 / counts), TINY**2)
    return mean, max(sigma, TINY * sigma0), sigma0


def _scores(rows, sums, counts, models: int, sigma, sigma0, gamma) -> np.ndarray:
    """Returns the gain [W, L + W] in log posterior of putting each row on each of L atoms, or on a new one; all minus the prior mean."""

    def f(square, count):
        return sigma0 / sigma * square / (count * sigma0 + sigma) - rows.shape[1] * np.log(count * sigma0 + sigma)

    square, held = np.sum(rows**2, axis=1)[:, None], np.sum(sums**2, axis=1)
    popular = np.minimum(counts, POPULAR)
    old = f(square + held + 2 * rows @ sums.T, counts + 1) - f(held, counts) + 2 * np.log(popular / (models - popular))
    new = f(square, 1) - f(0, 0) + 2 * np.log(gamma / models) - 2 * np.log(np.arange(1, len(rows) + 1))
    return np.hstack([old, new])
