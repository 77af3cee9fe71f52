"""What every setting of a configuration may be: the range of each parameter, by the
dotted name under which the configuration gives it.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedjax_cfl.models import as_task
from fedjax_cfl.round import Faults, Local
from fedjax_cfl.simulation.driver import check_plan
from fedjax_cfl.validation import (
    BelowOne,
    Epochs,
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Rule,
    Seed,
    Trim,
    number,
    one_of,
    or_none,
    parameter_rules,
    rule_of,
)

PACKAGE = "fedjax_cfl."
# Nodes of a configuration without a `_target_`, and what takes their values.
OWNERS: dict[str, Callable] = {"": check_plan, "local.": Local, "faults.": Faults}
# Settings of the run itself.
RUN_KINDS: dict[str, Any] = {
    "seed": Seed,
    "seeds": PositiveInt,
    "clients_per_round": PositiveInt,
    "devices": PositiveInt | None,
    "processes": PositiveInt | None,
    "process": NaturalInt | None,
    "checkpoint.every": PositiveInt,
    "checkpoint.minutes": PositiveFloat,
    "checkpoint.keep": PositiveInt,
    "model.l2": parameter_rules(as_task)["l2"],
    "preset.l2": or_none(parameter_rules(as_task)["l2"]),
    "precision": one_of("float32", "tensorfloat32", "bfloat16"),
    "resume": one_of("auto", "must", "never"),
    "resident": one_of("device", "host"),
    "test_on": one_of("group", "received"),
    "coordinator": Rule(
        "null, auto or HOST:PORT",
        lambda value: value in (None, "auto") or bool(re.fullmatch(r"\S+:\d{1,5}", str(value))),
    ),
    "run_dir": Rule(
        "the name of a directory",
        lambda value: type(value) in (str, int) and bool(str(value).strip()),
    ),
    "local.width": Rule(
        "auto or a whole number >= 1",
        lambda value: (
            value == "auto" or (isinstance(value, int) and value is not True and value >= 1)
        ),
    ),
}
# Until the parameters of `fedjax_cfl.algorithms` are annotated themselves: an annotation wins,
# and the line here goes.
ALGORITHM_KINDS: dict[str, Any] = {
    "m": PositiveInt,
    "alpha": PositiveInt,
    "eta_g": NonNegativeFloat,
    "mu": NonNegativeFloat,
    "q": NonNegativeFloat,
    "server_lr": PositiveFloat,
    "momentum": BelowOne,
    "b1": BelowOne,
    "b2": BelowOne,
    "tau": PositiveFloat,
    "drop_percent": Fraction,
    "share": Fraction,
    "restarts": PositiveInt,
    "spare": BelowOne,
    "restart_rounds": PositiveInt,
    "temperature_max": number("a finite number > 1", lambda value: value > 1),
    "epsilon": PositiveFloat | None,
    "beta": Trim,
    "theta": Trim,
    "erm_epochs": Epochs | None,
    "iterations": PositiveInt,
    "eps1": NonNegativeFloat,
    "eps2": NonNegativeFloat,
    "gamma_max": Fraction,
    "min_size": PositiveInt,
    "warm_up": NaturalInt,
    "threshold": PositiveFloat | None,
}


def _rules(kinds: Mapping[str, Any], prefix: str = "") -> dict[str, Rule]:
    """Returns the rule of each kind; a rule may stand for itself."""
    rules = {
        name: kind if isinstance(kind, Rule) else rule_of(kind) for name, kind in kinds.items()
    }
    return {f"{prefix}{name}": rule for name, rule in rules.items() if rule}


def collect_rules(config: dict) -> dict[str, Rule]:
    """Returns the rules of a resolved configuration by dotted name: those of the run, and
    those of the package's functions that its `_target_`s name.
    """
    rules = _rules(ALGORITHM_KINDS, "algorithm.")
    found = [*OWNERS.items(), *find_targets(config)]
    for prefix, function in found:
        rules |= {f"{prefix}{name}": rule for name, rule in parameter_rules(function).items()}
    return rules | _rules(RUN_KINDS)


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
        return None  # said, with the reason, when the parts are built
    return found if callable(found) else None
