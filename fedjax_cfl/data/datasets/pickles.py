"""Pickles, which are never opened: reading one runs what it says. How each kind that people
have is refused, and what to make of it instead.
"""

import itertools
import os
from pathlib import Path

from fedjax_cfl.errors import InputError

SUFFIXES = (".pkl", ".pickle", ".pck", ".p", ".joblib", ".pt", ".pth")
TORCH = (".pt", ".pth")
PROTOCOLS = (2, 3, 4, 5)  # those that mark their files
CIFAR = ("test_batch", *(f"data_batch_{part}" for part in range(1, 6)))
NAMED = {name: "cifar-10-binary.tar.gz, the same images as data_batch_1.bin" for name in CIFAR}
NAMED["partition.pkl"] = "partition.npz with sample, client, split"
NAMED["cifar10_train.p"] = NAMED["cifar10_test.p"] = "the binary CIFAR-10"
PFLLIB = (
    "an array of objects (PFLlib), which only unpickling could read, expected x, y, client, split"
    " in one .npz"
)
MOST_ENTRIES = 1000  # of a folder, looked at for pickles


def is_pickle(name: str, start: bytes) -> bool:
    """Returns whether a file is a pickle, by the end of its name or by its first two bytes."""
    marked = len(start) >= 2 and start[0] == 0x80 and start[1] in PROTOCOLS
    return marked or name.lower().endswith(SUFFIXES)


def refuse_pickle(path: Path, torch: bool = False) -> InputError:
    """Returns the error that refuses a pickle and names what can be read instead; PyTorch's
    are known by the end of their name, or by what they hold (`torch`).
    """
    name, stem = path.name, path.name.partition(".")[0]
    if name in NAMED:
        return InputError(f"{path}: is a pickle and is not opened, expected {NAMED[name]}")
    if torch or name.lower().endswith(TORCH):
        return InputError(
            f"{path}: is PyTorch's pickle and is not opened, expected .npy:"
            f' numpy.save("{stem}.npy", torch.load("{name}").numpy()), where it was made'
        )
    return InputError(
        f"{path}: is a pickle and is not opened, expected an .npz:"
        f' numpy.savez("{stem}.npz", x=x, y=y, client=client), where it was made'
    )


def refuse_pickles_in(folder: Path) -> None:
    """Raises InputError if a folder, which lacks what a reader looks for, holds pickles."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MOST_ENTRIES))
    except (OSError, ValueError):
        return  # the reader says what is wrong
    for part in (folder, folder / "train", folder / "test"):
        if os.path.isfile(part / "0.npz"):
            raise InputError(f"{part / '0.npz'}: data.npy is {PFLLIB}")
    for name in names:
        if is_pickle(name, b"") or name in CIFAR:
            raise refuse_pickle(folder / name)
