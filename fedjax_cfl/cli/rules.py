"""What every setting of a configuration may be: the range of each parameter, by the
dotted name under which the configuration gives it.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, NamedTuple

from fedjax_cfl.cli.choices import setting_rules
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local
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


class TopSettings(NamedTuple):
    """Settings at the top, which no function of the library takes."""

    seed: Seed
    seeds: PositiveInt
    clients_per_round: PositiveInt
    assignments: NaturalInt
    devices: PositiveInt | None
    precision: Literal["float32", "tensorfloat32", "bfloat16"]
    resident: Literal["device", "host"]
    test_on: Literal["group", "received"]
    resume: Literal["auto", "must", "never"]
    run_dir: Annotated[str, DIRECTORY]
    coordinator: Annotated[str | None, HOST]
    processes: PositiveInt | None
    process: NaturalInt | None


class EvaluateSettings(NamedTuple):
    """Settings under `evaluate`."""

    finetune: NaturalInt  # epochs
    new_clients: BelowOne
    similarity: NaturalInt  # clients


class WidthSetting(NamedTuple):
    """The setting under `local` that is settled before `Local` gets it."""

    width: Annotated[int | str, WIDTH]


class PresetSettings(NamedTuple):
    """Settings under `preset` that are not handed on as they are."""

    l2: NonNegativeFloat | None


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
        ("preset.", PresetSettings),
        ("local.", WidthSetting),
        ("checkpoint.", CheckpointSettings),
        ("evaluate.", EvaluateSettings),
        ("", TopSettings),
    ]
    return {
        f"{prefix}{name}": rule
        for prefix, owner in owners
        for name, rule in setting_rules(owner).items()
    }


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
