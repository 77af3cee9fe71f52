"""Folders of images: one folder a class, and above or below it, if you like, one a client and one
for each split.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from fedjax_cfl.data.datasets import readers
from fedjax_cfl.data.datasets.image_files import IMAGE_SIZE, SUFFIXES, Mode, stack_images
from fedjax_cfl.data.datasets.pool import check_pool, name_clients, number_names
from fedjax_cfl.data.datasets.readers import list_folder, open_unpacked, shorten
from fedjax_cfl.data.datasets.table import OptionalName
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import TEXT, OptionalText, check_arguments

Layout = Literal[
    "class", "split/class", "user/class", "class/user", "split/user/class", "user/split/class",
    "metadata",
]  # fmt: skip
LAYOUTS = Layout.__args__[:-1]  # of folders
TABLES = "metadata.csv", "metadata.jsonl", "metadata.parquet"
DEEPEST = 3  # folders between the root and an image
SKIPPED = ("Thumbs.db", "desktop.ini", "__MACOSX")  # what systems leave there; and hidden files
MOST_LISTED = 5  # names in a message


class Found(NamedTuple):
    """What is in a folder: folders and names of images, of empty folders, of other files."""

    images: list[tuple[str, ...]]
    folders: list[tuple[str, ...]]
    others: list[tuple[str, ...]]


def image_folder(
    path: str | Path,
    layout: Layout | None = None,
    size: Annotated[list[int] | None, IMAGE_SIZE] = None,
    mode: Mode = "auto",
    train: Annotated[str, TEXT] = "train",
    test: OptionalText = "test",
    y: OptionalName = None,
    client: OptionalName = None,
) -> Pool:
    """Returns the images of a folder [N, H, W, C], C 1 (grey) or 3: uint8, or float32 v / 65535 of
    16-bit grey. Read are JPEG, PNG, PPM, PGM, BMP, TIFF and WebP, of several frames the first,
    turned as their EXIF says.

    Args: `layout` says what the folders above an image are, from the root on, as user/class; None:
    class, if there is one level, and an error that lists what fits if there are more. `size`,
    height and width, resizes the images; `mode` makes all of them grey or rgb. `train` and `test`
    are the folders of the splits, `test` None: there is none; other splits are left out, and it is
    said. Where metadata.csv, .jsonl or .parquet is in the folder, or in those of both splits,
    layout is metadata: it has a row an image with `file_name`, relative to it, the label `y`, None:
    label, and if you like the owner `client`, None: user or client, and `split`, train or test.
    Classes and clients are numbered over all splits in the order of their names, names that are all
    digits as numbers, and keep their names. Samples come in the order of their paths.
    Raises InputError for images that cannot be read or do not fit together, for links that leave
    the folder, and for folders that do not fit the layout.
    """
    check_arguments(image_folder, locals(), "dataset.source")
    root = Path(os.path.expanduser(path))
    tables = find_tables(root, layout, train, test, y or client)
    if tables:
        from fedjax_cfl.data.datasets import image_metadata  # with pyarrow, which few need

        stack = partial(stack_images, str(path), size=size, mode=mode)
        return image_metadata.read_metadata(root, tables, y, client, stack)
    found = _list_root(root)
    layout = layout or _guess_layout(root, found)
    parts = layout.split("/")
    images = _take_splits(root, found, parts, train, test)
    for image in images:
        if len(image) != len(parts) + 1:
            raise InputError(
                f"{root}: {shorten('/'.join(image))} is {len(image) - 1} folders deep, expected"
                f" {len(parts)} as layout={layout}"
            )
    roles = {part: [image[i] for image in images] for i, part in enumerate(parts)}
    classes, labels = number_names(roles["class"])
    _refuse_empty(root, found, parts, classes)
    files = readers.read_files(root.joinpath(*image) for image in images)
    x = stack_images(str(path), files, len(images), size, mode)
    pool = Pool(x, labels, len(classes))
    if "user" in roles:
        users, owner = number_names(roles["user"])
        pool = pool._replace(client=owner, client_names=name_clients(users))
    if "split" in roles and test is not None:
        pool = pool._replace(test=np.array([name == test for name in roles["split"]]))
    return check_pool(pool._replace(class_names=tuple(classes)), str(path))


def find_tables(
    root: Path, layout: Layout | None, train: str, test: str | None, named: str | None
) -> list[Path]:
    """Returns the table beside the images of a folder, or those of its two splits, first that of
    training; none if there is none. Raises InputError where there should be one, as for a column
    that is `named`.
    """
    for name in TABLES if layout in (None, "metadata") else ():
        alone, sides = root / name, [root / side / name for side in (train, test) if side]
        if os.path.lexists(alone):
            return [alone]
        if all(map(os.path.lexists, sides)):
            return sides
    if layout == "metadata" or named:
        what = f"column {named} is named" if named else "layout=metadata"
        raise InputError(
            f"{root}: {what}, expected {' or '.join(TABLES)} in the folder, and no other layout"
        )
    return []


def _list_root(root: Path) -> Found:
    if not os.path.isdir(root):
        with open_unpacked(root):  # it may be a pickle, or nothing at all
            pass
        raise InputError(f"{root}: is a file, expected a folder of images")
    found = Found([], [], [])
    _walk(root, (), found)
    if not found.images:
        raise InputError(
            f"{root}: folder holds no images, expected files of {', '.join(SUFFIXES)} in a folder"
            " for each class"
        )
    if found.others:
        few = ", ".join("/".join(other) for other in found.others[:MOST_LISTED])
        warn_of_file(
            f"{root}: files that are no images are left out ({len(found.others)}): {shorten(few)}"
        )
    return found


def _walk(root: Path, parts: tuple[str, ...], found: Found) -> None:
    """Adds to `found` what is below the folder `parts` of the root, in order of name."""
    folder = root.joinpath(*parts)
    for name in list_folder(folder):
        if name.startswith(".") or name in SKIPPED:
            continue
        path, inside = folder / name, (*parts, name)
        if os.path.islink(path):
            _check_link(root, path)
        if os.path.isdir(path):  # unlike Path.is_dir it raises nothing
            if len(inside) > DEEPEST:
                raise InputError(
                    f"{root}: folder {shorten('/'.join(inside))} is {len(inside)} folders deep,"
                    f" expected at most {DEEPEST}: layout is one of {', '.join(LAYOUTS)}"
                )
            found.folders.append(inside)
            _walk(root, inside, found)
        elif name.lower().endswith(SUFFIXES):
            found.images.append(inside)
        else:
            found.others.append(inside)


def _check_link(root: Path, path: Path) -> None:
    """Raises InputError for a link that leaves the root, and for one to a folder, which could lead
    in a circle.
    """
    home, target = os.path.realpath(root), os.path.realpath(path)
    if os.path.commonpath([home, target]) != home:
        raise InputError(f"{path}: link leaves {root}, expected the file itself")
    if os.path.isdir(path):
        raise InputError(f"{path}: is a link to a folder, expected the folder itself")


def _guess_layout(root: Path, found: Found) -> Layout:
    image = found.images[0]
    fits = [layout for layout in LAYOUTS if layout.count("/") + 2 == len(image)]
    if len(fits) == 1:
        return fits[0]
    said = shorten("/".join(image))
    if not fits:
        raise InputError(f"{root}: {said} is in no folder, expected a folder for each class")
    raise InputError(
        f"{root}: {said} may be in one of several layouts, expected layout="
        f"{' or layout='.join(fits)}"
    )


def _take_splits(
    root: Path, found: Found, parts: Sequence[str], train: str, test: str | None
) -> list[tuple[str, ...]]:
    if "split" not in parts:
        return found.images
    at = parts.index("split")
    names = sorted({image[at] for image in found.images if len(image) > at + 1})
    for setting, name in (("train", train), ("test", test)):
        if name is not None and name not in names:
            few = ", ".join(map(shorten, names[:MOST_LISTED])) or "none"
            no_test = ", or test=null if there is none" if setting == "test" else ""
            raise InputError(
                f"{root}: no split is named {shorten(name)}, expected {setting}=NAME of one of"
                f" {few}{no_test}"
            )
    if left := [name for name in names if name not in (train, test)]:
        few = ", ".join(map(shorten, left[:MOST_LISTED]))
        warn_of_file(
            f"{root}: splits {few} are left out; read are {train} and {test or 'no other'}"
        )
    return [image for image in found.images if len(image) <= at + 1 or image[at] in (train, test)]


def _refuse_empty(root: Path, found: Found, parts: Sequence[str], classes: list[str]) -> None:
    at = parts.index("class")
    named = {folder[at] for folder in found.folders if len(folder) == at + 1}
    if empty := sorted(named - set(classes) - {image[at] for image in found.images}):
        raise InputError(
            f"{root}: class {shorten(empty[0])} has no images, expected some, or no folder"
        )
