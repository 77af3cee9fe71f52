"""What every setting of a configuration may be: the annotations of the functions that take them,
and the checks of a composed configuration, before anything is loaded or trained.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from hydra.core.override_parser.types import Override

from fedjax_cfl import validation as allowed
from fedjax_cfl.cli.conf import PACKAGE, open_hydra
from fedjax_cfl.cli.names import Line, compose, expand_overrides, parse_override
from fedjax_cfl.cli.paper import load_papers
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local
from fedjax_cfl.data.scaling import Standardize
from fedjax_cfl.errors import InputError, suggest_options
from fedjax_cfl.formatting import flatten_settings, format_value
from fedjax_cfl.models import as_task
from fedjax_cfl.runs.settings import CheckpointSettings
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.validation import Kind, Rule, check, join_kinds, read_kinds, read_settings

Host = Annotated[str, Rule("auto or HOST:PORT", re.compile(r"auto|\S+:\d{1,5}").fullmatch)] | None
Directory = Annotated[
    str | int, Rule("the name of a directory", lambda value: bool(str(value).strip()))
]
# a default run_dir has it in its name
FolderName = Annotated[
    str,
    Rule(
        "text of up to 100 characters, on one line and without /",
        lambda value: value.isprintable() and "/" not in value and 0 < len(value) <= 100,
    ),
]
List = Annotated[list, Rule("a list, as [1,2]", lambda value: True)]
# of settings that no function takes by their name
OWN: dict[str, Any] = {
    **dict.fromkeys(("curves", "offline"), bool),
    **dict.fromkeys(("callbacks", "vectorize"), List),
    "seed": allowed.Seed,
    "seeds": allowed.PositiveInt,
    "clients_per_round": allowed.PositiveInt,
    "assignments": allowed.NaturalInt,
    "devices": allowed.PositiveInt | None,
    "precision": Literal["float32", "tensorfloat32", "bfloat16"],
    "resident": Literal["device", "host"],
    "resume": Literal["auto", "must", "never"],
    "run_dir": Directory,
    "coordinator": Host,
    "processes": allowed.PositiveInt | None,
    "process": allowed.NaturalInt | None,
    "algorithm.name": FolderName,
    "dataset.name": FolderName,
    "dataset.standardize": Standardize,
    "dataset.lr": allowed.PositiveFloat,
    "dataset.mu": allowed.NonNegativeFloat,
    "dataset.epochs": allowed.Epochs,
    "dataset.clients": allowed.Count | None,
    "dataset.test_fraction": allowed.BelowOne,
    **{
        f"dataset.{name}": allowed.PositiveInt
        for name in (
            *("rounds", "groups", "batch_size", "clients_per_round", "alpha"),
            *("clients_per_group", "samples_per_client"),
        )
    },
    "evaluate.validation": allowed.BelowOne,
    "evaluate.part": Literal["test", "validation"],
    "evaluate.choose": Literal["last", "best_validation"],
    "evaluate.patience": allowed.NaturalInt,  # tests
    "evaluate.finetune": allowed.NaturalInt,  # epochs
    "evaluate.new_clients": allowed.BelowOne,
    "evaluate.validation_clients": allowed.BelowOne,
    "local.width": Literal["auto"] | allowed.PositiveInt,
    "preset.l2": allowed.NonNegativeFloat | None,
}
# keys of a node that are no settings of its function
OWN_WORDS = ("_target_", "_partial_", "_convert_", "name", "select")


def collect_settings(config: dict) -> Mapping[str, list[Kind]]:
    """Returns what the settings of a resolved configuration may be, by dotted name: those of the
    functions that its `_target_`s name, and those of the run.
    """
    owners: list[tuple[str, Callable]] = [
        ("", Plan),
        ("local.", Local),
        ("local.", make_execution),
        ("faults.", Faults),
        *((f"{path}.", function) for path, _, function in find_targets(config)),
        ("model.", as_task),
        ("checkpoint.", CheckpointSettings),
    ]
    return {
        f"{prefix}{name}": kinds
        for prefix, owner in owners
        for name, kinds in read_settings(owner).items()
    } | {name: read_kinds(hint) for name, hint in OWN.items()}


# functions that settings name


def find_targets(node: dict, path: str = "") -> Iterator[tuple[str, dict[str, Any], Callable]]:
    """Yields (dotted name, node, function) of every `_target_` below a node."""
    if "_target_" in node:
        yield path, node, resolve_target(path, str(node["_target_"]))
    for name, value in node.items():
        if isinstance(value, dict):
            yield from find_targets(value, f"{path}.{name}".lstrip("."))


def resolve_target(field: str, target: str) -> Callable:
    """Returns the function or class of a dotted name, of the package or of the user's own. Raises
    InputError for one that cannot be imported.
    """
    if target.startswith("papers.") and "papers" not in sys.modules:
        load_papers()
    elif not target.startswith(PACKAGE) and os.getcwd() not in sys.path:
        # the folder is looked at last, so that it shadows nothing
        sys.path.append(os.getcwd())
    home, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(home), name)
    except Exception as error:  # whatever a module of the user's own raises
        raise InputError(f"{field}._target_={target}: cannot be imported: {error}") from None
    if not callable(found):
        raise InputError(f"{field}._target_={target}: cannot be called, expected a function")
    return found


def complete_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Adds to each node whose `_target_` is a user's own function what its signature has by default
    for settings that are not given; returns the configuration. Raises InputError for settings that
    it does not take.
    """
    for path, node, function in list(find_targets(config)):
        if node["_target_"].startswith(PACKAGE):
            continue
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # one of a C library
            continue
        kinds = read_settings(function)
        open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        for name in node if not open_ended else ():
            if name not in parameters and name not in OWN_WORDS:
                hint = suggest_options(name, kinds)
                raise InputError(f"{path}.{name}={format_value(node[name])}: unknown setting{hint}")
        for name, each in parameters.items():
            if each.default is not each.empty:
                if name not in kinds or join_kinds(kinds[name]).plain:
                    node.setdefault(name, each.default)
            elif each.kind is each.KEYWORD_ONLY and name not in node:
                raise InputError(f"{path}.{name}: must be given, as {path}.{name}=VALUE")
    return config


# checks


def check_line(line: Line) -> None:
    """Raises InputError for a value of a command line that is not allowed."""
    for config in line.configs:
        settings = check_config(config, line.asked)
        for name, values in grid_axes(config).items():
            for value in values if name in settings else ():
                check(name, value, settings[name])


def resolve_settings(overrides: list[str]) -> dict[str, Any]:
    """Returns a resolved configuration as a dict. Raises InputError for names that do not exist and
    values that are not allowed.
    """
    overrides = expand_overrides(overrides)
    with open_hydra():
        config = compose(overrides)[1]
    check_config(config, [parse_override(text) for text in overrides])
    return config


def check_config(config: dict[str, Any], overrides: list[Override]) -> Mapping[str, list[Kind]]:
    """Completes a resolved configuration, see `complete_settings`; returns what its settings may
    be. Raises InputError for values that are not allowed; `overrides` are what the command line
    asks for.
    """
    asked = [each.key_or_group for each in overrides if not each.is_delete()]
    settings = collect_settings(complete_settings(config))
    check_settings(config, settings, asked)
    clients, read = config["dataset"]["clients"], (config["partition"], config["dataset"]["source"])
    if "dataset.clients" in asked and all(node.get("clients") != clients for node in read):
        target = str(config["partition"]["_target_"]).rpartition(".")[2]
        raise InputError(
            f"dataset.clients={clients}: is not read by partition={target} as it is set; use"
            " settings of its own, as partition.clients, or another partition"
        )
    return settings


def check_settings(
    config: dict, settings: Mapping[str, list[Kind]], asked: Collection[str] = ()
) -> None:
    """Raises InputError for the first setting of a resolved configuration that is not allowed,
    beginning with those `asked` for; `settings` go by dotted name.
    """
    single = {name for name, kinds in settings.items() if all(kind.plain for kind in kinds)}
    leaves = flatten_settings(config, single=single)
    for name, value in sorted(leaves, key=lambda leaf: leaf[0] not in asked):
        if value == "???":
            raise InputError(f"{name}: must be given, as {name}=VALUE")
        if name in settings:
            check(name, value, settings[name])
        elif below := next((other for other in settings if other.startswith(f"{name}.")), None):
            raise InputError(
                f"{name}={format_value(value)}: is a group of settings; change one of them, as"
                f" {below}=VALUE"
            )


def grid_axes(config: dict) -> dict[str, list]:
    """Returns the values of every setting of which a configuration has several, the seed first; {}
    if it is a single run.

    `vectorize` lists NAME=V1,V2,... Raises InputError for settings that are named wrongly.
    """
    axes: dict[str, list] = {}
    for entry in map(str, config["vectorize"]):
        name, _, values = entry.partition("=")
        if not values or name in axes:
            raise InputError(f"vectorize={name}: give {name} several values, once, as {name}=1,2")
        override = parse_override(entry)
        several = override.is_sweep_override()
        axes[name] = list(override.sweep_iterator()) if several else [override.value()]
    if config["seeds"] > 1:
        if "seed" in axes:
            raise InputError(
                f"seeds={config['seeds']}: seed has several values already; use one of the two"
            )
        axes["seed"] = [config["seed"] + number for number in range(config["seeds"])]
    if axes and config["coordinator"] is not None:
        raise InputError(
            f"coordinator={config['coordinator']}: several seeds run in one process; leave out"
            " vectorize and seeds"
        )
    return {name: axes[name] for name in sorted(axes, key=lambda name: name != "seed")}
