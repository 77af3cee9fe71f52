"""Which runs a configuration describes as one program: `vectorize=[...]` and `seeds=N`."""

from pathlib import Path

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.grid import grid_points
from fedjax_cfl.validation import check_value, one_of

# what members may differ in
SETTINGS = ("seed", "local.lr", "algorithm.mu", "algorithm.eta_g", "algorithm.server_lr")


def grid_axes(config: dict) -> dict[str, list]:
    """Returns the values of every setting that a configuration vectorises, the seed
    first; {} if it is a single run.

    `vectorize` lists NAME=V1,V2,... Raises InputError for what cannot be vectorised.
    """
    found: dict[str, list] = {}
    for entry in config["vectorize"]:
        name, _, values = str(entry).partition("=")
        check_value("vectorize", name, one_of(*SETTINGS))
        if not values or name in found:
            raise InputError(f"vectorize={name}: give {name} several values, once, as {name}=1,2")
        found[name] = [read_number(name, value) for value in values.split(",")]
    if config["seeds"] > 1:
        if "seed" in found:
            raise InputError(
                f"seeds={config['seeds']}: seed has several values already; use one of the two"
            )
        found["seed"] = [config["seed"] + number for number in range(config["seeds"])]
    if found and config["coordinator"] is not None:
        raise InputError(
            f"coordinator={config['coordinator']}: a grid of runs trains in one process; leave out"
            " vectorize and seeds"
        )
    if found and config["resident"] == "host":
        raise InputError(
            "resident=host: a grid of runs trains on data that are on the devices; leave out"
            " vectorize and seeds"
        )
    for name, values in found.items():
        if len(set(values)) < len(values):
            raise InputError(f"vectorize: {name}={','.join(map(str, values))} names a value twice")
    return {name: found[name] for name in sorted(found, key=lambda name: name != "seed")}


def read_number(name: str, value: str) -> int | float:
    """Returns a value of a vectorised setting. Raises InputError for one that is no number."""
    kind, words = (int, "a whole number") if name == "seed" else (float, "a number")
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{name}={value}: must be {words}") from None


def run_folders(run_dir: str | Path, grid: dict[str, list]) -> list[Path]:
    """Returns the members' directories, numbered as the runs of a sweep are."""
    return [Path(run_dir) / str(number) for number in range(len(grid_points(grid)))]
