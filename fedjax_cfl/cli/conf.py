"""Where the configuration files are, how Hydra reads them, and what in them is of a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

PACKAGE = "fedjax_cfl."
GC_THRESHOLD = 50_000, 20, 50  # most of what imports and tracing make stays
HERE = Path(__file__).resolve().parents[1]
# in the environment of the command and of its launchers, where nobody has changed the package
COMMAND = "FEDJAX_CFL_COMMAND"
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # a wheel, or a checkout


@contextlib.contextmanager
def open_hydra() -> Iterator[Any]:
    """Lets Hydra read conf/ meanwhile, for whatever is composed, shown or run."""
    import hydra  # only now: what shows help needs none of it
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize_config_dir(str(CONF), job_name="main", version_base="1.3"):
        yield GlobalHydra.instance().hydra


def resolve_config(config: DictConfig) -> dict[str, Any]:
    """Returns the settings of a run as a dict, without those of Hydra: every value instead of
    where it comes from. A method of the user's own goes by its own name, and not by that of the
    option whose `_target_` it has taken.
    """
    own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    method = own.get("algorithm")
    target, name = str(method.get("_target_")), str(method.get("name"))
    if "." in target and not target.startswith(PACKAGE):
        if (CONF / "algorithm" / f"{name}.yaml").is_file():
            method.name = target.rpartition(".")[2]
    resolved: Any = OmegaConf.to_container(own, resolve=True)
    return resolved
