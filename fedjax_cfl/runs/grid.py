"""A grid of runs trained as one program and written as if each had run alone:
`vectorize=[...]`.
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
from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.callbacks import CHECKPOINTS
from fedjax_cfl.runs.finish import Member
from fedjax_cfl.runs.session import (
    describe_machine,
    headline,
    make_console,
    print_met_rule,
    train_members,
)
from fedjax_cfl.simulation.program import Program
from fedjax_cfl.simulation.rounds import Plan, Setup
from fedjax_cfl.simulation.vectorize import compile_members


def grid_points(grid: dict[str, list]) -> list[dict[str, Any]]:
    """Returns the members' settings, the first axis outermost."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


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
    members: list[Member], grid: dict[str, list], setups: list[Setup], make: Callable, starts: list
) -> int:
    """Trains the members together and writes the files of each; returns the exit status
    as `session.train_run` does.

    Args: `grid`: the values of
    each setting; `setups` of each seed; `make(values)` -> (Algorithm, Drift); `starts` of the
    members, or Nones.
    """
    console, settings = make_console(), members[0].settings
    first = setups[0]
    said = ", ".join(f"{name}={','.join(map(str, values))}" for name, values in grid.items())
    console.print(f"{headline(members[0])}: {len(members)} runs as one, {said}")
    console.print(f"the first: {format_description(first.data)}, {describe_machine(first.mesh)}")
    print_met_rule(console, first, settings)
    sets = [setup.data for setup in setups]
    leaves = [jax.tree.leaves(data) for data in sets]
    if all(all(map(np.array_equal, leaves[0], other)) for other in leaves[1:]):
        sets = sets[:1]
    inside = grid_points({name: values for name, values in grid.items() if name != "seed"})
    values = {name: [point[name] for point in inside] for name in inside[0]}
    keys = jnp.stack([jax.random.key(seed) for seed in grid.get("seed", [settings.seed])])

    def compile_program(plan: Plan) -> Program:
        return compile_members(make, first, sets, keys, values, plan)

    each = [setup for setup in setups for _ in inside]
    begun = None if starts[0] is None else starts
    return train_members(members, each, compile_program, begun)[0]
