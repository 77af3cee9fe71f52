"""A grid of runs trained as one program and written as if each had run alone:
`vectorize=[...]` and `seeds=N`.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.data.federated import format_description
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import checkpoint, compare
from fedjax_cfl.runs.finish import Member, attempt
from fedjax_cfl.runs.record import CHECKPOINTS
from fedjax_cfl.runs.session import (
    describe_machine,
    headline,
    make_console,
    print_met_rule,
    train_members,
)
from fedjax_cfl.simulation.program import Program
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.simulation.vectorize import compile_members
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
        found[name] = [_read_number(name, value) for value in values.split(",")]
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


def _read_number(name: str, value: str) -> int | float:
    kind, words = (int, "a whole number") if name == "seed" else (float, "a number")
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{name}={value}: must be {words}") from None


def grid_points(grid: dict[str, list]) -> list[dict[str, Any]]:
    """Returns the members' settings, the first axis outermost."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def run_folders(run_dir: str | Path, grid: dict[str, list]) -> list[Path]:
    """Returns the members' directories, numbered as the runs of a sweep are."""
    return [Path(run_dir) / str(number) for number in range(len(grid_points(grid)))]


def common_step(run_dirs: Sequence[Path]) -> int | None:
    """Returns the last round of which every member has a checkpoint, None where all begin.

    All begin if no member has any checkpoint, or if a grid was killed while it wrote the first
    ones: some have theirs of round 0, which are nothing to lose, and the others none. Raises
    InputError if they have checkpoints of further rounds, but of no common one.
    """
    steps = [set(checkpoint.list_steps(run_dir / CHECKPOINTS)) for run_dir in run_dirs]
    if not all(steps) and set.union(*steps) <= {0}:
        return None
    shared = set.intersection(*steps)
    if not shared:
        raise InputError(
            f"run_dir={run_dirs[0].parent}: its runs stand at different rounds; continue each by"
            " itself, or choose another"
        )
    return max(shared)


def train_grid(
    members: list[Member],
    choices: dict,
    grid: dict[str, list],
    setups: list[Setup],
    make: Callable,
    starts: list,
    run_dir: Path,
) -> int:
    """Trains the members together and writes the files of each; returns the exit status
    as `session.train_run` does.

    Args: `choices`: the name chosen in each group of the configuration; `grid`: the values of
    each setting; `setups` of each seed; `make(values)` -> (Algorithm, Drift); `starts` of the
    members, or Nones.
    """
    console, config = make_console(), members[0].config
    first = setups[0]
    said = ", ".join(f"{name}={','.join(map(str, values))}" for name, values in grid.items())
    console.print(f"{headline(members[0])}: {len(members)} runs as one, {said}")
    console.print(f"the first: {format_description(first.data)}, {describe_machine(first.mesh)}")
    print_met_rule(console, first, config)
    sets = [setup.data for setup in setups]
    if all(_equal(first.data, other) for other in sets[1:]):
        sets = sets[:1]
    inside = grid_points({name: values for name, values in grid.items() if name != "seed"})
    values = {name: [point[name] for point in inside] for name in inside[0]}
    keys = jnp.stack([jax.random.key(seed) for seed in grid.get("seed", [config["seed"]])])

    def compile_program(plan: Plan) -> Program:
        return compile_members(make, first, sets, keys, values, plan)

    each = [setup for setup in setups for _ in inside]
    status, _ = train_members(
        members, choices, each, compile_program, None if starts[0] is None else starts
    )
    if not status:
        # every run has been written: what compares them can be asked for again
        attempt(
            "the runs are not compared",
            lambda: compare.compare([run_dir], run_dir),
            without_disk=True,
        )
    return status


def _equal(one, other) -> bool:
    return all(
        a.shape == b.shape and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )
