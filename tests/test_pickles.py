"""Pickles are refused by name, whoever meets them, and never opened."""

import io
import pickle
import zipfile

import numpy as np
import pytest
from conftest import one_line

from fedjax_cfl.data.datasets import image_folder, leaf, npy, npz
from fedjax_cfl.data.datasets.pickles import PFLLIB

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])
READERS = {
    "npz": npz,
    "npy": npy,
    "leaf": leaf,
    "image_folder": image_folder,
}


class Trap:
    """Makes a file where it is unpickled."""

    def __reduce__(self):
        return open, ("pwned", "w")


def torch_file():
    """Returns what torch.save writes: an archive with a pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data/data.pkl", pickle.dumps(Trap()))
        archive.writestr("data/data/0", b"")
    return out.getvalue()


FILES = {
    "data_batch_1": (
        pickle.dumps(Trap(), 2),
        "expected cifar-10-binary.tar.gz, the same images as data_batch_1.bin",
    ),
    "partition.pkl": (pickle.dumps(Trap()), "expected partition.npz with sample, client, split"),
    "cifar10_train.p": (pickle.dumps(Trap()), "expected the binary CIFAR-10"),
    "mine.pkl": (pickle.dumps(Trap(), 0), 'numpy.savez("mine.npz", x=x, y=y, client=client)'),
    "mine.pickle": (b"", "is a pickle and is not opened"),
    "mine": (pickle.dumps(Trap(), 5), "is a pickle and is not opened"),
    "mine.npz": (pickle.dumps(Trap(), 4), "is a pickle and is not opened"),
    "data.pt": (torch_file(), 'numpy.save("data.npy", torch.load("data.pt").numpy())'),
    "data.pth": (pickle.dumps(Trap(), 2), "is PyTorch's pickle and is not opened"),
}


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert not list((tmp_path / "cwd").iterdir())  # nothing was run


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "npy"])
def test_a_pickle_is_refused_by_name(kind, name, tmp_path):
    content, says = FILES[name]
    (tmp_path / name).write_bytes(content)
    error = one_line(says, READERS[kind], tmp_path / name)
    assert str(tmp_path / name) in error and "expected" in error


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("mine", "mine.npz")])
@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "leaf"])
def test_a_folder_of_pickles_is_refused_by_name(kind, name, tmp_path):
    (tmp_path / "data").mkdir()
    content, says = FILES[name]
    (tmp_path / "data" / name).write_bytes(content)
    assert f"data/{name}: is" in one_line(says, READERS[kind], tmp_path / "data")


def test_what_torch_saves_is_known_by_what_it_holds(tmp_path):
    (tmp_path / "a.npz").write_bytes(torch_file())
    one_line("a.npz: is PyTorch's pickle and is not opened", npz, tmp_path / "a.npz")


def test_folders_of_pfllib_are_refused_with_what_to_store(tmp_path):
    path = tmp_path / "MNIST" / "train" / "0.npz"
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, data=np.array({"x": X, "y": Y}, dtype=object))
    for kind in ("npz", "npy", "image_folder"):
        one_line(f"0.npz: data.npy is {PFLLIB}", READERS[kind], tmp_path / "MNIST")
    one_line(f"0.npz: data.npy is {PFLLIB}", npz, path)
    np.savez(path, data=X)  # no objects: some other file
    one_line("array 'x' is missing, expected x, y; found 'data'", npz, path)


def test_arrays_beside_pickles_are_read(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    (tmp_path / "old.pkl").write_bytes(b"")
    assert len(npy(tmp_path).y) == 4
