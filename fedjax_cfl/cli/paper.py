"""benchmarks/papers of a checkout, which the wheel does not contain: `fedjax-cfl paper`, and the
functions that `_target_: papers.NAME` names.
"""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from fedjax_cfl.cli.conf import HERE
from fedjax_cfl.errors import InputError


def find_papers() -> Path:
    """Returns the folder benchmarks/papers of the checkout that this package, or the current
    folder, is. Raises InputError where neither is one.
    """
    for checkout in (HERE.parent, Path.cwd()):
        folder = checkout / "benchmarks" / "papers"
        if (folder / "runner.py").is_file() and (checkout / "fedjax_cfl").is_dir():
            return folder
    raise InputError(
        "papers: published tables and what they alone use are in a checkout, and the installed"
        " package does not contain them; run this in a clone of the repository, or install it by"
        " pip install -e ."
    )


def load_papers() -> None:
    """Lets `papers` be imported. Raises InputError where there is no checkout."""
    folder = find_papers()
    # by this name alone: nothing else in benchmarks/ can stand in for an installed module
    spec = spec_from_file_location("papers", folder / "__init__.py")
    assert spec is not None and spec.loader is not None  # of a file there always are
    package = sys.modules["papers"] = module_from_spec(spec)
    spec.loader.exec_module(package)


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl paper TABLE`; returns its exit status."""
    load_papers()
    return importlib.import_module("papers.runner").main(argv)
