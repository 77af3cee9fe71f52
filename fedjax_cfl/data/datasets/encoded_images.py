"""Images in PNG, JPEG, TIFF, BMP or WebP: decoded in bounded memory, all of one size."""

import io
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedjax_cfl.data.datasets.readers import line_of
from fedjax_cfl.errors import InputError

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WEBP")
LARGEST = 4096  # pixels of a side
MOST_BYTES = 2**34  # of all images, decoded
MAP = 'datasets.Dataset.map(lambda row: {"image": row["image"]'  # the remedy, begun
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


def decode_images(name: str, encoded: Iterable[bytes | None], count: int) -> np.ndarray:
    """Returns images [count, H, W] or [count, H, W, 3]: uint8, or of 16 bits float32 in [0, 1].

    `name` begins every message; `encoded` are files' contents. Images are turned as their EXIF
    data say. Raises InputError for the first row that is no image, or of another size or kind
    than row 0.
    """
    x = np.empty((0,))
    for row, content in enumerate(encoded):
        image = _decode(f"{name} in row {row}", content)
        if row == 0:
            if (size := count * image.nbytes) > MOST_BYTES:
                raise InputError(
                    f"{name}: {count} images of {_describe(image)} take {size} bytes, expected at"
                    f" most {MOST_BYTES}: make them smaller"
                )
            x = np.empty((count, *image.shape), image.dtype)
        if image.shape[:2] != x.shape[1:3]:
            raise InputError(
                f"{name} in row {row} is {_describe(image)}, expected {_describe(x[0])} as in row"
                f" 0: {MAP}.resize({x.shape[2:0:-1]})}})"
            )
        if image.ndim != x.ndim - 1 or image.dtype != x.dtype:
            raise InputError(
                f"{name} in row {row} is {_describe(image)}, expected {_describe(x[0])} as in row"
                f' 0: {MAP}.convert("RGB")}})'
            )
        x[row] = image
    return x


def _describe(image: np.ndarray) -> str:
    """Returns an image's size and kind, as in "28x28 grey"."""
    bits = "" if image.dtype == np.uint8 else " of 16 bits"
    return f"{image.shape[0]}x{image.shape[1]} {'rgb' if image.ndim == 3 else 'grey'}{bits}"


def _decode(name: str, content: bytes | None) -> np.ndarray:
    """Returns one image [H, W] or [H, W, 3]."""
    from PIL import Image, ImageOps  # a slow import that few sources need

    if content is None:
        raise InputError(f"{name} is null, expected an image in every row")
    try:
        if content[:8] == b"\x89PNG\r\n\x1a\n" and content[24:25] == b"\x10" and content[25]:
            # which Pillow would cut to 8 bits without a word
            raise ValueError("it has 16 bits and several colours, of 8 bits or 16-bit grey")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes and metadata; what matters is checked
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if max(image.size) > LARGEST:
                    raise ValueError(
                        f"it has {image.size[0]} x {image.size[1]} pixels, more than {LARGEST} on a"
                        " side"
                    )
                png = image.format == "PNG"
                return _pixels(ImageOps.exif_transpose(image), png)
    except Exception as error:  # a damaged image raises many kinds
        raise InputError(
            f"{name} cannot be read ({line_of(error)}), expected an image in {', '.join(FORMATS)}"
        ) from error


def _pixels(image: Any, png: bool) -> np.ndarray:
    """Returns the pixels [H, W] or [H, W, 3] of an open image."""
    # older Pillow has 16-bit PNG as "I"
    if image.mode in SIXTEEN_BITS or (png and image.mode == "I"):
        return np.asarray(image).astype(np.float32) / 65535  # convert("L") would clip it
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of Pillow's mode {image.mode}, not of 8 or 16 bits")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("LA" if image.mode in ("L", "LA") else "RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            raise ValueError("it is transparent, and what is behind it is not said")
    grey = image.mode in ("1", "L", "LA")
    return np.asarray(image.convert("L" if grey else "RGB"))
