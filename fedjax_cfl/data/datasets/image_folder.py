"""Folders of images: the folders above an image, or a table beside the images, say which class,
client and split it is of.
"""

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_cfl.data.datasets.image_files import SUFFIXES, ImageSize, Mode, stack_images
from fedjax_cfl.data.datasets.pool import check_pool, name_clients, number_names
from fedjax_cfl.data.datasets.readers import check_file, list_names, read_files, report_damage
from fedjax_cfl.data.datasets.table import Name
from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import OptionalText, Text, checked

Layout = Literal[
    "class", "split/class", "user/class", "class/user", "split/user/class", "user/split/class",
    "metadata",
]  # fmt: skip
LAYOUTS = Layout.__args__[:-1]  # of folders
TABLES = "metadata.csv", "metadata.jsonl", "metadata.parquet"
USERS = "user", "client", "user_id", "client_id"  # of these columns the first that is there
DEEPEST = 3  # folders between the root and an image
SKIPPED = ("Thumbs.db", "desktop.ini", "__MACOSX")  # what systems leave there; and hidden files


@checked("dataset.source")
def image_folder(
    path: str | Path,
    layout: Layout | None = None,
    size: ImageSize | None = None,
    mode: Mode = "auto",
    train: Text = "train",
    test: OptionalText = "test",
    y: Name | None = None,
    client: Name | None = None,
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
    Raises InputError for images that cannot be read or do not fit together, and for folders that
    do not fit the layout.
    """
    root = Path(os.path.expanduser(path))
    tables = find_tables(root, train, test) if layout in (None, "metadata") else []
    if tables:
        images, pool = read_metadata(
            root, tables, str(y or "label"), None if client is None else str(client)
        )
    elif layout == "metadata" or y or client:
        raise InputError(
            f"{root}: y={y}, client={client}, layout={layout}, expected {' or '.join(TABLES)} in"
            " the folder, and no other layout"
        )
    else:
        images, pool = read_folders(root, layout, train, test)
    x = stack_images(str(path), read_files(images), len(images), size, mode)
    return check_pool(pool._replace(x=x), str(path))


def read_folders(
    root: Path, layout: Layout | None, train: str, test: str | None
) -> tuple[list[Path], Pool]:
    """Returns the images of a folder, in order, and their pool, whose x is empty; the arguments are
    those of `image_folder`.
    """
    images = list_images(root)
    fits = [name for name in LAYOUTS if name.count("/") + 2 == len(images[0])]
    parts = (layout or ("" if len(fits) > 1 else "class")).split("/")
    for image in images:
        if len(image) != len(parts) + 1:
            raise InputError(
                f"{root}: {'/'.join(image)} is {len(image) - 1} folders deep, expected"
                f" {f'{len(parts)} as ' if layout else ''}layout="
                f"{layout or ' or layout='.join(fits or ['class, a folder for each class'])}"
            )
    if "split" in parts:
        at = parts.index("split")
        names = sorted({image[at] for image in images})
        for setting, name in (("train", train), ("test", test)):
            if name is not None and name not in names:
                raise InputError(
                    f"{root}: no split is named {name}, expected {setting}=NAME of one of"
                    f" {list_names(names)}{', or null' if setting == 'test' else ''}"
                )
        if left := [name for name in names if name not in (train, test)]:
            warn_of_file(f"{root}: splits {list_names(left)} are left out, see train and test")
        images = [image for image in images if image[at] in (train, test)]
    roles = {part: [image[i] for image in images] for i, part in enumerate(parts)}
    classes, labels = number_names(str(root), "class", roles["class"])
    pool = Pool(np.empty(0), labels, len(classes), class_names=tuple(classes))
    if "user" in roles:
        users, owner = number_names(str(root), "user", roles["user"])
        pool = pool._replace(client=owner, client_names=name_clients(users))
    if "split" in roles and test is not None:
        pool = pool._replace(test=np.array([name == test for name in roles["split"]]))
    return [root.joinpath(*image) for image in images], pool


def list_images(root: Path) -> list[tuple[str, ...]]:
    """Returns the places of all images below a folder, in order, and says which other files are
    left out. Raises InputError if there are none, and for folders that are too deep.
    """
    if not os.path.isdir(root):
        check_file(root, None)  # it may be packed, or nothing at all
        raise InputError(f"{root}: is a file, expected a folder of images")
    files: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}

    def refuse(error: OSError) -> None:
        raise error

    with report_damage(root, "a readable folder", "folder"):
        for home, folders, names in os.walk(root, onerror=refuse, followlinks=True):
            inside = Path(home).relative_to(root).parts
            if len(inside) > DEEPEST:  # also of links that lead in a circle
                raise InputError(
                    f"{root}: folder {'/'.join(inside)} is {len(inside)} folders deep, expected at"
                    f" most {DEEPEST}: layout is one of {', '.join(LAYOUTS)}"
                )
            for part in (folders, names):
                part[:] = [name for name in part if name[0] != "." and name not in SKIPPED]
            for name in names:
                files[name.lower().endswith(SUFFIXES)].append((*inside, name))
    others = list_names(["/".join(other) for other in sorted(files[False])])
    if not files[True]:
        raise InputError(
            f"{root}: folder holds no images, expected files of {', '.join(SUFFIXES)} in a folder"
            f" for each class; found {others or 'none'}"
        )
    if others:
        warn_of_file(
            f"{root}: files that are no images are left out ({len(files[False])}): {others}"
        )
    return sorted(files[True])


def find_tables(root: Path, train: str, test: str | None) -> list[Path]:
    """Returns the table beside the images of a folder, or those of its two splits, first that of
    training; none if there is none.
    """
    for name in TABLES:
        sides = [root / side / name for side in (train, test) if side]
        if os.path.exists(root / name):  # unlike Path.exists it raises nothing
            return [root / name]
        if all(map(os.path.exists, sides)):
            return sides
    return []


def read_metadata(
    root: Path, files: list[Path], y: str, client: str | None
) -> tuple[list[Path], Pool]:
    """Returns the images that tables name, in order, and their pool, whose x is not the images.

    Args: `root` is the folder, `files` are the tables, of one or of two splits; `y` is the column
    of labels; `client` that of owners, None: one of `USERS`, if there is one.
    """
    from fedjax_cfl.data import tables  # with pandas, which few need
    from fedjax_cfl.data.datasets.frame import Source, make_pool

    frames = []
    for file in files:
        kind: Any = file.suffix[1:]
        text = ["file_name", y, "split", *([client] if client else USERS)]
        frame = tables.read_table(kind, file, text=text).frame
        if "file_name" not in frame:
            raise InputError(
                f"{file}: column file_name is missing, expected the name of an image in each row;"
                f" found {list_names(list(map(str, frame)))}"
            )
        where = [str(file.parent / str(name)) for name in frame["file_name"]]
        frame = frame.assign(file_name=where)
        frames.append(frame.assign(split=len(frames)) if len(files) > 1 else frame)
    table = tables.join_files(str(root), list(map(str, files)), frames)
    client = client or next((name for name in USERS if name in table.frame), None)
    split = "split" if "split" in table.frame and "split" not in (y, client) else None
    images = [Path(name) for name in table.frame["file_name"]]
    table = table._replace(frame=table.frame.assign(file_name=0))  # in the place of features
    pool = make_pool(table, Source(y, "file_name", client, split))
    return images, pool._replace(columns=None)
