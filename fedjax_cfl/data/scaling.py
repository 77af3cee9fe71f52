"""Features with mean 0 and deviation 1, by the training samples: of all clients, or of each alone.

Steps of one size learn little where one feature is counted in thousands and another in
thousandths.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.types import FederatedData
from fedjax_cfl.validation import checked

Standardize = Literal["none", "client", "pool"]
BLOCK = 4096  # samples whose moments are added up at once
# a deviation that is smaller beside the mean is rounding, of samples of that type
ROUNDING = {np.float32: 1e-6, np.float64: 1e-12}
UNLIKE = 10  # features whose deviations differ by so much are worth a hint


class Scaling(NamedTuple):
    """What samples are standardised with, before any model sees them."""

    # [1, ...] of all clients, or [K + 1, ...] of each client and then of all
    # float32, or float64 of samples that float32 cannot hold, in the shape of a sample
    mean: np.ndarray
    deviation: np.ndarray  # of the same type, > 0; 1 where a feature never varies

    def apply(self, x: np.ndarray, client: int | np.ndarray = -1) -> np.ndarray:
        """Returns samples x [B, ...], uint8 or as exact as they are, as float32, scaled as those of
        a `client` [] or [B]; -1: by all of them.
        """
        row = client if len(self.mean) > 1 else 0
        scaled = (_as_float(x, self.mean.dtype) - self.mean[row]) / self.deviation[row]
        return scaled.astype(np.float32, copy=False)

    def fit(self, x: np.ndarray) -> "Scaling":
        """Returns the scaling of a client that is not among them, by its training samples x
        [B, ...]; where clients are not scaled each by its own, and without samples, that of all.
        """
        common = self.mean[-1:], self.deviation[-1:]
        if len(self.mean) == 1 or not len(x):
            return Scaling(*common)
        return Scaling(*_measure(_as_float(x, self.mean.dtype), np.arange(len(x)), common))


@checked()
def standardize(
    data: FederatedData, by: Standardize, clients: int | None = None
) -> tuple[FederatedData, Scaling | None]:
    """Returns the data with standardised samples, and what they are scaled with, None: nothing.

    Args: `by` is "pool", by the training samples of all clients; "client", each client by its own,
    a feature that never varies there, and a client without training samples, by the pool; or
    "none". `clients`: the pool are the first so many, None: all. Test samples never count.
    Raises InputError for samples that are turned when they are read, or that stay on the host.
    """
    if by == "none":
        return data, None
    if data.turns is not None or data.owner is None:
        why = (
            "samples stay as they are on the host; use resident=device"
            if data.owner is None
            else "this partition turns the images of its groups; use none"
        )
        raise InputError(f"dataset.standardize={by}: {why}")
    x = np.asarray(data.x)
    if data.exact is not None and np.array_equal(data.exact.x.astype(x.dtype), x):
        x = data.exact.x  # before they became float32
    sample = np.arange(len(data.y)) if data.sample is None else np.asarray(data.sample)
    order, start, size = map(np.asarray, (data.train.order, data.train.start, data.train.size))
    own = [sample[order[begin : begin + n]] for begin, n in zip(start, size, strict=True)]
    common = _measure(x, np.concatenate(own[:clients]))
    if by == "pool":
        scaling = Scaling(*common)
        return data.replace(x=jnp.asarray(scaling.apply(x)), exact=None), scaling
    parts = [_measure(x, rows, common) for rows in own]
    scaling = Scaling(*(np.concatenate(each) for each in zip(*parts, common, strict=True)))
    # a sample that several clients hold is another one for each
    scaled = scaling.apply(x[sample], np.asarray(data.owner))
    return data.replace(x=jnp.asarray(scaled), sample=None, exact=None), scaling


def check_scaling(scaling: Scaling | None, data: FederatedData) -> None:
    """Raises InputError for a scaling that `standardize` cannot have returned with these data."""
    if scaling is None:
        return
    (mean, deviation), shape, clients = scaling, data.x.shape[1:], data.num_clients
    fits = mean.shape == deviation.shape in [(1, *shape), (clients + 1, *shape)]
    if not fits or not np.isfinite(scaling).all() or not (deviation > 0).all():
        raise InputError(
            f"scaling=of shape {mean.shape}: must be what standardize returned with these data, of"
            f" {clients} clients and samples of shape {shape}"
        )


def describe_scales(data: FederatedData, by: Standardize) -> str | None:
    """Returns a hint where features in columns, of training samples, have very unlike scales and
    are not standardised; None: it is well.
    """
    if by != "none" or data.owner is None or data.x.ndim != 2 or data.x.dtype == jnp.uint8:
        return None
    order = np.asarray(data.train.order)
    rows = order if data.sample is None else np.asarray(data.sample)[order]
    if data.exact is not None:
        return (
            "features are so far from 0 that float32 loses what varies in them;"
            " dataset.standardize=pool (or client) scales them before"
        )
    _, deviation = _moments(np.asarray(data.x), rows)
    deviation = deviation[0][deviation[0] > 0]
    if deviation.size < 2 or deviation.max() < UNLIKE * deviation.min():
        return None
    return (
        f"features have deviations from {deviation.min():.3g} to {deviation.max():.3g};"
        " dataset.standardize=pool (or client) makes each of them 1"
    )


def _measure(
    x: np.ndarray, rows: np.ndarray, common: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean [1, ...] and deviation [1, ...] of samples, `rows` [n] of x; where there
    are none, or one never varies, what is `common` to all, else 1 as deviation.
    """
    if common is not None and not rows.size:
        return common
    mean, spread = _moments(x, rows)
    instead = np.ones_like(spread) if common is None else common[1]
    return mean.astype(_kind(x)), np.where(spread > 0, spread, instead).astype(_kind(x))


def _moments(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the deviation [1, ...] float64 of `rows` [n] of x, 0 where nothing
    varies.
    """
    blocks = [rows[begin : begin + BLOCK] for begin in range(0, len(rows), BLOCK)]
    zero, kind = np.zeros((1, *x.shape[1:])), _kind(x)
    total = sum((_as_float(x[block], kind).sum(0, np.float64) for block in blocks), zero)
    mean = total / len(rows)
    square = sum((np.square(_as_float(x[block], kind) - mean).sum(0) for block in blocks), zero)
    deviation = np.sqrt(square / len(rows))
    varies = deviation > ROUNDING[kind] * np.abs(mean)
    # what never varies becomes exactly 0
    return np.where(varies, mean, _as_float(x[rows[:1]], kind)), np.where(varies, deviation, 0.0)


def _kind(x: np.ndarray) -> type[np.floating]:
    """Returns the type that samples are measured in."""
    return np.float64 if x.dtype == np.float64 else np.float32


def _as_float(x: np.ndarray, kind: np.dtype | type) -> np.ndarray:
    """Returns samples as models read them, see `models.task.as_float`, those of uint8 as float32
    and all others of the type `kind`.
    """
    return x.astype(np.float32) / 255 if x.dtype == np.uint8 else x.astype(kind, copy=False)
