"""How many groups the clients of a data set seem to fall into, before anything is trained.

A client is described in three ways by its training samples: by its labels, by the means of its
features, and by how the two go together within it. In each, clients are joined by Ward's method,
into as many clusters as have the largest mean silhouette (Rousseeuw, 1987). They count if chance
does not reach it: clients drawn from one Gaussian of the same covariance, which have no clusters.
"""

from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import fcluster, ward
from scipy.spatial.distance import pdist, squareform

from fedjax_cfl.types import FederatedData

MOST_GROUPS, MOST_CLIENTS, MOST_SAMPLES = 8, 200, 10_000  # clients and samples are drawn
COMPONENTS, AXES = 20, 3  # of features, and of what describes a client: more are noise
DRAWS = 99  # by chance alone one in a hundred descriptions suggests groups


class Clusters(NamedTuple):
    """What clients fall into by one of their descriptions."""

    by: str
    groups: int
    silhouette: float
    chance: float  # the largest silhouette of the draws without clusters


def suggest_groups(data: FederatedData) -> list[Clusters]:
    """Returns the clusters of each description that has some, the clearest first."""
    rng = np.random.default_rng(0)
    x, y, client = draw_samples(data, rng)
    if client.size == 0 or (count := int(client.max()) + 1) < 4:
        return []
    found = []
    for by, each in describe_clients(x, y, client, count).items():
        values = project(each, AXES)
        groups, silhouette = join_rows(values)
        draws = rng.normal(size=(DRAWS, *values.shape)) * values.std(0)
        if silhouette > (chance := max(join_rows(draw)[1] for draw in draws)):
            found.append(Clusters(by, groups, silhouette, chance))
    return sorted(found, key=lambda each: each.chance - each.silhouette)


def draw_samples(
    data: FederatedData, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns training samples of clients: features [N, F], labels, of classes as 0 and 1, [N, T]
    and whose each is [N], from 0 on without a gap.
    """
    view = data.train.order, data.train.start, data.train.size
    order, start, size = map(np.asarray, view)
    holders = np.flatnonzero(size)
    if holders.size > MOST_CLIENTS:
        holders = np.sort(rng.choice(holders, MOST_CLIENTS, replace=False))
    most = MOST_SAMPLES // max(1, holders.size)
    rows = [order[s : s + n] for s, n in zip(start[holders], size[holders], strict=True)]
    rows = [rng.choice(one, most, replace=False) if one.size > most else one for one in rows]
    client = np.repeat(np.arange(holders.size), [one.size for one in rows])
    row = np.concatenate([*rows, np.zeros(0, int)]).astype(int)
    y = np.asarray(data.y)[row]
    y = np.eye(data.num_classes)[y] if data.num_classes else y.reshape(len(y), -1)
    where = row if data.sample is None else np.asarray(data.sample)[row]
    return np.asarray(data.x)[where].reshape(len(row), -1), y, client


def describe_clients(
    x: np.ndarray, y: np.ndarray, client: np.ndarray, count: int
) -> dict[str, np.ndarray]:
    """Returns what describes each of `count` clients, from samples as of `draw_samples`."""

    def mean(values: np.ndarray) -> np.ndarray:
        return np.stack([values[client == number].mean(0) for number in range(count)])

    x = project(scale(x), COMPONENTS)
    labels, features = mean(y), mean(x)
    x, y = x - features[client], y - labels[client]
    both = mean((x[:, :, None] * y[:, None, :]).reshape(len(x), -1))
    # half a sample more or less: equal counts are no clusters
    half = np.random.default_rng(0).uniform(-0.5, 0.5, labels.shape)
    labels += half / np.bincount(client, minlength=count)[:, None]
    return {"labels": labels, "features": features, "features of each label": both}


def scale(x: np.ndarray) -> np.ndarray:
    """Returns features [N, F] whose mean is 0 and whose deviation is 1, without those that do not
    vary.
    """
    x = x - x.mean(0, dtype=np.float64)
    deviation = x.std(0)
    varies = deviation > 1e-9 * np.abs(x).max(0, initial=0.0)
    return x[:, varies] / deviation[varies]


def project(values: np.ndarray, most: int) -> np.ndarray:
    """Returns rows [N, F] by their first principal components [N, <= most]."""
    rng = np.random.default_rng(0)
    if values.shape[1] > 200:  # random directions, which keep distances
        values = values @ rng.normal(size=(values.shape[1], 200))
    values = values - values.mean(0)
    some = values if len(values) <= 2000 else rng.choice(values, 2000, replace=False)
    axes = np.linalg.svd(some, full_matrices=False)[2]
    return values @ axes[:most].T


def join_rows(values: np.ndarray) -> tuple[int, float]:
    """Returns the number of clusters of rows [K, V] with the largest mean silhouette, and that; no
    cluster has one row alone or less than a twentieth of all.
    """
    if not values.size:
        return 1, -1.0
    distances = pdist(values)
    tree, square = ward(distances), squareform(distances)
    least, found = max(2, len(values) // 20), [(1, -1.0)]
    for count in range(2, min(MOST_GROUPS, len(values) // 2) + 1):
        member = np.eye(count)[fcluster(tree, count, "maxclust") - 1]  # [K, count]
        sizes = member.sum(0)
        if sizes.min() >= least:
            sums = square @ member
            inner = (sums * member).sum(1) / (member @ sizes - 1)
            outer = np.where(member == 1, np.inf, sums / sizes).min(1)
            silhouette = (outer - inner) / np.maximum(np.maximum(inner, outer), 1e-30)
            found.append((count, float(silhouette.mean())))
    return max(found, key=lambda each: each[1])
