"""Says whether the package can run here: versions, devices, where data are looked for
and what is there.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, REGISTRY, cache_dir, locate, search_dirs
from fedjax_cfl.errors import InputError

ESSENTIAL = ("jax", "jaxlib", "flax", "optax", "numpy", "hydra-core")
DATASETS = (
    "mnist",
    "fashion_mnist",
    "femnist",
    "sent140",
    "shakespeare",
    "synthetic_fedprox",
    "cifar10",
    "celeba",
)
Row = tuple[str, str, str, str]  # what, found, state (ok, note or missing), remedy


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> list[Row]:
    own = _version("fedjax-cfl")
    rows = [("python", platform.python_version(), "ok", "")]
    rows.append(
        ("fedjax_cfl", own, "ok", "")
        if own
        else ("fedjax_cfl", "source tree, not installed", "note", "pip install .")
    )
    for package in ESSENTIAL:
        version = _version(package)
        rows.append(
            (package, version, "ok", "")
            if version
            else (package, "not installed", "missing", f"pip install {package}")
        )
    return rows


def _machine() -> list[Row]:
    rows = [("platform", platform.platform(), "ok", ""), ("cores", str(os.cpu_count()), "ok", "")]
    try:
        import jax

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


def _place(name: str, folders: list[Path]) -> Path | None:
    """Returns the folder that holds a data set: complete if its files are known, else
    simply not empty.
    """
    if name in REGISTRY:
        files = locate(*(f"{name}/{file}" for file in REGISTRY[name].files))
        return files[0].parent if files else None
    return next(
        (
            folder / name
            for folder in folders
            if (folder / name).is_dir() and any((folder / name).iterdir())
        ),
        None,
    )


def _data() -> list[Row]:
    try:
        folders = search_dirs()
    except InputError as error:
        return [
            (
                "data folders",
                str(error),
                "missing",
                f"create it, or correct or unset {DATA_ENV_VAR}",
            )
        ]
    rows = []
    for folder in folders:
        found = ("ok", "") if folder.is_dir() else ("note", "made by the first download")
        rows.append(
            (
                "cache folder" if folder == cache_dir() else f"data folder ({DATA_ENV_VAR})",
                str(folder),
                *found,
            )
        )
    for name in DATASETS:
        place = _place(name, folders)
        remedy = (
            f"fedjax-cfl download {name}"
            if name in REGISTRY
            else f"only if you need it: put its files into {folders[0] / name}"
        )
        rows.append(
            (f"data: {name}", *((str(place), "ok", "") if place else ("not here", "note", remedy)))
        )
    return rows


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if something essential is missing, else 0 (a
    missing data set is not essential).
    """
    argparse.ArgumentParser(prog="fedjax-cfl doctor", description=__doc__).parse_args(argv)
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
