"""What a setting may be: rules, and the one line that says what is allowed."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fedjax_cfl.errors import InputError


class Rule(NamedTuple):
    """What one setting may be."""

    allowed: str
    holds: Callable[[Any], bool]


def _whole(low: int, high: int | None = None, or_none: bool = False) -> Rule:
    text = (
        "a whole number"
        f" {'from ' + str(low) + ' to ' + str(high) if high is not None else '>= ' + str(low)}"
    )

    def holds(value):
        if value is None:
            return or_none
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value >= low
            and (high is None or value <= high)
        )

    return Rule(text + (" or null" if or_none else ""), holds)


def _number(text: str, inside: Callable[[float], bool]) -> Rule:
    def holds(value):
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and inside(value)
        )

    return Rule(text, holds)


def _one_of(*options) -> Rule:
    return Rule("one of " + ", ".join(map(str, options)), lambda value: value in options)


_positive = _number("a finite number > 0", lambda value: value > 0)
_not_negative = _number("a finite number >= 0", lambda value: value >= 0)
_fraction = _number("a number between 0 and 1", lambda value: 0 <= value <= 1)
_trim = _number("a number from 0 to 0.5 (the median)", lambda value: 0 <= value <= 0.5)
_flag = Rule("true or false", lambda value: isinstance(value, bool))
_text = Rule("text", lambda value: isinstance(value, str) and bool(value))
_any_number = _number("a finite number", lambda value: True)
_below_one = _number("a number from 0 to below 1", lambda value: 0 <= value < 1)
_list = Rule("a list, as [1,2]", lambda value: isinstance(value, list))
_anything = Rule("anything", lambda value: True)
RULES = {
    "seed": _whole(0, 2**31 - 1),
    "seeds": _whole(1),
    "rounds": _whole(1),
    "clients_per_round": _whole(1),
    "eval_every": _whole(1),
    "devices": _whole(1, or_none=True),
    "precision": _one_of("float32", "tensorfloat32", "bfloat16"),
    "coordinator": Rule(
        "null, auto or HOST:PORT",
        lambda value: value in (None, "auto") or re.fullmatch(r"\S+:\d{1,5}", str(value)),
    ),
    "processes": _whole(1, or_none=True),
    "process": _whole(0, or_none=True),
    "run_dir": Rule(
        "the name of a directory",
        lambda value: type(value) in (str, int) and bool(str(value).strip()),
    ),
    "resume": _one_of("auto", "must", "never"),
    "checkpoint.every": _whole(1),
    "checkpoint.minutes": _positive,
    "checkpoint.keep": _whole(1),
    "faults.dropout": _fraction,
    "faults.straggler": _fraction,
    "faults.nan": _fraction,
    "faults.byzantine": _fraction,
    "faults.scale": _not_negative,
    "resident": _one_of("device", "host"),
    "discard": _one_of("rounds", "met", "none"),
    "test_on": _one_of("group", "received"),
    "local.lr": _positive,
    "local.epochs": _whole(1, 100_000),
    "local.batch_size": _whole(1),
    "local.momentum": _below_one,
    "local.steps": _whole(1, or_none=True),
    "local.weight_decay": _not_negative,
    "local.width": Rule(
        "auto or a whole number >= 1", lambda value: value == "auto" or _whole(1).holds(value)
    ),
    "local.first_layer": _one_of("auto", "direct", "dual"),
    "model.l2": _not_negative,
    "preset.l2": Rule(
        "null or a finite number >= 0", lambda value: value is None or _not_negative.holds(value)
    ),
    "algorithm.m": _whole(1),
    "algorithm.alpha": _whole(1),
    "algorithm.eta_g": _not_negative,
    "algorithm.mu": _not_negative,
    "algorithm.q": _not_negative,
    "algorithm.server_lr": _positive,
    "algorithm.momentum": _below_one,
    "algorithm.b1": _below_one,
    "algorithm.b2": _below_one,
    "algorithm.tau": _positive,
    "algorithm.drop_percent": _fraction,
    "algorithm.share": _fraction,
    "algorithm.restarts": _whole(1),
    "algorithm.spare": _below_one,
    "algorithm.restart_rounds": _whole(1),
    "algorithm.temperature_max": _number("a finite number > 1", lambda value: value > 1),
    "algorithm.epsilon": Rule(
        "null or a finite number > 0", lambda value: value is None or _positive.holds(value)
    ),
    "algorithm.beta": _trim,
    "algorithm.theta": _trim,
    "algorithm.erm_epochs": _whole(1, 100_000, or_none=True),
    "algorithm.iterations": _whole(1),
    "algorithm.eps1": _not_negative,
    "algorithm.eps2": _not_negative,
    "algorithm.gamma_max": _fraction,
    "algorithm.min_size": _whole(1),
    "algorithm.warm_up": _whole(0),
    "algorithm.threshold": Rule(
        "null or a finite number > 0", lambda value: value is None or _positive.holds(value)
    ),
    "dataset.source.num_classes": _whole(1, or_none=True),
    "dataset.source.users": _whole(1, or_none=True),
    "dataset.source.match_total": _whole(1, or_none=True),
    "dataset.source.alpha": _not_negative,
    "dataset.source.beta": _not_negative,
    "partition.clients": _whole(1),
    "partition.alpha": _positive,
    "partition.test_fraction": _below_one,
    "partition.classes_per_client": _whole(1),
    "partition.shards_per_client": _whole(1),
    "partition.samples_per_client": _whole(1),
    "partition.seed_samples": _whole(1),
    "partition.min_samples": _whole(0),
    "partition.sigma": _positive,
    "concept.groups": _whole(1),
}


def flatten_settings(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every leaf of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check_value(name: str, value: Any, rule: Rule | None = None) -> None:
    """Raises InputError for a value that a setting may not have, by default by its rule
    in RULES.
    """
    rule = rule or RULES[name]
    if not rule.holds(value):
        raise InputError(f"{name}={_format_value(value)}: must be {rule.allowed}")


def _like(default: Any) -> Rule:
    kinds = {bool: _flag, int: _any_number, float: _any_number, str: _text, list: _list}
    return kinds.get(type(default), _anything)


def _format_value(value: Any) -> str:
    """Returns a value as the command line writes it."""
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )
