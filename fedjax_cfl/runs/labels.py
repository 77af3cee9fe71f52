"""What a run is called, which of its settings say only where and how it ran, and the versions of
packages that it ran with.
"""

import functools
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# settings that change neither what is computed nor, beyond rounding, its numbers
EXECUTION_SETTINGS = (
    "run_dir",
    "devices",
    "resume",
    "checkpoint",
    "offline",
    "curves",
    "callbacks",
    "logger",
    "local.width",
    "local.executor",
    "local.first_layer",
    "coordinator",
    "process",
    "processes",
    "vectorize",
    "seeds",
    "hydra",
)
# packages that every run needs, some only at its end, and the module of each
PACKAGES = {name: name for name in ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "pyarrow")}
PACKAGES |= {"matplotlib": "matplotlib", "rich": "rich", "hydra-core": "hydra", "pyyaml": "yaml"}
PACKAGES |= {"orbax-checkpoint": "orbax.checkpoint", "pandas": "pandas", "pydantic": "pydantic"}
# where the `_target_` of a part is, where it is not the part's own
CODE = {"dataset": "dataset.source", "model": "model.module"}


def parse_overrides(overrides: Iterable[str]) -> dict[str, str]:
    """Returns the value of every setting that the command line gave, by its name
    without + and ~; of several the last counts.
    """
    pairs = (str(override).lstrip("+~").partition("=") for override in overrides)
    return {name: value for name, _, value in pairs}


def list_own_functions(settings: Mapping[str, Any]) -> list[str]:
    """Returns the functions that settings name, also in lists, and that are the user's own."""
    named = re.findall(r'"_target_": "([^"]*)"', json.dumps(settings, default=str))
    return sorted({name for name in named if not name.startswith(("fedjax_cfl.", "optax."))})


def is_execution(name: str) -> bool:
    """Returns whether a setting says only where and how a run ran."""
    return any(
        name == setting or name.startswith((f"{setting}.", f"{setting}/"))
        for setting in EXECUTION_SETTINGS
    )


def name_parts(names: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns what ran: the `names` of the chosen options, with a part that the command line gave
    a name, as dataset.name=sensors, called that, and one whose `_target_` it gave, as
    my_file.MyModel.
    """
    asked_for = parse_overrides(overrides)
    called = {
        part: asked_for[setting].strip("'\"")
        for part in names
        for setting in (f"{CODE.get(part, part)}._target_", f"{part}.name")  # the name counts
        if asked_for.get(setting)
    }
    return {**names, **called}


@functools.cache  # reading what is installed takes as long as writing a run's files
def find_version(package: str) -> str | None:
    """Returns the version of an installed package; None: it runs from a source tree, or is not
    there.
    """
    try:
        return importlib.metadata.version(package) or None
    except Exception:  # not found, or damaged: a version is never worth a run
        return None
