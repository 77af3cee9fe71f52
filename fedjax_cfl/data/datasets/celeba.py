"""CelebA by celebrity, smiling or not: the JSON files of LEAF, which name image files,
and the folder of these images.

LEAF: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
https://arxiv.org/abs/1812.01097. CelebA: Liu et al., ICCV 2015,
https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html.
"""

import os
from pathlib import Path

from fedjax_cfl.data.datasets.download import locate_first, missing_data_error
from fedjax_cfl.data.datasets.image_files import stack_images
from fedjax_cfl.data.datasets.leaf_json import join_users, read_users, user_lists
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.readers import read_files, shorten
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import PositiveInt, Seed, checked

SIZE = 84  # pixels of a side, as in LEAF's model
# where the JSON files may be, and the images
PLACES = tuple(
    tuple(f"{folder}/{part}" for part in parts)
    for folder in ("celeba/data", "celeba")
    for parts in (("train", "test"), ("all_data",))
)
IMAGES = (("celeba/data/raw/img_align_celeba",), ("celeba/img_align_celeba",))


@checked("dataset.source")
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
    files, images = locate_first(PLACES), locate_first(IMAGES)
    if files is None or images is None:
        absent = "celeba/data/all_data" if files is None else IMAGES[0][0]
        raise missing_data_error("celeba", absent)
    parts = [read_users([part], _faces) for part in files]
    names, faces, y, client, test = join_users(parts, 1, users, seed)
    if not names:
        raise InputError(f"{files[0]}: no celebrity has two images, expected some")
    content = read_files(images[0] / face for face in faces)
    x = stack_images("celeba", content, len(faces), [SIZE, SIZE], "rgb", filter="BICUBIC")
    own = test if keep_split else None
    return check_pool(Pool(x, y, 2, client, own, client_names=tuple(names)), "celeba")


def _faces(path: Path, user: str, held: object) -> tuple[list[str], list[int]]:
    said = f"{path}: user {shorten(user)}"
    names, labels = user_lists(path, user, held)
    for i, (name, label) in enumerate(zip(names, labels, strict=True)):
        # no file outside the folder
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise InputError(
                f"{said}: entry {i} of x is {shorten(name)}, expected the name of an image file"
            )
        if str(label) not in ("0", "1"):
            raise InputError(f"{said}: entry {i} of y is {shorten(label)}, expected 0 or 1")
    return names, labels
