"""What the command line asks for, read and checked before Hydra runs anything: names,
values, several values, directories.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedjax_cfl.cli.names import compose_named, vectorized_names
from fedjax_cfl.cli.settings import check_settings, collect_settings, complete_settings
from fedjax_cfl.cli.sweep import Sweep, grid_axes, holds_sweep, list_points, run_folders
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.results import METRICS_FILE
from fedjax_cfl.runs.run_dir import check_run_dir, make_dir, refuse_links


class Request(NamedTuple):
    """What a command line asks for, checked."""

    overrides: list[str]  # as Hydra wants them
    sweep: Sweep | None
    config: DictConfig  # with the node `hydra`; of a sweep that of its first run


def precheck(given: argparse.Namespace, asked: list[Override], choices: list[list[str]]) -> Request:
    """Returns what the overrides ask for, as `check_names` has read them. Raises InputError if any
    of it is not allowed.
    """
    overrides, together = list(given.overrides), vectorized_names(asked)
    for number, override in enumerate(asked):  # what is trained as one program is one run to Hydra
        if override.key_or_group in together:
            overrides[number] = choices[number][0]
        elif override.key_or_group == "vectorize":
            overrides[number] = f"vectorize={_vectorized_values(asked, choices, together)}"
            choices[number] = [overrides[number]]
    composed, config, axes = _check_choices(choices)
    if given.multirun:
        _suggest_room(asked, choices, config)
        apart = [
            choice[:1] if override.key_or_group in together else choice
            for override, choice in zip(asked, choices, strict=True)
        ]
        return Request(*_place_sweep(overrides, asked, apart, config["resume"]), composed)
    if not given.cfg:
        folder = Path(str(config["run_dir"]))
        for path in run_folders(folder, axes) if axes else [folder]:
            check_run_dir(str(path), config["resume"])
        if axes and (folder / METRICS_FILE).exists():
            raise InputError(f"run_dir={config['run_dir']}: holds one run; choose another")
    return Request(overrides, None, composed)


def _suggest_room(asked: list[Override], choices: list[list[str]], config: dict) -> None:
    """Says how the runs of a sweep over the number of groups share what is compiled, where its
    method can and `max_m` is not given.
    """
    for override, values in zip(asked, choices, strict=True):
        several = override.key_or_group == "algorithm.m" and len(values) > 1
        if several and config["algorithm"].get("max_m", 0) is None:
            most = max(int(value.partition("=")[2]) for value in values)
            print(
                f"each algorithm.m is compiled by itself; algorithm.max_m={most} lets the runs"
                " share what is compiled (see the tutorial on sweeps)"
            )


def _check_choices(choices: list[list[str]]) -> tuple[DictConfig, dict, dict[str, list]]:
    """Checks each value of a sweep in turn, with the first of all others; returns the
    first configuration, its settings as a dict, and the axes of its grid.
    """
    first = [options[0] for options in choices]
    composed, config = compose_checked(first)
    axes = grid_axes(config)
    for number, options in enumerate(choices):
        for other in options[1:]:
            check_overrides([*first[:number], other, *first[number + 1 :]])
    return composed, config, axes


def _place_sweep(
    overrides: list[str], asked: list[Override], choices: list[list[str]], resume: str
) -> tuple[list[str], Sweep]:
    """Makes the directory of a sweep, whose runs are numbered folders in it, and returns
    the overrides with the name that Hydra has for it. The same sweep goes on in it, unless
    `resume` is never.
    """
    folder: Any = time.strftime("multirun/%Y%m%d-%H%M%S")
    for number, override in enumerate(asked):
        if override.key_or_group in ("run_dir", "hydra.sweep.dir"):
            overrides[number] = f"hydra.sweep.dir={override.get_value_string()}"
            folder = override.value()
            break
    else:
        overrides.append(f"hydra.sweep.dir={folder}")
    points, path = list_points(choices), Path(str(folder))
    if resume != "never" and holds_sweep(path, points):
        refuse_links(path)
    else:
        check_run_dir(str(folder), "never")
    return overrides, Sweep(make_dir(path), points)


def _vectorized_values(asked: list[Override], choices: list[list[str]], together: list[str]) -> str:
    """Returns the value of `vectorize` with the values of everything it names, as the
    command line gives them.
    """
    values = {
        override.key_or_group: "=" + ",".join(text.partition("=")[2] for text in options)
        for override, options in zip(asked, choices, strict=True)
    }
    return "[" + ",".join(f"'{name}{values.get(name, '')}'" for name in together) + "]"


def check_overrides(overrides: list[str]) -> dict[str, Any]:
    """Returns a resolved configuration as a dict. Raises InputError for names that do
    not exist and values that are not allowed.
    """
    return compose_checked(overrides)[1]


def compose_checked(overrides: list[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Returns a configuration, and its settings, resolved, as a dict. Raises InputError for names
    that do not exist and values that are not allowed.
    """
    composed, config, default, names = compose_named(overrides)
    check_settings(complete_settings(config), default, collect_settings(config), names)
    if "dataset.clients" in names and "${dataset.clients}" not in OmegaConf.to_yaml(composed):
        target = str(config["partition"]["_target_"]).rpartition(".")[2]
        raise InputError(
            f"dataset.clients={config['dataset']['clients']}: is not read by partition={target} as"
            " it is set; use settings of its own, as partition.clients, or another partition"
        )
    return composed, config
