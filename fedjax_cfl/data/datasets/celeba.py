"""CelebA by celebrity, smiling or not: the JSON files of LEAF, which name image files,
and the folder of these images.

LEAF: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
https://arxiv.org/abs/1812.01097. CelebA: Liu et al., ICCV 2015,
https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html.
"""

import os
import warnings
from pathlib import Path

import numpy as np

from fedjax_cfl.data.datasets.download import locate_first, missing_data_error
from fedjax_cfl.data.datasets.leaf_json import join_users, read_users, user_lists
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.readers import report_damage, shorten
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import PositiveInt, Seed, check_arguments

SIZE = 84  # pixels of a side, as in LEAF's model
# where the JSON files may be, and the images
PLACES = tuple(
    tuple(f"{folder}/{part}" for part in parts)
    for folder in ("celeba/data", "celeba")
    for parts in (("train", "test"), ("all_data",))
)
IMAGES = (("celeba/data/raw/img_align_celeba",), ("celeba/img_align_celeba",))
LARGEST = 4096  # pixels of a side of an image file; CelebA's have 178 x 218


def celeba(users: PositiveInt | None = None, seed: Seed = 0, keep_split: bool = False) -> Pool:
    """Returns the faces of CelebA, 84x84x3 uint8, y 1 where smiling; `client` is the
    celebrity, in order of names.

    Celebrities with less than two images are dropped (FeSEM); of the others `users` are
    drawn with `seed` (None: all). `test` is LEAF's own split with `keep_split`, if the
    files have one, else None, so that a partition by user makes the split. Images are
    resized with a bicubic filter and take 21 kB each. Files: JSON under celeba/data/
    (as LEAF makes it) or celeba/, in train/ and test/, or all_data/; images in
    raw/img_align_celeba/ beside them or in celeba/img_align_celeba/. There is no
    download. Raises InputError for missing or bad files.
    """
    check_arguments(celeba, locals(), "dataset.source")
    files, folder = _files()
    parts = [read_users([part], _faces) for part in files]
    names, images, y, client, test = join_users(parts, 1, users, seed)
    if not names:
        raise InputError(f"{files[0]}: no celebrity has two images, expected some")
    own = test if keep_split else None
    pool = Pool(_images(folder, images), y, 2, client, own, client_names=tuple(names))
    return check_pool(pool, "celeba")


def _files() -> tuple[list[Path], Path]:
    """Returns the folders of JSON, those of train and of test or one, and the folder of images."""
    files, images = locate_first(PLACES), locate_first(IMAGES)
    if files is None or images is None:
        absent = "celeba/data/all_data" if files is None else IMAGES[0][0]
        raise missing_data_error(
            "celeba (made by LEAF's scripts from the aligned images, no download)", absent
        )
    return files, images[0]


def _faces(path: Path, user: str, held: object) -> tuple[list[str], list[int]]:
    """Returns the image files and labels of one user of a LEAF file."""
    said = f"{path}: user {shorten(user)}"
    names, labels = user_lists(path, user, held)
    for i, (name, label) in enumerate(zip(names, labels, strict=True)):
        # no file outside the folder
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            shown = shorten(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise InputError(
                f"{said}: entry {i} of x is {shown}, expected the name of an image file"
            )
        if isinstance(label, bool) or not isinstance(label, int) or label not in (0, 1):
            raise InputError(
                f"{said}: entry {i} of y is a {type(label).__name__} or another number, expected 0"
                " or 1"
            )
    return names, labels


def _images(folder: Path, names: list[str]) -> np.ndarray:
    """Reads images [N, SIZE, SIZE, 3] uint8."""
    x = np.empty((len(names), SIZE, SIZE, 3), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes and metadata; what matters is checked
        for i, name in enumerate(names):
            x[i] = _image(folder / name)
    return x


def _image(path: Path) -> np.ndarray:
    """Reads one image [SIZE, SIZE, 3] uint8."""
    from PIL import Image  # a slow import that the other sources do not need

    if not os.path.isfile(path):  # also what is no regular file: a pipe would never answer
        raise InputError(f"{path}: no such image, expected every file that the JSON names")
    with (
        report_damage(path, "a JPEG or PNG file", "image"),
        Image.open(path, formats=("JPEG", "PNG")) as image,
    ):
        if max(image.size) > LARGEST:
            raise ValueError(
                f"it has {image.size[0]} x {image.size[1]} pixels, more than {LARGEST} on a side"
            )
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC))
