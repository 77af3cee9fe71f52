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

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedjax_cfl.cli.build import use_run_devices
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, cache_dir, search_dirs
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.runs.labels import find_version

# packages that every run needs, some only at its end
ESSENTIAL = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "hydra-core", "pyyaml")
ESSENTIAL += ("orbax-checkpoint", "pyarrow", "matplotlib", "rich")
MODULES = {"hydra-core": "hydra", "orbax-checkpoint": "orbax.checkpoint", "pyyaml": "yaml"}
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


def _data() -> list[Row]:
    try:
        folders = search_dirs()
    except InputError as error:
        remedy = f"create it, or correct or unset {DATA_ENV_VAR}"
        return [("data folders", str(error), "missing", remedy)]
    rows = []
    for folder in folders:
        name = "cache folder" if folder == cache_dir() else f"data folder ({DATA_ENV_VAR})"
        if not folder.is_dir():
            rows.append((name, f"{folder}: not here", "note", "made by the first download"))
            continue
        there = sorted(path.name for path in folder.iterdir() if path.is_dir())
        remedy = "" if there else "fedjax-cfl download NAME..., as mnist"
        rows.append((name, f"{folder}: {', '.join(there) or 'empty'}", "ok", remedy))
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
