"""What every setting of a configuration may be, by its dotted name: the range of each parameter,
and the checks of a composed configuration, before anything is loaded or trained.
"""

import importlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal

from fedjax_cfl.cli.choices import setting_rules
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local
from fedjax_cfl.data.scaling import Standardize
from fedjax_cfl.errors import InputError
from fedjax_cfl.models import as_task
from fedjax_cfl.runs.settings import CheckpointSettings
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.validation import (
    ANYTHING,
    FLAG,
    LIST,
    TEXT,
    BelowOne,
    FiniteFloat,
    NaturalInt,
    NonNegativeFloat,
    PositiveInt,
    Rule,
    Seed,
    check_value,
    flatten_settings,
    format_value,
    rule_of,
)

PACKAGE = "fedjax_cfl."
HOST = Rule(
    "null, auto or HOST:PORT",
    lambda value: value in (None, "auto") or bool(re.fullmatch(r"\S+:\d{1,5}", str(value))),
)
DIRECTORY = Rule(
    "the name of a directory", lambda value: type(value) in (str, int) and bool(str(value).strip())
)
WIDTH = Rule(
    "auto or a whole number >= 1",
    lambda value: value == "auto" or (isinstance(value, int) and value is not True and value >= 1),
)

KEPT_KINDS = {
    bool: FLAG,
    int: rule_of(FiniteFloat),
    float: rule_of(FiniteFloat),
    str: TEXT,
    list: LIST,
}


# of settings that no function of the library takes by their name
OWN_RULES = {
    name: rule
    for name, kind in {
        "seed": Seed,
        "seeds": PositiveInt,
        "clients_per_round": PositiveInt,
        "assignments": NaturalInt,
        "devices": PositiveInt | None,
        "precision": Literal["float32", "tensorfloat32", "bfloat16"],
        "resident": Literal["device", "host"],
        "test_on": Literal["group", "received"],
        "resume": Literal["auto", "must", "never"],
        "run_dir": Annotated[str, DIRECTORY],
        "coordinator": Annotated[str | None, HOST],
        "processes": PositiveInt | None,
        "process": NaturalInt | None,
        "dataset.standardize": Standardize,
        "evaluate.validation": BelowOne,
        "evaluate.part": Literal["test", "validation"],
        "evaluate.choose": Literal["last", "best_validation"],
        "evaluate.patience": NaturalInt,  # tests
        "evaluate.finetune": NaturalInt,  # epochs
        "evaluate.new_clients": BelowOne,
        "evaluate.validation_clients": BelowOne,
        "evaluate.similarity": NaturalInt,  # clients
        "local.width": Annotated[int | str, WIDTH],
        "preset.l2": NonNegativeFloat | None,
    }.items()
    if (rule := rule_of(kind))
}


def collect_rules(config: dict) -> dict[str, Rule]:
    """Returns the rules of a resolved configuration by dotted name: those of the package's
    functions that its `_target_`s name, and those of the run.
    """
    owners: list[tuple[str, Callable]] = [
        ("", Plan),
        ("local.", Local),
        ("local.", make_execution),
        ("faults.", Faults),
        *find_targets(config),
        ("model.", as_task),
        ("checkpoint.", CheckpointSettings),
    ]
    return {
        f"{prefix}{name}": rule
        for prefix, owner in owners
        for name, rule in setting_rules(owner).items()
    } | OWN_RULES


def find_targets(node: dict, path: str = "") -> Iterator[tuple[str, Callable]]:
    """Yields (dotted name and a dot, function) of every `_target_` below a node that is
    the package's own. Others are left alone: to look at them would run their code.
    """
    if str(node.get("_target_")).startswith(PACKAGE):
        function = resolve_target(node["_target_"])
        if function is not None:
            yield path, function
    for name, value in node.items():
        if isinstance(value, dict):
            yield from find_targets(value, f"{path}{name}.")


def resolve_target(target: str) -> Callable | None:
    """Returns the function or class of a dotted name, or None if there is none."""
    home, _, rest = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(home), rest)
    except (ImportError, AttributeError, ValueError):
        return None  # reported, with the reason, when the parts are built
    return found if callable(found) else None


# checks


def check_settings(
    config: dict, default: dict[str, Any], rules: dict[str, Rule], asked: Collection[str] = ()
) -> None:
    """Raises InputError for the first setting of a resolved configuration that is not
    allowed, beginning with those `asked` for.

    `rules` and `default` go by dotted name; `default` has the values without overrides. A setting
    without a rule must keep the type of its default.
    """
    check_nesting(config, default)
    for name, value in sorted(flatten_settings(config), key=lambda leaf: leaf[0] not in asked):
        if value == "???":
            raise InputError(f"{name}: must be given, as {name}=VALUE")
        check_value(
            name, value, rules.get(name) or KEPT_KINDS.get(type(default.get(name))) or ANYTHING
        )


def check_nesting(config: dict, default: dict[str, Any]) -> None:
    """Raises InputError where a single value has taken the place of a group of
    settings, or the other way round.
    """
    for name in default:
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
