"""Images in any of the usual files, as one array of all, under the rules of `readers`."""

import io
import logging
import math
import re
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from fedjax_cfl.data.datasets.readers import report_damage
from fedjax_cfl.errors import InputError
from fedjax_cfl.validation import Rule

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
MOST_PIXELS = 2**26  # of one image
MOST_BYTES = 2**33  # of all images, unpacked
GREY, DEEP_GREY = ("1", "L", "LA", "La"), ("I;16", "I;16B", "I;16L")
COLOUR = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
BITS_PER_SAMPLE = 258  # a tag of TIFF

logging.getLogger("PIL").addHandler(logging.NullHandler())  # what matters is raised as well

Mode = Literal["auto", "grey", "rgb"]
# what makes images alike, of {height} and {width}, and of one kind: settings of a reader
SETTINGS = "size=[{height},{width}]", "mode=rgb or mode=grey"
IMAGE_SIZE = Rule(
    "null or [height,width], from 1 to 4096 each",
    lambda value: (
        value is None
        or (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(type(side) is int and 1 <= side <= 4096 for side in value)
        )
    ),
)


def stack_images(
    path: str,
    files: Iterable[tuple[str, bytes]],
    count: int,
    size: list[int] | None = None,
    mode: Mode = "auto",
    remedies: tuple[str, str] = SETTINGS,
    filter: Literal["BILINEAR", "BICUBIC"] = "BILINEAR",
) -> np.ndarray:
    """Returns `count` images [N, H, W, C], C 1 (grey) or 3, as uint8; as float32 in [0, 1] if one
    of them has 16 bits.

    Args: `files` gives what a message calls an image, and its content; `size`, height and width,
    resizes all of them, by a `filter` of Pillow; `mode` makes all of them grey or coloured, "auto"
    leaves them as they are; `remedies` is what messages advise, see `SETTINGS`.
    Raises InputError for an image that cannot be read, for colours of 16 bits, which would be cut
    to 8, and for images of different sizes or both grey and coloured.
    """
    x, first = np.empty((0, 0, 0, 0), np.uint8), ""
    for i, (name, content) in enumerate(files):
        image = read_image(name, content, size, mode, filter)
        if not i:
            x, first = _make_room(path, count, image), name
        if image.shape[:2] != x.shape[1:3]:
            found = ", ".join(
                f"{said} {shape[0]}x{shape[1]}"
                for said, shape in ((first, x.shape[1:]), (name, image.shape))
            )
            advice = remedies[0].format(height=x.shape[1], width=x.shape[2])
            raise InputError(
                f"{path}: images have different sizes ({found}), expected one, or {advice}"
            )
        if image.shape != x.shape[1:]:
            grey, other = (first, name) if x.shape[3] == 1 else (name, first)
            raise InputError(
                f"{path}: images are grey ({grey}) and coloured ({other}), expected one kind, or"
                f" {remedies[1]}"
            )
        if image.dtype != x.dtype and x.dtype == np.uint8:
            _make_room(path, count, image)
            x = x.astype(np.float32) / 255
        x[i] = image if image.dtype == x.dtype else image.astype(np.float32) / 255
    return x


def _make_room(path: str, count: int, image: np.ndarray) -> np.ndarray:
    """Returns room for `count` images such as one. Raises InputError where it is too much."""
    need = count * image.nbytes
    if need > MOST_BYTES:
        raise InputError(
            f"{path}: {count} images as {image.shape[0]}x{image.shape[1]} take {need} bytes,"
            f" expected at most {MOST_BYTES}: set size=[HEIGHT,WIDTH], or store x.npy for"
            " dataset=npy, which stays on the disk"
        )
    return np.empty((count, *image.shape), image.dtype)


def read_image(
    name: str, content: bytes, size: list[int] | None, mode: Mode, filter: str = "BILINEAR"
) -> np.ndarray:
    """Returns one image [H, W, C], uint8, or float32 v / 65535 if it is grey of 16 bits, turned as
    its EXIF says; of several frames the first.

    Args: `name` is what a message calls it, `content` that of its file; the others are as in
    `stack_images`.
    """
    from PIL import Image, ImageOps  # a slow import that few sources need

    expected = f"a complete {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
    with report_damage(name, expected, "image"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes and metadata; what matters is checked
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if math.prod(image.size) > MOST_PIXELS:
                raise ValueError(f"it has more than {MOST_PIXELS} pixels")
            _refuse_deep_colour(name, image, content)
            return _take_pixels(ImageOps.exif_transpose(image), image.format, size, mode, filter)


def _take_pixels(
    image: Any, format_: str | None, size: list[int] | None, mode: Mode, filter: str
) -> np.ndarray:
    from PIL import Image

    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("LA" if image.mode in GREY else "RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            raise ValueError("it is transparent, and what is behind it is not said")
    # older versions of Pillow have no 16 bits of their own
    if image.mode in DEEP_GREY or (image.mode == "I" and format_ in ("PNG", "PPM")):
        deep = np.asarray(image).astype(np.float32) / 65535
        image = Image.fromarray(deep)
    elif image.mode in GREY or (image.mode in COLOUR and mode == "grey"):
        image = image.convert("L")
    elif image.mode in COLOUR:
        image = image.convert("RGB")
    else:
        raise ValueError(f"its pixels are {image.mode}, neither 8 bits nor grey of 16")
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling[filter])
    pixels = np.asarray(image).reshape(image.size[1], image.size[0], -1)
    return np.repeat(pixels, 3, axis=2) if mode == "rgb" and pixels.shape[2] == 1 else pixels


def _refuse_deep_colour(name: str, image: Any, content: bytes) -> None:
    """Raises InputError for more than 8 bits of more than grey, which Pillow would cut."""
    bits, colours = 8, True
    if image.format == "PNG":
        bits, colours = content[24], content[25] != 0  # of the header, which comes first
    elif image.format == "PPM":
        kind, *numbers = re.sub(rb"#[^\n]*", b"", content[:4096]).split()[:4]
        bits = 16 if kind in (b"P3", b"P6") and int(numbers[2]) > 255 else 8
    elif image.format == "TIFF":
        found = image.tag_v2.get(BITS_PER_SAMPLE, (1,))
        bits, colours = max(found), len(found) > 1
    if bits > 8 and colours:
        raise InputError(
            f"{name}: has {bits} bits and colours or transparency, which would be cut to 8,"
            " expected grey of 16 bits or images of 8 bits"
        )
