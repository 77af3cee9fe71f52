"""A grid of runs trained as one program and written as if each had run alone:
`vectorize=[...]` and `seeds=N`.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fedjax_cfl.data.federated import format_description
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.formatting import escape_markup
from fedjax_cfl.runs import checkpoint, compare
from fedjax_cfl.runs.display import progress
from fedjax_cfl.runs.labels import name_parts
from fedjax_cfl.runs.resume import CHECKPOINTS
from fedjax_cfl.runs.scoring import describe_met_rule
from fedjax_cfl.runs.session import Recorder, describe_machine, finish
from fedjax_cfl.runs.signals import catch_signals
from fedjax_cfl.simulation.vectorize import run_members

SETTINGS = (
    "seed",
    "local.lr",
    "algorithm.mu",
    "algorithm.eta_g",
    "algorithm.server_lr",
)  # what members may differ in


class Member(NamedTuple):
    """One run of the grid."""

    config: dict  # its own settings, as it would have them alone
    overrides: list[str]
    run_dir: Path


def grid_axes(config: dict) -> dict[str, list]:
    """Returns the values of every setting that a configuration vectorises, the seed
    first; {} if it is a single run.

    `vectorize` lists NAME=V1,V2,... Raises InputError for what cannot be vectorised.
    """
    found: dict[str, list] = {}
    for entry in config["vectorize"]:
        name, _, values = str(entry).partition("=")
        require("vectorize", name, SETTINGS)
        if not values or name in found:
            raise InputError(f"vectorize={name}: give {name} several values, once, as {name}=1,2")
        found[name] = [
            int(value) if name == "seed" else float(value) for value in values.split(",")
        ]
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


def grid_points(grid: dict[str, list]) -> list[dict[str, Any]]:
    """Returns the members' settings, the first axis outermost."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def run_folders(run_dir: str | Path, grid: dict[str, list]) -> list[Path]:
    """Returns the members' directories, numbered as the runs of a sweep are."""
    return [Path(run_dir) / str(number) for number in range(len(grid_points(grid)))]


def common_step(run_dirs: Sequence[Path]) -> int | None:
    """Returns the last round of which every member has a checkpoint, None if nobody has
    any. Raises InputError if there is none.
    """
    steps = [set(checkpoint.list_steps(run_dir / CHECKPOINTS)) for run_dir in run_dirs]
    if not any(steps):
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
    parts: list[tuple],
    make: Callable,
    starts: list,
    run_dir: Path,
) -> int:
    """Trains the members together and writes the files of each; returns the exit status
    as `session.train` does.

    Args: `parts` (algorithm, task, data, drift, mesh) of each seed; `make(values)` ->
    Algorithm; `starts` of the members, or Nones.
    """
    console = Console(highlight=False, soft_wrap=True)
    _, task, _, drift, mesh = parts[0]
    config = members[0].config
    said = ", ".join(f"{name}={','.join(map(str, values))}" for name, values in grid.items())
    own = {part: config[part]["name"] for part in ("algorithm", "dataset")}
    names = {
        part: escape_markup(name) for part, name in name_parts(own, members[0].overrides).items()
    }
    console.print(
        f"[bold]{names['algorithm']}[/] on {names['dataset']}: {len(members)} runs as one, {said}"
    )
    console.print(f"the first: {format_description(parts[0][2])}, {describe_machine(mesh)}")
    sets = [part[2] for part in parts]
    same = all(_equal(sets[0], other) for other in sets[1:])
    options = {"drift": drift, "with_auxiliary": config["eval_auxiliary"], "mesh": mesh}
    options |= {name: config[name] for name in ("rounds", "eval_every", "discard")}
    begun = 0 if starts[0] is None else int(starts[0].state.round)
    inside = grid_points({name: values for name, values in grid.items() if name != "seed"})
    values = {name: [point[name] for point in inside] for name in inside[0]}
    seeds = grid.get("seed", [config["seed"]])
    if parts[0][0].clustered and config["discard"] == "met":
        plan = sets[0].num_clients, config["clients_per_round"], config["rounds"]
        console.print(describe_met_rule(*plan), markup=False)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])

    def data_of(number: int):
        return sets[number // len(inside)]

    with catch_signals() as asked:
        with contextlib.ExitStack() as files:
            recorders = [
                Recorder(m.config, m.run_dir, data_of(n), begun, files)
                for n, m in enumerate(members)
            ]
            show = files.enter_context(progress(config["rounds"], begun))

            def on_start(number, snapshot):
                if starts[0] is None:
                    recorders[number].save(snapshot())

            def on_rows(rows, snapshots):
                for recorder, row in zip(recorders, rows, strict=True):
                    recorder.write_row(row)
                scores = [row["accuracy"] for row in rows if row["accuracy"] is not None]
                show(rows[0] | {"accuracy": float(np.mean(scores)) if scores else None})
                stop = bool(asked)
                for recorder, row, snapshot in zip(recorders, rows, snapshots, strict=True):
                    recorder.checkpoint_if_due(row, snapshot, stop)
                return stop and rows[0]["round"] < config["rounds"]

            start = None if starts[0] is None else starts
            results = run_members(
                make,
                task,
                sets[:1] if same else sets,
                keys,
                values,
                **options,
                start=start,
                on_start=on_start,
                on_rows=on_rows,
            )
        if asked and int(results[0].state.round) < config["rounds"]:
            console.print(
                f"stopped after round {int(results[0].state.round)}; the same command goes on from"
                " there",
                markup=False,
            )
            return 128 + asked[0]
        algorithm = parts[0][0]
        for member, result in zip(members, results, strict=True):
            finish(
                member.config,
                choices,
                member.overrides,
                member.run_dir,
                algorithm,
                task,
                result,
                mesh,
            )

    compare.compare([run_dir], run_dir)
    return 0


def _equal(one, other) -> bool:
    return all(
        a.shape == b.shape and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )
