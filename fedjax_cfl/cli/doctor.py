"""Says whether the package can run here: versions, devices and data, a line each, which says what
to do where something is missing.
"""

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator

from fedjax_cfl.cli.build import use_run_devices
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, search_dirs
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.runs.labels import PACKAGES, find_version

Line = tuple[str, str, str]  # what; what is here, "" if it is missing; what to do about it


def is_importable(module: str) -> bool:
    """Returns whether a module is there."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of the package above it
        return False


def list_versions() -> Iterator[Line]:
    """Yields a line for Python, for this package and for each that it needs."""
    yield "python", f"{platform.python_version()} on {platform.platform()}", ""
    own = find_version("fedjax-cfl")
    yield "fedjax-cfl", own or "source tree, not installed", "" if own else "pip install ."
    for package, module in PACKAGES.items():
        version = find_version(package)
        if not is_importable(module):
            yield package, "", f"pip install {package}"
        elif version is None:
            yield package, "no version known", f"pip install --force-reinstall {package}"
        else:
            yield package, version, ""


def describe_devices() -> Line:
    """Returns the line of the devices that a run gets."""
    try:
        import jax

        with contextlib.suppress(InputError):  # JAX has started: it shows what a run here gets
            use_run_devices()
        names = [f"{each.platform}:{each.id} {each.device_kind}" for each in jax.devices()]
    except Exception as error:  # whatever a broken driver or plugin raises is the finding
        reason = " ".join(str(error).split()) or type(error).__name__
        return "devices", "", f"{reason}; repair JAX's install, or set JAX_PLATFORMS=cpu"
    unseen = jax.default_backend() == "cpu" and "JAX_PLATFORMS" not in os.environ
    unseen = unseen and shutil.which("nvidia-smi") is not None
    remedy = 'JAX does not see the NVIDIA GPU: pip install "jax[cuda12]"' if unseen else ""
    return "devices", ", ".join(names), remedy


def list_data() -> Iterator[Line]:
    """Yields a line for each folder in which data are looked for."""
    try:
        folders = search_dirs()
    except InputError as error:
        yield "data", "", f"{error}; create it, or correct or unset {DATA_ENV_VAR}"
        return
    for folder in folders:
        there = sorted(path.name for path in folder.glob("*") if path.is_dir())
        remedy = "" if there else "fedjax-cfl download NAME, as mnist"
        yield "data", f"{folder}: {', '.join(there) or 'nothing yet'}", remedy


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if something essential is missing, else 0 (a
    missing data set is not essential).
    """
    parse_arguments(argparse.ArgumentParser(prog="fedjax-cfl doctor", description=__doc__), argv)
    lines = [*list_versions(), describe_devices(), *list_data()]
    for what, found, remedy in lines:
        print(f"{what}: {'; '.join(filter(None, (found or 'missing', remedy)))}")
    missing = [what for what, found, _ in lines if not found]
    print(f"missing: {', '.join(missing)}" if missing else "the package can run here")
    return 1 if missing else 0
