"""Digits from several sources, for MD-ICFL's multi-source experiment: MNIST, USPS, hand
signs and street numbers, all as 28x28 grey images in [-1, 1].
"""

from pathlib import Path

import jax
import numpy as np

from fedjax_cfl.data.datasets import images, readers
from fedjax_cfl.data.datasets.download import locate, missing_data_error, require
from fedjax_cfl.data.datasets.pool import check_pool, read_test_mask
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

SIDE, CLASSES = 28, 10
USPS, SIGN = "usps/usps.h5", "sign_digits/sign_language_digits_gray64.npz"
SVHN, SVHN_MAT = "svhn/svhn.npz", ("svhn/train_32x32.mat", "svhn/test_32x32.mat")
SIGN_TEST = 0.2  # of the hand signs is held out: there is no official split
LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue (ITU-R BT.601)
BLOCK = 4096  # images resized at once

# pixels [n, H, W(, 3)], uint8 or in [0, 1], y, test
Source = tuple[np.ndarray, np.ndarray, np.ndarray]


def multi_source_digits(svhn: bool = False, offline: bool = False) -> Pool:
    """Returns digits of three sources, or of four with `svhn`; `source` is 0 MNIST, 1
    USPS, 2 Sign-Language-Digits, 3 SVHN.

    Images are made grey, resized bilinearly to 28x28 and centred: x = 2 pixel - 1.
    `test` is each source's own split, of the hand signs a random fifth. Files: MNIST's
    as in `mnist`; usps/usps.h5 (groups train and test of data [n, 256] and target,
    needs h5py); sign_digits/sign_language_digits_gray64.npz (images and labels); for
    SVHN svhn/train_32x32.mat and svhn/test_32x32.mat as published, or svhn/svhn.npz
    (images [n, 32, 32, 3] uint8, labels, split). Only MNIST is downloaded, and SVHN by
    `fedjax-cfl download svhn`.
    """
    mnist = images.mnist(standardize=False, offline=offline)
    parts = [(mnist.x, mnist.y, mnist.test), _usps(), _sign(), *([_svhn()] if svhn else [])]
    sizes = [len(y) for _, y, _ in parts]
    return check_pool(
        Pool(
            np.concatenate([2 * _resize(x) - 1 for x, _, _ in parts]),
            np.concatenate([y for _, y, _ in parts]),
            CLASSES,
            test=np.concatenate([test for _, _, test in parts]),
            source=np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
        ),
        "multi_source_digits",
    )


def _resize(x: np.ndarray) -> np.ndarray:
    """Returns images [n, H, W(, 3)] as grey images [n, SIDE, SIDE] float32 in [0, 1]."""
    x = np.float32(1 / 255) * x if x.dtype == np.uint8 else x
    if x.ndim == 4:
        x = x @ LUMINANCE
    if x.shape[1:] == (SIDE, SIDE):
        return x
    blocks = [x[i : i + BLOCK] for i in range(0, len(x), BLOCK)]
    return np.concatenate(
        [np.asarray(jax.image.resize(b, (len(b), SIDE, SIDE), "linear")) for b in blocks]
    )


def _usps() -> Source:
    (path,) = require("usps", USPS)
    parts = []
    for side in ("train", "test"):
        x, y = readers.read_hdf5(path, (f"{side}/data", f"{side}/target")).values()
        shaped = x.shape[1:] == (256,) and y.shape == x.shape[:1]
        if not shaped or not (x.min() >= 0 and x.max() <= 1):  # NaN is neither
            raise InputError(
                f"{path}: {side}/data {x.shape} from {x.min()} to {x.max()} and {side}/target"
                f" {y.shape}, expected grey values from 0 to 1 [n, 256] and [n]"
            )
        parts.append((x.reshape(-1, 16, 16).astype(np.float32), y))
    return images.join_parts(parts)


def _sign() -> Source:
    (path,) = require("sign_digits", SIGN)
    arrays = images.read_images(path, ("images", "labels"), (64, 64))
    y = arrays["labels"]
    test = np.random.RandomState(0).permutation(len(y)) < SIGN_TEST * len(y)
    return arrays["images"], y, test


def _svhn() -> Source:
    path = locate(SVHN)
    if path is not None:
        arrays = images.read_images(path[0], ("images", "labels", "split"), (32, 32, 3))
        x, y = arrays["images"], arrays["labels"]
        return x, y, read_test_mask(path[0], arrays["split"], y)
    paths = locate(*SVHN_MAT)
    if paths is None:
        raise missing_data_error("svhn", *SVHN_MAT, SVHN)
    return images.join_parts([_read_mat(path) for path in paths])


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of SVHN's cropped digits, in which 10 stands for 0; returns x [n, 32,
    32, 3] uint8 and y [n].
    """
    from scipy.io import loadmat  # a slow import that the other sources do not need

    readers.check_file(path)
    with readers.report_damage(path, "SVHN's cropped digits with X and y"):
        arrays = loadmat(path, variable_names=["X", "y"])
        x, y = np.moveaxis(arrays["X"], -1, 0), arrays["y"].reshape(-1)
    wrong = y[~np.isin(y, np.arange(1, 11))]
    if x.shape[1:] != (32, 32, 3) or x.dtype != np.uint8 or wrong.size:
        said = f", y is {wrong[0]} somewhere" if wrong.size else ""
        raise InputError(
            f"{path}: X {arrays['X'].shape} {x.dtype}{said}, expected [32, 32, 3, n] uint8 and 1 to"
            " 10 (the digit 0)"
        )
    return x, np.where(y == 10, 0, y)
