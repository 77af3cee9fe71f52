"""Images in any of the usual files, as one array of all, by Pillow."""

import io
import logging
import warnings
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
from typing_extensions import TypeAliasType

from fedjax_cfl.data.datasets.readers import report_damage
from fedjax_cfl.errors import InputError
from fedjax_cfl.validation import Rule, whole

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
# no others: for some Pillow starts programs
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
GREY = ("1", "L", "LA", "La")

logging.getLogger("PIL").addHandler(logging.NullHandler())  # what matters is raised as well

Mode = Literal["auto", "grey", "rgb"]
ImageSize = TypeAliasType(
    "ImageSize",
    Annotated[
        list[Annotated[int, whole(1, 4096)]],
        Rule("[height,width], from 1 to 4096 each", lambda value: len(value) == 2),
    ],
)


def stack_images(
    path: str,
    files: Iterable[tuple[str, bytes]],
    count: int,
    size: list[int] | None = None,
    mode: Mode = "auto",
    filter: Literal["BILINEAR", "BICUBIC"] = "BILINEAR",
) -> np.ndarray:
    """Returns `count` images [N, H, W, C], C 1 (grey) or 3, as uint8; as float32 in [0, 1] if one
    of them has 16 bits.

    Args: `files` gives what a message calls an image, and its content; `size`, height and width,
    resizes all of them, by a `filter` of Pillow; `mode` makes all of them grey or coloured, "auto"
    leaves them as they are.
    Raises InputError for an image that cannot be read, and for images of different sizes or both
    grey and coloured.
    """
    x: Any = np.empty(0)
    first = ""
    for i, (name, content) in enumerate(files):
        image = read_image(name, content, size, mode, filter)
        if not i:
            x, first = np.empty((count, *image.shape), image.dtype), name
        if image.shape != x.shape[1:]:
            raise InputError(
                f"{path}: images have different sizes or colours ({first} {x.shape[1:]}, {name}"
                f" {image.shape}), expected one, or size=[{x.shape[1]},{x.shape[2]}], or mode=rgb"
                " or mode=grey"
            )
        if image.dtype != x.dtype and x.dtype == np.uint8:
            x = x.astype(np.float32) / 255
        x[i] = image if image.dtype == x.dtype else image.astype(np.float32) / 255
    return x


def read_image(
    name: str, content: bytes, size: list[int] | None, mode: Mode, filter: str = "BILINEAR"
) -> np.ndarray:
    """Returns one image [H, W, C], uint8, or float32 v / 65535 if it is grey of 16 bits, turned as
    its EXIF says; of several frames the first. Colours of 16 bits become 8, as Pillow reads them.

    Args: `name` is what a message calls it, `content` that of its file; the others are as in
    `stack_images`.
    """
    from PIL import Image, ImageOps  # a slow import that few sources need

    expected = f"a complete {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
    with report_damage(name, expected, "image"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes and metadata; what matters is raised
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            image = ImageOps.exif_transpose(opened)
            # older versions of Pillow have no 16 bits of their own
            deep = image.mode.startswith("I;16")
            deep |= image.mode == "I" and opened.format in ("PNG", "PPM")
        if "A" in image.getbands() or "transparency" in image.info:
            image = image.convert("LA" if image.mode in GREY else "RGBA")
            if np.asarray(image)[..., -1].min() < 255:
                raise ValueError("it is transparent, and what is behind it is not said")
        if deep:
            image = Image.fromarray(np.asarray(image).astype(np.float32) / 65535)
        elif image.mode in ("I", "F"):
            raise ValueError(f"its pixels are {image.mode}, neither 8 bits nor grey of 16")
        else:
            image = image.convert("L" if mode == "grey" or image.mode in GREY else "RGB")
        if size is not None and image.size != (size[1], size[0]):
            image = image.resize((size[1], size[0]), Image.Resampling[filter])
        pixels = np.asarray(image).reshape(image.size[1], image.size[0], -1)
        return np.repeat(pixels, 3, axis=2) if mode == "rgb" and pixels.shape[2] == 1 else pixels
