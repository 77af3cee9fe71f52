"""Folders of images of the user's own: read as Pillow reads each, and one line for everything
that is refused.
"""

import io
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from conftest import one_line, refusal
from PIL import Image

from fedjax_cfl.cli.build import deal_samples, resolve_settings
from fedjax_cfl.data import partition
from fedjax_cfl.data.datasets import image_folder
from fedjax_cfl.data.federated import federate
from fedjax_cfl.runs.load import load_run

RNG = np.random.default_rng(0)


def pixels(*shape, kind=np.uint8):
    return RNG.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)


def encoded(image, format_="PNG", **options):
    """Returns the bytes of an image of Pillow, or of an array."""
    out = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(out, format_, **options)
    return out.getvalue()


def written(root, files):
    """Writes files: arrays as PNG, bytes as they are, None as an empty folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else encoded(content))
    return root


def deep_png(values, colours=0):
    """Returns a PNG of 16 bits, written by hand; `colours` 2 is RGB, 4 grey with transparency."""
    channels = {0: 1, 2: 3, 4: 2}[colours]
    height, width = values.shape[:2]
    rows = values.astype(">u2").reshape(height, width, -1).repeat(channels, axis=2)
    data = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, colours, 0, 0, 0),
        b"IDAT": zlib.compress(data),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts.items()
    )


A, B, C = pixels(4, 5), pixels(4, 5), pixels(4, 5)


@pytest.mark.parametrize(
    ("layout", "files"),
    [
        ("class", {"cat/1.png": A, "dog/1.png": B, "dog/2.png": C}),
        ("split/class", {"train/cat/1.png": A, "train/dog/1.png": B, "test/dog/2.png": C}),
        ("user/class", {"10/cat/1.png": A, "9/dog/1.png": B, "9/dog/2.png": C}),
        ("class/user", {"cat/10/1.png": A, "dog/9/1.png": B, "dog/9/2.png": C}),
        (
            "split/user/class",
            {"train/10/cat/1.png": A, "train/9/dog/1.png": B, "test/9/dog/2.png": C},
        ),
        (
            "user/split/class",
            {"10/train/cat/1.png": A, "9/train/dog/1.png": B, "9/test/dog/2.png": C},
        ),
    ],
)
def test_layouts(layout, files, tmp_path, capsys):
    written(tmp_path, files)
    pool = image_folder(tmp_path, layout)
    order = sorted(files)  # by path
    np.testing.assert_array_equal(pool.x[..., 0], np.stack([files[name] for name in order]))
    assert pool.x.dtype == np.uint8 and pool.x.shape == (3, 4, 5, 1)
    assert pool.class_names == ("cat", "dog") and pool.num_classes == 2
    assert pool.y.tolist() == [int("dog" in name) for name in order]
    if "user" in layout:
        assert pool.client_names == (9, 10)  # digits sort as numbers
        assert pool.client.tolist() == [int("10" in name) for name in order]
        data = federate(pool, partition.by_user(pool, test_fraction=0))
        assert data.client_names.names == (9, 10)
    else:
        assert pool.client is None and pool.client_names is None
    expected = ["test" in name for name in order] if "split" in layout else None
    assert (pool.test is None) == (expected is None)
    assert expected is None or pool.test.tolist() == expected
    assert capsys.readouterr().err == ""


def test_a_layout_is_asked_for_where_several_fit(tmp_path):
    written(tmp_path, {"a/1.png": A, "b/1.png": B})
    assert image_folder(tmp_path).class_names == ("a", "b")
    written(tmp_path / "two", {"train/a/1.png": A})
    one_line(
        "train/a/1.png is 2 folders deep, expected layout=split/class or layout=user/class or"
        " layout=class/user",
        image_folder,
        tmp_path / "two",
    )
    one_line("layout=classes: must be null or one of class,", image_folder, tmp_path, "classes")


def test_classes_are_those_of_all_splits(tmp_path):
    files = {"train/10/1.png": A, "train/2/1.png": B, "test/3/1.png": C}
    pool = image_folder(written(tmp_path, files), "split/class")
    assert pool.class_names == ("2", "3", "10") and pool.num_classes == 3
    assert pool.y.tolist() == [1, 2, 0] and pool.test.tolist() == [True, False, False]


def test_third_splits_are_left_out_and_said(tmp_path, capsys):
    files = {"train/a/1.png": A, "val/a/1.png": B, "test/a/1.png": C, "val/b/1.png": A}
    written(tmp_path, files)
    pool = image_folder(tmp_path, "split/class")
    assert len(pool.y) == 2 and pool.class_names == ("a",)
    assert "splits val are left out, see train and test" in capsys.readouterr().err
    pool = image_folder(tmp_path, "split/class", test="val")
    assert pool.test.tolist() == [False, True, True] and pool.class_names == ("a", "b")
    assert "splits test are left out" in capsys.readouterr().err
    pool = image_folder(tmp_path, "split/class", test=None)
    assert len(pool.y) == 1 and pool.test is None
    assert one_line("no split is named dev", image_folder, tmp_path, "split/class", test="dev")
    one_line("expected train=NAME of one of", image_folder, tmp_path, "split/class", train="dev")


KINDS = {
    "1": Image.fromarray(A > 100),
    "L": Image.fromarray(A),
    "LA": Image.fromarray(A).convert("LA"),
    "P": Image.fromarray(pixels(4, 5, 3)).quantize(4),
    "RGB": Image.fromarray(pixels(4, 5, 3)),
    "RGBA": Image.fromarray(pixels(4, 5, 3)).convert("RGBA"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_pixels(kind, tmp_path):
    image = KINDS[kind]
    x = image_folder(written(tmp_path, {"a/1.PNG": encoded(image)})).x
    colour = "L" if kind in ("1", "L", "LA") else "RGB"
    expected = np.asarray(image.convert(colour)).reshape(1, 4, 5, -1)
    np.testing.assert_array_equal(x, expected)
    for mode, channels in (("grey", 1), ("rgb", 3)):
        found = image_folder(tmp_path, mode=mode).x
        want = np.asarray(image.convert(colour).convert("L" if mode == "grey" else "RGB"))
        assert found.shape == (1, 4, 5, channels)
        np.testing.assert_array_equal(found, want.reshape(found.shape))


FILES = {"a.jpg": "JPEG", "a.JPEG": "JPEG", "a.ppm": "PPM", "a.bmp": "BMP", "a.tif": "TIFF"}


@pytest.mark.parametrize("name", [*FILES, "a.webp"])
def test_files_of_other_kinds(name, tmp_path):
    content = encoded(pixels(8, 6, 3), FILES.get(name, "WEBP"))
    x = image_folder(written(tmp_path, {f"a/{name}": content})).x
    np.testing.assert_array_equal(x[0], np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    cmyk = encoded(Image.fromarray(pixels(8, 6, 4), "CMYK"), "JPEG") if "jpg" in name else content
    written(tmp_path, {f"a/{name}": cmyk})
    assert image_folder(tmp_path).x.shape == (1, 8, 6, 3)


@pytest.mark.parametrize("name", ["png", "tif", "pgm"])
def test_grey_of_16_bits_is_scaled_and_never_cut(name, tmp_path):
    deep = pixels(4, 5, kind=np.uint16)
    content = {
        "png": deep_png(deep),
        "tif": encoded(deep, "TIFF"),
        "pgm": b"P5\n# of a camera\n5 4\n65535\n" + deep.astype(">u2").tobytes(),
    }[name]
    written(tmp_path, {f"a/1.{name}": content})
    x = image_folder(tmp_path).x
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x[0, ..., 0], deep.astype(np.float32) / 65535)
    assert image_folder(tmp_path, mode="rgb").x.shape == (1, 4, 5, 3)
    flat = np.full((4, 5), 4000, np.uint16)
    written(tmp_path / "b", {"a/1.png": deep_png(flat)})
    np.testing.assert_allclose(image_folder(tmp_path / "b", size=[2, 3]).x, 4000 / 65535, rtol=1e-6)
    written(tmp_path / "b", {"a/0.png": A})  # with one of 8 bits before
    x = image_folder(tmp_path / "b").x
    np.testing.assert_array_equal(x[0, ..., 0], A.astype(np.float32) / 255)
    np.testing.assert_array_equal(x[1, ..., 0], flat.astype(np.float32) / 65535)


def test_photographs_are_turned_as_their_camera_says(tmp_path):
    image, exif = Image.fromarray(np.tile(np.arange(0, 240, 30, np.uint8), (16, 2))), Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = encoded(image, "JPEG", exif=exif, quality=100)
    x = image_folder(written(tmp_path, {"a/1.jpg": turned, "a/2.jpg": turned})).x
    plain = np.asarray(Image.open(io.BytesIO(turned)))
    np.testing.assert_array_equal(x[0, ..., 0], np.rot90(plain, -1))


def test_sizes(tmp_path):
    written(tmp_path, {"a/1.png": A, "a/2.png": pixels(6, 3)})
    one_line("2.png (6, 3, 1)), expected one, or size=[4,5]", image_folder, tmp_path)
    x = image_folder(tmp_path, size=[4, 5]).x
    np.testing.assert_array_equal(x[0, ..., 0], A)  # as it was
    for size in ([4], [0, 4], [4, 5000], [4, 5.0], "4"):
        one_line("must be null or [height,width]", image_folder, tmp_path, size=size)


def test_what_systems_leave_is_passed_over_and_other_files_are_said(tmp_path, capsys):
    trash = ("a/.hidden.png", "a/Thumbs.db", "__MACOSX/a/1.png", ".git/x.png", "a/desktop.ini")
    files = {"a/1.png": A} | dict.fromkeys(trash, b"no image")
    pool = image_folder(written(tmp_path, files))
    assert len(pool.y) == 1 and pool.class_names == ("a",) and capsys.readouterr().err == ""
    written(tmp_path, {"notes.txt": b"x", "a/labels.csv": b"x"})
    assert len(image_folder(tmp_path).y) == 1
    assert "files that are no images are left out (2): a/labels.csv, not" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_runs_of_a_sweep_say_once_what_a_file_holds(fedjax_cfl, tmp_path, capsys):
    written(tmp_path / "own", {f"{k}/{n}.png": A for k in "ab" for n in range(8)} | {"notes": b"x"})
    status, out, err = fedjax_cfl(
        "-m algorithm=fedavg dataset=image_folder dataset.source.path=own dataset.clients=2"
        " partition=iid model=mclr seed=0,1 rounds=1 run_dir=sweep"
    )
    assert status == 0 and out.count("written to") == 2, err
    assert err.count("are no images are left out (1)") == 1
    assert out.count("clients_per_round=2: all clients") == 1
    for _ in range(2):  # from Python every call says it
        image_folder(tmp_path / "own")
    assert capsys.readouterr().err.count("are no images are left out (1)") == 2


BAD = {
    "no image": ({"a/1.png": b"hello"}, "a/1.png: image cannot be read"),
    "empty": ({"a/1.jpg": b""}, "a/1.jpg: image cannot be read"),
    "cut": ({"a/1.png": encoded(A)[:-30]}, "a/1.png: image cannot be read"),
    "a flipped bit": (
        {"a/1.png": encoded(A).replace(b"IDAT", b"IDAU")}, "a/1.png: image cannot be read",
    ),
    "another kind": ({"a/1.png": encoded(A, "GIF")}, "a/1.png: image cannot be read"),
    "too many pixels": (
        {"a/1.png": encoded(A)[:16] + struct.pack(">II", 2**20, 2**20) + encoded(A)[24:]},
        "a/1.png: image cannot be read",
    ),
    "transparent": (
        {"a/1.png": encoded(Image.fromarray(pixels(4, 5, 4)))},
        "1.png: image cannot be read (it is transparent, and what is behind it is not said)",
    ),
    "floats": ({"a/1.tif": encoded(A.astype(np.float32), "TIFF")}, "neither 8 bits nor grey of 16"),
    "grey and coloured": (
        {"a/1.png": A, "a/2.png": pixels(4, 5, 3)}, "or mode=rgb or mode=grey",
    ),
    "no class": ({"1.png": A}, "1.png is 0 folders deep, expected layout=class, a folder for each"),
    "some without a class": ({"a/1.png": A, "2.png": A}, "2.png is 0 folders deep"),
    "some deeper": ({"a/1.png": A, "b/c/1.png": A}, "b/c/1.png is 2 folders deep, expected"),
    "too deep": ({"a/b/c/d/1.png": A}, "a/b/c/d is 4 folders deep, expected at most 3"),
    "nothing": ({"a": None, "b.gif": b"GIF"}, "folder holds no images"),
    "CIFAR-10's pickles": ({"data_batch_1": b"\x80\2"}, "found data_batch_1"),
    "a pickle as image": ({"a/1.png": b"\x80\x04."}, "1.png: is a pickle and is not opened"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_named(name, tmp_path):
    files, says = BAD[name]
    root = written(tmp_path / "images", files)
    error = one_line(says, image_folder, root)
    assert str(root) in error and "expected" in error and len(error) < 1000


def test_no_folder(tmp_path):
    written(tmp_path, {"a.png": A, "b.pkl": b"", "c.zip": b"PK\3\4"})
    one_line("a.png: is a file, expected a folder of images", image_folder, tmp_path / "a.png")
    one_line("b.pkl: is a pickle", image_folder, tmp_path / "b.pkl")
    one_line("c.zip: is a zip archive, or a file", image_folder, tmp_path / "c.zip")
    for name in ("absent", "z" * 300, "a\0b"):
        assert "cannot be read" in refusal(image_folder, f"{tmp_path}/{name}")


@pytest.mark.nightly
def test_a_run_on_images(fedjax_cfl, tmp_path):
    files = {
        f"{split}/writer {k}/{(9, 10)[i % 2]}/{i}.png": pixels(4, 5) // 40 + i % 2 * 200
        for split, count in (("train", 4), ("test", 2))
        for k in range(3)
        for i in range(count)
    }
    written(tmp_path / "images", files)
    line = "dataset=image_folder dataset.source.path=images"
    config = resolve_settings([*line.split(), "dataset.source.layout=split/user/class"])
    pool, holdings = deal_samples(config)
    assert holdings.client_names == ("writer 0", "writer 1", "writer 2") and len(pool.y) == 18
    line += " rounds=1 algorithm=fedavg run_dir=run"
    status, out, error = fedjax_cfl(f"{line} dataset.source.layout=split/user/class")
    assert (status, error) == (0, "")
    assert "fedavg on image_folder: 3 clients, 2 classes, 12 train and 6 test samples" in out
    assert load_run("run").class_names == ("9", "10")
    status, _, error = fedjax_cfl(line + "2")
    assert status == 2 and "layout=split/user/class or layout=user/split/class" in error


def table(*rows, kind="csv", head=("file_name", "label", "user")) -> bytes:
    """Returns a table of rows, as Arrow writes it."""
    cells = pa.table({name: [row[i] for row in rows] for i, name in enumerate(head)})
    out = io.BytesIO()
    if kind == "jsonl":
        return "".join(f"{json.dumps(row)}\n" for row in cells.to_pylist()).encode()
    (pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table)(cells, out)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_beside_the_images_says_what_they_are(kind, tmp_path, capsys):
    rows = [("b/2.png", "dog", 10, "test"), ("a.png", "cat", 9, "train")]
    rows.append(("b/1.png", "dog", 9, "train"))
    head = ("file_name", "label", "user", "split")
    named = {f"metadata.{kind}": table(*rows, kind=kind, head=head)}
    written(tmp_path, {"a.png": A, "b/1.png": B, "b/2.png": C, **named})
    pool = image_folder(tmp_path)
    np.testing.assert_array_equal(pool.x[..., 0], np.stack([C, A, B]))
    assert pool.class_names == ("cat", "dog") and pool.y.tolist() == [1, 0, 1]
    assert pool.client_names == (9, 10) and pool.client.tolist() == [1, 0, 0]
    assert pool.test.tolist() == [True, False, False]
    other = image_folder(tmp_path, "metadata", y="user", client="label")
    assert other.client_names == ("cat", "dog") and other.class_names == ("9", "10")
    assert image_folder(tmp_path, y="split").class_names == ("test", "train")
    assert capsys.readouterr().err == ""


def test_each_split_may_have_its_table(tmp_path):
    train, test = table(("1.png", 0, "a"), ("2.png", 1, "b")), table(("1.png", 1, "a"))
    images = {"train/1.png": A, "train/2.png": B, "test/1.png": C}
    written(tmp_path, {**images, "train/metadata.csv": train, "test/metadata.csv": test})
    pool = image_folder(tmp_path)
    np.testing.assert_array_equal(pool.x[..., 0], np.stack([A, B, C]))
    assert pool.y.tolist() == [0, 1, 1] and pool.test.tolist() == [False, False, True]
    assert pool.client.tolist() == [0, 1, 0] and pool.class_names is None


BAD_TABLES = {
    "another name": (
        table(("a.png", "x"), head=("file_name", "lable")),
        "y=label is not there, expected one of file_name, lable (did you mean 'lable'?)",
    ),
    "no files": (table(("a.png", "x"), head=("image", "label")), "column file_name is missing"),
    "no such image": (table(("c.png", "x", 1)), "c.png: file cannot be read"),
    "no image": (table(("metadata.csv", "x", 1)), "metadata.csv: image cannot be read"),
    "no label": (table(("a.png", None, 1), ("a.png", "x", 1)), "column label has no value"),
    "no rows": (b"file_name,label\n", "table has no rows"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_is_refused_of_a_table_is_named(name, tmp_path):
    content, says = BAD_TABLES[name]
    written(tmp_path / "root", {"a.png": A, "metadata.csv": content})
    one_line(says, image_folder, tmp_path / "root")


def test_a_table_that_is_not_there(tmp_path):
    written(tmp_path, {"cat/1.png": A, "dog/1.png": B})
    (tmp_path / "metadata.csv").write_bytes(table(("cat/1.png", "x", 1)))
    one_line("column user is y, client", image_folder, tmp_path, y="user")
    (tmp_path / "metadata.csv").unlink()
    one_line("layout=metadata, expected metadata.csv or", image_folder, tmp_path, "metadata")
    one_line("y=kind, client=None, layout=None, expected", image_folder, tmp_path, y="kind")
    one_line("client=kind, layout=class, expected", image_folder, tmp_path, "class", client="kind")
