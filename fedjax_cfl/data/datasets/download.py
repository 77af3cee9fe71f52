"""Finding data files on this computer and fetching the public ones.

A file is named by its path under a data root, such as
`mnist/t10k-labels-idx1-ubyte.gz`. The roots are the folders named in the environment
variable FEDJAX_CFL_DATA, then the user's cache folder. What the user put there is used
as it is; only what is downloaded is verified, and it gets its final name after that.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import platformdirs

from fedjax_cfl.data.datasets.readers import line_of
from fedjax_cfl.errors import InputError, parse_arguments, suggest_nearest

DATA_ENV_VAR = "FEDJAX_CFL_DATA"
RETRIES = 2  # of a transfer that breaks off, or of a file that is damaged


LINES = Path(__file__).with_name("registry.txt").read_text().splitlines()
# of the public files by their paths under a data root: sha256: and its SHA-256 in hex, address
REGISTRY = {path: rest for path, *rest in (line.split() for line in LINES if line[:1] != "#")}
# what the archives among them hold
MEMBERS = {
    "cifar10/cifar-10-binary.tar.gz": tuple(
        f"cifar-10-batches-bin/{name}.bin"
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    ),
    "cifar100/cifar-100-binary.tar.gz": tuple(
        f"cifar-100-binary/{name}"
        for name in ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
    ),
}
LEAF = "LEAF's scripts make it, https://github.com/TalwalkarLab/leaf/tree/master/data/{}"
# where the others are got from, by name
PAGES = {
    **{name: LEAF.format(name) for name in ("celeba", "femnist", "sent140", "shakespeare")},
    "elec2": "its columns are those of https://www.openml.org/d/151",
    "sign_digits": "images are those of https://github.com/ardamavi/Sign-Language-Digits-Dataset",
    "usps": "it is at https://www.kaggle.com/datasets/bistaumanga/usps-dataset",
}


def cache_dir() -> Path:
    """Returns the folder that downloads go to (not created yet)."""
    return Path(platformdirs.user_cache_dir("fedjax_cfl"))


def search_dirs() -> list[Path]:
    """Returns the folders that are searched, in order."""
    # those of pathlib raise errors of their own, for ~nobody and for names that are too long
    named = [
        Path(os.path.expanduser(name))
        for name in os.environ.get(DATA_ENV_VAR, "").split(os.pathsep)
        if name.strip()
    ]
    for folder in named:
        if not os.path.isdir(folder):
            raise InputError(
                f"{DATA_ENV_VAR}: no folder {folder}, expected existing folders separated by"
                f" {os.pathsep!r}"
            )
    return [*named, cache_dir()]


def locate(*relative_paths: str) -> list[Path] | None:
    """Returns where the files (or folders) are, each in the first root that has it, or
    None if any is missing.

    A name that ends in .gz is also found unpacked, without that ending.
    """
    found = []
    for relative in relative_paths:
        names = dict.fromkeys((relative, relative.removesuffix(".gz")))
        places = [root / name for root in search_dirs() for name in names]
        found += [place for place in places if os.path.lexists(place)][:1]
    return found if len(found) == len(relative_paths) else None


def locate_leaf(name: str, *others: tuple[str, ...]) -> list[Path] | None:
    """Returns the folders of LEAF's JSON files of a data set, those of training and of testing or
    one of all, under NAME/data, as LEAF makes them, or NAME; `others` are tried after these.
    """
    sides = [("train", "test"), ("all_data",), *others]
    places = [
        [f"{home}/{part}" for part in parts] for home in (f"{name}/data", name) for parts in sides
    ]
    return next((found for paths in places if (found := locate(*paths))), None)


def require(name: str, *relative_paths: str) -> list[Path]:
    """Returns where the files of a data set that is not downloaded are. Raises InputError if one
    is missing.
    """
    found = locate(*relative_paths)
    if found is None:
        raise missing_data_error(name, *relative_paths)
    return found


def missing_data_error(name: str, *relative_paths: str, why: str = "") -> InputError:
    """Returns the error for a data set that is not here, which says what to put where, and where to
    get it; `why`: it is not downloaded now.
    """
    absent = [relative for relative in relative_paths if locate(relative) is None]
    source = f"`fedjax-cfl download {name}` does it" if name in list_public() else PAGES[name]
    return InputError(
        f"{name}{why}: not found: {', '.join(absent)}; put it into {cache_dir()} or into a folder"
        f" named in {DATA_ENV_VAR} ({source})"
    )


def list_public() -> list[str]:
    """Returns the names of the data sets that can be downloaded."""
    return list(dict.fromkeys(path.partition("/")[0] for path in REGISTRY))


def list_files(name: str) -> dict[str, list[str]]:
    """Returns, for each file of a public data set, the paths of what is read of it: itself, or the
    members of an archive.
    """
    paths = [path for path in REGISTRY if path.startswith(f"{name}/")]
    return {path: [f"{name}/{part}" for part in MEMBERS.get(path, ())] or [path] for path in paths}


def list_wanted(name: str) -> list[str]:
    """Returns the paths of all that is read of a public data set."""
    return [path for paths in list_files(name).values() for path in paths]


def fetch(name: str, offline: bool = False) -> list[Path]:
    """Returns the files of a public data set in the order of the registry, after
    downloading those that are not here. With `offline`, nothing is downloaded and a missing file
    is an error.
    """
    if name not in list_public():
        raise InputError(
            f"download={name}: no such data set, expected one of"
            f" {', '.join(list_public())}{suggest_nearest(name, list_public())}"
        )
    wanted = list_wanted(name)
    if offline and locate(*wanted) is None:
        raise missing_data_error(name, *wanted, why=" (offline)")
    for path, parts in list_files(name).items():
        if locate(*parts) is None:
            _retrieve(path)
    return locate(*wanted) or []


def main(argv: list[str]) -> int:
    """`fedjax-cfl download NAME...`: fetches public data sets and says where they are."""
    described = "Fetch public data sets and verify them by SHA-256."
    parser = argparse.ArgumentParser(prog="fedjax-cfl download", description=described)
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(list_public()))
    for name in parse_arguments(parser, argv).names:
        print(f"{name}: {', '.join(map(str, fetch(name)))}")
    return 0


def _retrieve(path: str) -> None:
    """Downloads a file of the registry into the cache folder; it appears there only when complete
    and with the right SHA-256, and is unpacked then.
    """
    import pooch  # with requests, a slow import that an offline run does not need

    # pooch's progress bar needs tqdm, which is not one of our dependencies
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    target, (digest, url) = cache_dir() / path, REGISTRY[path]
    store = pooch.create(
        target.parent,
        "",
        registry={target.name: digest},
        urls={target.name: url},
        retry_if_failed=RETRIES,
    )
    unpack = pooch.Untar(list(MEMBERS[path]), extract_dir=".") if path in MEMBERS else None
    try:
        store.fetch(target.name, unpack, progressbar=bar)
    except (OSError, ValueError) as error:
        # the exceptions of requests are OSErrors (or, for a bad address, ValueErrors)
        raise InputError(
            f"{target.parent.name}: {url}: {line_of(error)}; put {target.name} into {target.parent}"
            f" or into {target.parent.name}/ in a folder named in {DATA_ENV_VAR}"
        ) from error
