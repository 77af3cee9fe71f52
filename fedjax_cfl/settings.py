"""What a configuration may say: the checks that run before anything is loaded or trained."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_cfl.errors import InputError, nearest


class Rule(NamedTuple):
    """What one setting may be."""

    allowed: str
    holds: Callable[[Any], bool]


def _whole(low: int, high: int | None = None, or_none: bool = False) -> Rule:
    text = f"a whole number {'from ' + str(low) + ' to ' + str(high) if high is not None else '>= ' + str(low)}"

    def holds(value):
        if value is None:
            return or_none
        return isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)

    return Rule(text + (" or null" if or_none else ""), holds)


def _number(text: str, inside: Callable[[float], bool]) -> Rule:
    def holds(value):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and inside(value)

    return Rule(text, holds)


def _one_of(*options) -> Rule:
    return Rule("one of " + ", ".join(map(str, options)), lambda value: value in options)


_positive = _number("a finite number > 0", lambda value: value > 0)
_not_negative = _number("a finite number >= 0", lambda value: value >= 0)
_fraction = _number("a number between 0 and 1", lambda value: 0 <= value <= 1)
_flag = Rule("true or false", lambda value: isinstance(value, bool))
_text = Rule("text", lambda value: isinstance(value, str) and bool(value))

RULES = {
    "seed": _whole(0, 2**31 - 1),
    "rounds": _whole(1),
    "clients_per_round": _whole(1),
    "eval_every": _whole(1),
    "eval_auxiliary": _flag,
    "offline": _flag,
    "devices": _whole(1, or_none=True),
    "run_dir": _text,
    "discard": _one_of("rounds", "met", "none"),
    "local.lr": _positive,
    "local.epochs": _whole(1),
    "local.batch_size": _whole(1),
    "local.width": Rule("auto or a whole number >= 1", lambda value: value == "auto" or _whole(1).holds(value)),
    "model.l2": _not_negative,
    "algorithm.m": _whole(1),
    "algorithm.alpha": _whole(1),
    "algorithm.eta_g": _not_negative,
    "algorithm.mu": _not_negative,
    "algorithm.q": _not_negative,
    "algorithm.server_lr": _positive,
    "algorithm.momentum": _number("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "algorithm.b1": _number("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "algorithm.b2": _number("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "algorithm.tau": _positive,
    "algorithm.drop_percent": _fraction,
    "algorithm.share": _fraction,
    "algorithm.restarts": _whole(1),
    "algorithm.restart_rounds": _whole(1),
    "partition.clients": _whole(1),
    "partition.alpha": _positive,
    "partition.test_fraction": _number("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "partition.classes_per_client": _whole(1),
    "partition.shards_per_client": _whole(1),
    "partition.samples_per_client": _whole(1),
    "concept.groups": _whole(1),
}


def leaves(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every leaf of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check(config: dict) -> None:
    """Raises InputError for the first setting of a resolved configuration that is not allowed."""
    for name, value in leaves(config):
        rule = RULES.get(name)
        if rule and not rule.holds(value):
            raise InputError(f"{name}={value!r}: must be {rule.allowed}")


def check_sizes(config: dict, num_clients: int) -> None:
    """Raises InputError for settings that do not fit the number of clients the data turned out to have."""
    asked = config["clients_per_round"]
    if asked > num_clients:
        raise InputError(f"clients_per_round={asked}: must be at most {num_clients}, the number of clients")
    groups = config["algorithm"].get("m", 1)
    if groups > num_clients:
        raise InputError(f"algorithm.m={groups}: must be at most {num_clients}, the number of clients")


def check_run_dir(run_dir: str) -> None:
    """Raises InputError if the run directory already holds something: a run never overwrites another."""
    path = Path(run_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"run_dir={run_dir}: already exists and is not empty; choose another or remove it")


def unknown(name: str, options) -> str:
    """Returns the rest of a message about an unknown name: the nearest option, or all of them."""
    options = sorted(options)
    return nearest(name, options) or f"; allowed: {', '.join(options)}"
