"""What a value may be: the kinds of values, and the one line that says what is allowed.

The range of a setting stands in the annotation of the parameter that takes it:

    def tkm(task, local, system, *, m: PositiveInt, beta: Trim = 0.2) -> Algorithm:
        check_arguments(tkm, locals(), "algorithm")

`check_arguments` reads it for callers from Python. The command line reads it from every
`_target_` of a configuration, with `parameter_rules`, before anything is loaded.
"""

import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_cfl.errors import InputError, suggest_nearest

# What arrays on a device hold: larger numbers are infinite there, smaller ones may be 0.
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_MIN = 1.1754943508222875e-38
INT32_MAX = 2**31 - 1


class Rule(NamedTuple):
    """What one value may be."""

    allowed: str  # completes "must be ..."
    holds: Callable[[Any], bool]
    options: tuple = ()  # the values allowed, where they can be listed
    explain: Callable[[Any], str] = lambda value: ""  # why a value that looks allowed is not
    may_be_traced: bool = False  # an array is allowed too, so that a program can take it as input


# kinds of rules


def _explain_int32(value: Any) -> str:
    """Returns, in brackets, that int32 cannot hold a whole number."""
    lost = isinstance(value, int) and value > INT32_MAX
    return f" (at most {INT32_MAX}, the largest int32)" if lost else ""


def _explain_float32(value: Any) -> str:
    """Returns, in brackets, what float32 makes of a number that it cannot hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return ""
    if FLOAT32_MAX < abs(value) < math.inf:
        return " (in float32, which runs compute in, this one is infinite)"
    return " (in float32, which runs compute in, this one is 0)" if abs(value) < FLOAT32_MIN else ""


def whole(low: int, high: int | None = None) -> Rule:
    """Allows whole numbers from `low` on that int32 can hold, or from `low` to `high`."""
    text = f"from {low} to {high}" if high is not None else f">= {low}"

    def holds(value) -> bool:
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and low <= value <= (INT32_MAX if high is None else high)
        )

    rule = Rule(f"a whole number {text}", holds)
    return rule._replace(explain=_explain_int32) if high is None else rule


def number(text: str, inside: Callable[[float], bool]) -> Rule:
    """Allows the numbers `inside`, which `text` describes, if they are finite and not
    lost in float32.
    """

    def holds(value) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= FLOAT32_MAX
            and (value == 0 or abs(value) >= FLOAT32_MIN)
            and inside(value)
        )

    return Rule(text, holds, explain=_explain_float32)


def one_of(*options) -> Rule:
    """Allows the given values."""
    text = "one of " + ", ".join(map(str, options))
    return Rule(text, lambda value: value in options, options)


def each(rule: Rule) -> Rule:
    """Allows lists of what a rule allows."""

    def holds(value) -> bool:
        return isinstance(value, list | tuple) and all(map(rule.holds, value))

    return Rule(f"a list, each of it {rule.allowed}", holds)


def or_none(rule: Rule) -> Rule:
    """Allows None as well, which the command line writes null."""
    return rule._replace(
        allowed=f"null or {rule.allowed}", holds=lambda value: value is None or rule.holds(value)
    )


# ready kinds, for annotations; `PositiveInt | None` allows None, `Literal["a", "b"]` names choices

PositiveInt = Annotated[int, whole(1)]
NaturalInt = Annotated[int, whole(0)]
Epochs = Annotated[int, whole(1, 100_000)]
COUNT = whole(1, 10_000_000)  # more is a typing error, which should not fill the memory
Count = Annotated[int, COUNT]
Seed = Annotated[int, whole(0, INT32_MAX)]
PositiveFloat = Annotated[float, number("a finite number > 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, number("a finite number >= 0", lambda value: value >= 0)]
FiniteFloat = Annotated[float, number("a finite number", lambda value: True)]
Fraction = Annotated[float, number("a number between 0 and 1", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, number("a number from 0 to below 1", lambda value: 0 <= value < 1)]
FromOne = Annotated[float, number("a number >= 1", lambda value: value >= 1)]
FromMinusOne = Annotated[float, number("a number >= -1", lambda value: value >= -1)]
Trim = Annotated[
    float, number("a number from 0 to 0.5 (the median)", lambda value: 0 <= value <= 0.5)
]

FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("text", lambda value: isinstance(value, str) and bool(value))
OptionalText = Annotated[str | None, or_none(TEXT)]
OptionalTexts = Annotated[list[str] | None, or_none(each(TEXT))]
LIST = Rule("a list, as [1,2]", lambda value: isinstance(value, list))
ANYTHING = Rule("anything", lambda value: True)


# checks


def rule_of(annotation: Any) -> Rule | None:
    """Returns the rule that an annotation carries, or None."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return next((part for part in parts[1:] if isinstance(part, Rule)), None)
    if origin is typing.Literal:
        return one_of(*parts)
    if origin is tuple and parts[-1] is Ellipsis:
        rule = rule_of(parts[0])
        return rule and each(rule)
    if origin in (typing.Union, types.UnionType):
        rules = [rule for rule in map(rule_of, parts) if rule]
        if len(rules) == 1:
            rule = or_none(rules[0]) if type(None) in parts else rules[0]
            # by its module: --help needs the rules, but not JAX
            traced = any(part.__module__.partition(".")[0] == "jax" for part in parts)
            return rule._replace(may_be_traced=traced)
    return None


@functools.cache
def parameter_rules(function: Callable) -> Mapping[str, Rule]:
    """Returns the rule of every parameter of a function, or field of a class, whose
    annotation carries one.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # names that only a type checker sees, or no function at all
        hints = getattr(function, "__annotations__", {})
    found = {name: rule_of(hint) for name, hint in hints.items() if name != "return"}
    return {name: rule for name, rule in found.items() if rule}


def check_arguments(function: Callable, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raises InputError for the first of `values` that the annotation of `function`'s
    parameter of that name does not allow.

    `prefix` is what the message calls the owner: `m` of "algorithm" is algorithm.m.
    Arrays with axes or of JAX, traced ones among them, and values without a rule are not looked
    at.
    """
    for name, rule in parameter_rules(function).items():
        value = values.get(name)
        if name in values and (_is_numpy_scalar(value) or not hasattr(value, "dtype")):
            check_value(f"{prefix}.{name}" if prefix else name, value, rule)


def check_value(name: str, value: Any, rule: Rule) -> None:
    """Raises InputError for a value that a rule does not allow."""
    value = value.item() if _is_numpy_scalar(value) else value
    if not rule.holds(value):
        near = suggest_nearest(value, map(str, rule.options)) if rule.options else ""
        said = f"{rule.allowed}{near}{rule.explain(value)}"
        raise InputError(f"{name}={format_value(value)}: must be {said}")


def is_number(value: Any) -> bool:
    """Returns whether this is a Python number, and not an input of a compiled program."""
    return isinstance(value, int | float)


def _is_numpy_scalar(value: Any) -> bool:
    return isinstance(value, np.generic | np.ndarray) and value.ndim == 0


def flatten_settings(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every leaf of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def format_value(value: Any) -> str:
    """Returns a value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
