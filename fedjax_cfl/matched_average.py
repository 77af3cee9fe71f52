"""Matched averaging in one shot: models of any widths become one that is as wide as they are unlike; NumPy, for the host after a run.

Sources: see `matching`. W units of a layer, J models.
"""

import math

import numpy as np

from fedjax_cfl.matching import TINY, Layer, atoms, gains, parts
from fedjax_cfl.types import Params


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
    for name, part in parts(layer, like):
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
            sums = np.zeros((held.size + len(rows[j]), mean.size))  # then as many new atoms as there are rows
            if others:
                sums[: held.size] = member @ (np.concatenate([rows[i] for i in others]) - mean)
            counts = np.append(counts, np.zeros(len(rows[j])))
            gain = gains(rows[j] - mean, sums, counts, len(rows), sigma, sigma0, gamma, np)
            column = linear_sum_assignment(gain, maximize=True)[1]
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
