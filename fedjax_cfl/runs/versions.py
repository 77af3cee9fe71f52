"""Versions of installed packages."""

import importlib.metadata


def find_version(package: str) -> str | None:
    """Returns the version of an installed package; None: it runs from a source tree, or is not
    there.
    """
    try:
        return importlib.metadata.version(package) or None
    except Exception:  # not found, or damaged: a version is never worth a run
        return None
