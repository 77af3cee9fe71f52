"""What every setting of a configuration may be: the annotations of the functions that take them,
and the checks of a composed configuration, before anything is loaded or trained.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal

from fedjax_cfl.cli.names import PACKAGE
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
from fedjax_cfl.validation import (
    BelowOne,
    NaturalInt,
    NonNegativeFloat,
    PositiveInt,
    Rule,
    Seed,
    Setting,
    Text,
    read_setting,
    read_settings,
)

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
# of settings that no function takes by their name
OWN: dict[str, Any] = {
    "seed": Seed,
    "seeds": PositiveInt,
    "clients_per_round": PositiveInt,
    "assignments": NaturalInt,
    "devices": PositiveInt | None,
    "precision": Literal["float32", "tensorfloat32", "bfloat16"],
    "resident": Literal["device", "host"],
    "resume": Literal["auto", "must", "never"],
    "run_dir": Directory,
    "coordinator": Host,
    "processes": PositiveInt | None,
    "process": NaturalInt | None,
    "algorithm.name": FolderName,
    "dataset.name": FolderName,
    "dataset.standardize": Standardize,
    "evaluate.validation": BelowOne,
    "evaluate.part": Literal["test", "validation"],
    "evaluate.choose": Literal["last", "best_validation"],
    "evaluate.patience": NaturalInt,  # tests
    "evaluate.finetune": NaturalInt,  # epochs
    "evaluate.new_clients": BelowOne,
    "evaluate.validation_clients": BelowOne,
    "local.width": Literal["auto"] | PositiveInt,
    "preset.l2": NonNegativeFloat | None,
}
# keys of a node that are no settings of its function
OWN_WORDS = ("_target_", "_partial_", "_convert_", "name", "select")
# of others: what they are by default
NUMBER, LIST = read_setting(float), Annotated[list, Rule("a list, as [1,2]", lambda value: True)]
KINDS: dict[type, Setting | None] = {
    bool: read_setting(bool),
    int: NUMBER,
    float: NUMBER,
    str: read_setting(Text),
    list: Setting(LIST),
}


def collect_settings(config: dict) -> dict[str, Setting]:
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
    of_run = {name: read_setting(hint) for name, hint in OWN.items()}
    return {
        f"{prefix}{name}": setting
        for prefix, owner in owners
        for name, setting in read_settings(owner).items()
    } | {name: setting for name, setting in of_run.items() if setting}


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
        if not node["_target_"].startswith(PACKAGE):
            complete_node(path, node, function)
    return config


def complete_node(path: str, node: dict[str, Any], function: Callable) -> None:
    """Completes one node, see `complete_settings`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # one of a C library
        return
    parameters = signature.parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in node if not open_ended else ():
        if name not in parameters and name not in OWN_WORDS:
            hint = suggest_options(name, read_settings(function))
            raise InputError(f"{path}.{name}={format_value(node[name])}: unknown setting{hint}")
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty:
            if name in read_settings(function):
                node.setdefault(name, parameter.default)
        elif parameter.kind is parameter.KEYWORD_ONLY and name not in node:
            raise InputError(f"{path}.{name}: must be given, as {path}.{name}=VALUE")


# checks


def check_settings(
    config: dict, default: dict[str, Any], settings: dict[str, Setting], asked: Collection[str] = ()
) -> None:
    """Raises InputError for the first setting of a resolved configuration that is not
    allowed, beginning with those `asked` for.

    `settings` and `default` go by dotted name; `default` has the values without overrides. Another
    setting must keep the type of its default.
    """
    check_nesting(config, default)
    for name, value in sorted(flatten_settings(config), key=lambda leaf: leaf[0] not in asked):
        if value == "???":
            raise InputError(f"{name}: must be given, as {name}=VALUE")
        setting = settings.get(name) or KINDS.get(type(default.get(name)))
        if setting:
            setting.check(name, value)


def check_nesting(config: dict, default: dict[str, Any]) -> None:
    """Raises InputError where a single value has taken the place of a group of
    settings, or the other way round. A function that a preset names may be any value.
    """
    for name in default:
        if f"{name.rpartition('.')[0]}._partial_" in default:
            continue
        path, value = "", config
        for part in name.split("."):
            if not isinstance(value, dict):
                raise InputError(
                    f"{path}={format_value(value)}: is a group of settings; change one of them, as"
                    f" {path}.{part}=VALUE"
                )
            if part not in value:
                break  # removed by the user
            path, value = f"{path}.{part}".lstrip("."), value[part]
        if path == name and isinstance(value, dict):
            raise InputError(f"{name}={value}: must be a single value")


def check_sizes(config: dict, num_clients: int, test_samples: int) -> None:
    """Raises InputError for settings that do not fit the clients and test samples the
    data turned out to have.
    """
    if not test_samples:
        raise InputError(
            "partition: no client holds a test sample, so that nothing can be scored; raise"
            " partition.test_fraction or, where a file has a split, mark samples with 1"
        )
    for name, value in (
        ("clients_per_round", config["clients_per_round"]),
        ("algorithm.m", config["algorithm"].get("m", 1)),
    ):
        if value > num_clients:
            raise InputError(
                f"{name}={value}: must be at most {num_clients}, the number of clients"
            )
