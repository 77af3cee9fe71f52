"""Says whether the package can run here: versions, devices, where data are looked for
and what is there.
"""

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedjax_cfl.cli.build import use_run_devices
from fedjax_cfl.data.datasets import images
from fedjax_cfl.data.datasets.celeba import IMAGES as CELEBA_IMAGES
from fedjax_cfl.data.datasets.celeba import PLACES as CELEBA
from fedjax_cfl.data.datasets.download import (
    DATA_ENV_VAR,
    cache_dir,
    list_public,
    list_wanted,
    locate,
    search_dirs,
)
from fedjax_cfl.data.datasets.elec2 import FILE as ELEC2
from fedjax_cfl.data.datasets.sent140 import PLACES as SENT140
from fedjax_cfl.data.datasets.shakespeare import PLACES as SHAKESPEARE
from fedjax_cfl.data.datasets.speech_commands import FILE as SPEECH_COMMANDS
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.runs.labels import find_version

# packages that every run needs, some only at its end
ESSENTIAL = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "hydra-core", "pyyaml")
ESSENTIAL += ("orbax-checkpoint", "pyarrow", "matplotlib", "rich")
MODULES = {"hydra-core": "hydra", "orbax-checkpoint": "orbax.checkpoint", "pyyaml": "yaml"}
Paths = tuple[str, ...]  # files, or folders of files, below a data root
FEMNIST_FILES: tuple[Paths, ...] = (
    (images.FEMNIST,),
    *(
        tuple(f"femnist/{folder}/{part}" for part in parts)
        for folder in ("data", "leaf_json")
        for parts in (("train", "test"), ("",))
    ),
)
# The ways in which a data set that is read from files may be here, the first that is.
FILES: dict[str, tuple[Paths, ...]] = {
    "mnist": (tuple(list_wanted("mnist")),),
    "fashion_mnist": (tuple(list_wanted("fashion_mnist")), images.FASHION),
    "femnist": FEMNIST_FILES,
    "femnist_writers": FEMNIST_FILES,
    "sent140": (*SENT140, ("sent140/data/",), ("sent140/",)),
    "shakespeare": SHAKESPEARE,
    "cifar10": (images.CIFAR, (images.CIFAR_PART,)),
    "cifar100": (images.CIFAR_100,),
    "celeba": tuple((*files, *photos) for files in CELEBA for photos in CELEBA_IMAGES),
    "elec2": ((ELEC2,),),
    "speech_commands": ((SPEECH_COMMANDS,),),
}
READ = (".json", ".json.gz", ".jpg")  # what is read of a folder
Row = tuple[str, str, str, str]  # what, found, state (ok, note or missing), remedy


def _versions() -> list[Row]:
    own = find_version("fedjax-cfl")
    rows = [("python", platform.python_version(), "ok", "")]
    rows.append(
        ("fedjax_cfl", own, "ok", "")
        if own
        else ("fedjax_cfl", "source tree, not installed", "note", "pip install .")
    )
    for package in ESSENTIAL:
        version, remedy = find_version(package), f"pip install {package}"
        if not is_importable(MODULES.get(package, package)):
            rows.append((package, "not installed", "missing", remedy))
        elif version is None:
            remedy = f"pip install --force-reinstall {package}"
            rows.append((package, "there, its metadata are not", "note", remedy))
        else:
            rows.append((package, version, "ok", ""))
    return rows


def is_importable(module: str) -> bool:
    """Returns whether a module is there."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of the package above it
        return False


def _machine() -> list[Row]:
    rows = [("platform", platform.platform(), "ok", ""), ("cores", str(os.cpu_count()), "ok", "")]
    try:
        import jax

        with contextlib.suppress(InputError):  # JAX has started: it shows what a run here gets
            use_run_devices()
        devices = [
            f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()
        ]
        backend = jax.default_backend()
    except Exception as error:  # whatever a broken driver or plugin raises is the finding
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [
            *rows,
            ("devices", reason, "missing", "repair JAX's install, or set JAX_PLATFORMS=cpu"),
        ]
    idle = (
        backend == "cpu"
        and "JAX_PLATFORMS" not in os.environ
        and shutil.which("nvidia-smi") is not None
    )
    remedy = 'JAX does not see the NVIDIA GPU: pip install "jax[cuda12]"' if idle else ""
    return [*rows, ("devices", ", ".join(devices), "note" if idle else "ok", remedy)]


def find_files(name: str) -> list[Path]:
    """Returns the files that a data set would be read from, [] if they are not all here."""
    for paths in FILES[name]:
        found = [list_files(place) for place in locate(*paths) or [Path()]]
        if all(found):
            return [file for files in found for file in files]
    return []


def list_files(place: Path) -> list[Path]:
    """Returns a file, or those files of a folder that are read."""
    if place == Path() or not place.is_dir():
        return [place] if place.is_file() else []
    return [file for file in place.iterdir() if file.name.endswith(READ) and file.is_file()]


def describe_files(files: list[Path]) -> str:
    """Returns the folder that holds the files, and their number."""
    folder = os.path.commonpath([file.parent for file in files])
    return f"{folder} ({len(files)} file{'s' * (len(files) > 1)})"


def _data() -> list[Row]:
    try:
        folders = search_dirs()
    except InputError as error:
        remedy = f"create it, or correct or unset {DATA_ENV_VAR}"
        return [("data folders", str(error), "missing", remedy)]
    rows = []
    for folder in folders:
        found = ("ok", "") if folder.is_dir() else ("note", "made by the first download")
        name = "cache folder" if folder == cache_dir() else f"data folder ({DATA_ENV_VAR})"
        rows.append((name, str(folder), *found))
    for name in FILES:
        files = find_files(name)
        folder = folders[0] / FILES[name][0][0].partition("/")[0]
        remedy = (
            f"fedjax-cfl download {name}"
            if name in list_public()
            else f"only if you need it: put its files into {folder}"
        )
        row = (describe_files(files), "ok", "") if files else ("not here", "note", remedy)
        rows.append((f"data: {name}", *row))
    return rows


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if something essential is missing, else 0 (a
    missing data set is not essential).
    """
    parse_arguments(argparse.ArgumentParser(prog="fedjax-cfl doctor", description=__doc__), argv)
    rows = [*_versions(), *_machine(), *_data()]
    table = Table()
    for heading in ("what", "found", "state", "remedy"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "what")
    colour = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for what, found, state, remedy in rows:
        table.add_row(escape(what), escape(found), f"[{colour[state]}]{state}[/]", escape(remedy))
    # redirected output has no width of its own
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    missing = [what for what, _, state, _ in rows if state == "missing"]
    console.print(f"missing: {', '.join(missing)}" if missing else "the package can run here")
    return 1 if missing else 0
