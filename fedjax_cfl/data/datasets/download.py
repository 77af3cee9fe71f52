"""Finding data files on this computer and fetching the public ones.

A file is named by its path under a data root, such as
`mnist/t10k-labels-idx1-ubyte.gz`. The roots are the folders named in the environment
variable FEDJAX_CFL_DATA, then the user's cache folder. What the user put there is used
as it is; only what is downloaded is verified, and it gets its final name after that.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import platformdirs

from fedjax_cfl.errors import InputError, suggest_nearest

DATA_ENV_VAR = "FEDJAX_CFL_DATA"
TIMEOUT = 30  # seconds without an answer


class Remote(NamedTuple):
    """A public data set: one folder of a web server."""

    base_url: str
    files: dict[str, str]  # file name -> SHA-256 in hex


IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
MNIST = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
FASHION_MNIST = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
REGISTRY = {
    "mnist": Remote(
        "https://ossci-datasets.s3.amazonaws.com/mnist/", dict(zip(IDX, MNIST, strict=True))
    ),
    "fashion_mnist": Remote(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        dict(zip(IDX, FASHION_MNIST, strict=True)),
    ),
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
    found = [path for relative in relative_paths if (path := _find(relative)) is not None]
    return found if len(found) == len(relative_paths) else None


def _find(relative: str) -> Path | None:
    names = dict.fromkeys((relative, relative.removesuffix(".gz")))
    return next(
        (root / name for root in search_dirs() for name in names if os.path.lexists(root / name)),
        None,
    )


def locate_first(places: Iterable[tuple[str, ...]]) -> list[Path] | None:
    """Returns where the files of the first of several places are that has all of them."""
    return next((found for paths in places if (found := locate(*paths))), None)


def require(name: str, *relative_paths: str) -> list[Path]:
    """Returns where the files of a data set that is not downloaded are. Raises InputError if one
    is missing.
    """
    found = locate(*relative_paths)
    if found is None:
        raise missing_data_error(f"{name} (no download)", *relative_paths)
    return found


def missing_data_error(name: str, *relative_paths: str) -> InputError:
    """Returns the error for a data set that is not here, which says what to put where."""
    absent = [relative for relative in relative_paths if _find(relative) is None]
    return InputError(
        f"{name}: not found: {', '.join(absent)}; put it into {cache_dir()} or into a folder named"
        f" in {DATA_ENV_VAR}"
    )


def fetch(name: str, offline: bool = False, base_url: str | None = None) -> list[Path]:
    """Returns the files of a public data set in the order of the registry, after
    downloading those that are not here.

    With `offline`, nothing is downloaded and a missing file is an error. `base_url`
    names another server with the same files.
    """
    if name not in REGISTRY:
        raise InputError(
            f"download={name}: no such data set, expected one of"
            f" {', '.join(REGISTRY)}{suggest_nearest(name, REGISTRY)}"
        )
    remote = REGISTRY[name]
    relative = [f"{name}/{file}" for file in remote.files]
    if offline and locate(*relative) is None:
        raise missing_data_error(f"{name} (offline)", *relative)
    base = (base_url or remote.base_url).rstrip("/")
    return [
        _find(path) or _retrieve(f"{base}/{file}", digest, cache_dir() / path)
        for path, (file, digest) in zip(relative, remote.files.items(), strict=True)
    ]


def download(names: str | Iterable[str], base_url: str | None = None) -> dict[str, list[Path]]:
    """Fetches public data sets by name ("mnist", "fashion_mnist") and returns the files of each."""
    return {
        name: fetch(name, base_url=base_url)
        for name in ([names] if isinstance(names, str) else names)
    }


def _retrieve(url: str, digest: str, target: Path) -> Path:
    """Downloads one file to `target`; it appears there only when complete and with the
    right SHA-256.
    """
    import pooch  # with requests, a slow import that an offline run does not need

    # The progress bar needs tqdm, which is not one of our dependencies.
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    # pooch types a downloader's `check_only` more narrowly than its own classes
    downloader = cast(Any, pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT))
    try:
        pooch.retrieve(
            url, f"sha256:{digest}", fname=target.name, path=target.parent, downloader=downloader
        )
    except (OSError, ValueError) as error:
        # the exceptions of requests are OSErrors (or, for a bad address, ValueErrors)
        place = (
            f"put {target.name} into {target.parent} or into {target.parent.name}/ in a folder"
            f" named in {DATA_ENV_VAR}"
        )
        raise InputError(f"{target.parent.name}: {url}: {_reason(error)}; {place}") from error
    return target


def _reason(error: Exception) -> str:
    import requests

    chain = f"{error!r}".lower()
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code}, expected the file"
    if "incompleteread" in chain or isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the transfer broke off, expected the complete file"
    if isinstance(error, requests.Timeout):
        return f"no answer within {TIMEOUT} seconds"
    if isinstance(error, requests.ConnectionError):
        return "no connection to the server"
    if isinstance(error, ValueError) and "hash" in chain:
        return (
            "SHA-256 of what came is wrong (a damaged file or an error page), expected the"
            " published one"
        )
    return " ".join(str(error).split())
