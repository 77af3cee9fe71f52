"""What a setting may be: the annotation of the parameter that takes it, and nothing else, says so.

    @checked("algorithm")
    def tkm(task, local, system, *, m: PositiveInt, beta: Trim = 0.2) -> Algorithm: ...

pydantic checks values by it, strictly: True is not 1, and "3" is not 3. The command line checks
every `_target_` of a configuration by the same annotations, before anything is loaded.
"""

import dataclasses
import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.formatting import format_value, shorten

# What arrays on a device hold: larger numbers are infinite there, smaller ones may be 0.
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_MIN = 1.1754943508222875e-38
INT32_MAX = 2**31 - 1

Function = TypeVar("Function", bound=Callable[..., Any])


class Rule(NamedTuple):
    """What a value of an annotated type may be beyond its type: in words, and by a test."""

    allowed: str  # completes "must be ..."
    holds: Callable[[Any], Any]  # false, or anything like it: it is not allowed

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Returns how pydantic checks it: by its type, then by the test."""

        def test(value: Any) -> Any:
            if not self.holds(value):
                raise ValueError(self.allowed)
            return value

        return core_schema.no_info_after_validator_function(test, handler(source))


# ranges


def whole(low: int, high: int | None = None) -> Any:
    """Allows whole numbers from `low` on that int32 can hold, or from `low` to `high`."""
    text = f">= {low}" if high is None else f"from {low} to {high}"
    limit = INT32_MAX if high is None else high
    return Field(ge=low, le=limit, description=f"a whole number {text}")


def number(allowed: str, **bounds: Any) -> Any:
    """Allows numbers within bounds of pydantic, which `allowed` describes."""
    return Field(description=allowed, **bounds)


PositiveInt = TypeAliasType("PositiveInt", Annotated[int, whole(1)])
NaturalInt = TypeAliasType("NaturalInt", Annotated[int, whole(0)])
Epochs = TypeAliasType("Epochs", Annotated[int, whole(1, 100_000)])
# more is a typing error, which should not fill the memory
Count = TypeAliasType("Count", Annotated[int, whole(1, 10_000_000)])
Seed = TypeAliasType("Seed", Annotated[int, whole(0, INT32_MAX)])
PositiveFloat = TypeAliasType(
    "PositiveFloat", Annotated[float, number("a finite number > 0", gt=0)]
)
NonNegativeFloat = TypeAliasType(
    "NonNegativeFloat", Annotated[float, number("a finite number >= 0", ge=0)]
)
FiniteFloat = TypeAliasType("FiniteFloat", Annotated[float, number("a finite number")])
Fraction = TypeAliasType(
    "Fraction", Annotated[float, number("a number between 0 and 1", ge=0, le=1)]
)
BelowOne = TypeAliasType(
    "BelowOne", Annotated[float, number("a number from 0 to below 1", ge=0, lt=1)]
)
FromOne = TypeAliasType("FromOne", Annotated[float, number("a number >= 1", ge=1)])
FromMinusOne = TypeAliasType("FromMinusOne", Annotated[float, number("a number >= -1", ge=-1)])
Trim = TypeAliasType(
    "Trim", Annotated[float, number("a number from 0 to 0.5 (the median)", ge=0, le=0.5)]
)
Text = TypeAliasType("Text", Annotated[str, Field(min_length=1)])
OptionalText = TypeAliasType("OptionalText", Text | None)
OptionalTexts = TypeAliasType("OptionalTexts", list[Text] | None)


def _fit_float32(value: float) -> float:
    """Returns a number that float32 holds. Raises ValueError, which says what it makes of it."""
    if FLOAT32_MAX < abs(value) < math.inf:
        raise ValueError("in float32, which runs compute in, this one is infinite")
    if value and abs(value) < FLOAT32_MIN:
        raise ValueError("in float32, which runs compute in, this one is 0")
    return value


# how pydantic checks what Python has for single values
SCALARS: dict[Any, Any] = {
    bool: Annotated[bool, Field(strict=True, description="true or false")],
    int: Annotated[int, Field(strict=True, description="a whole number")],
    float: Annotated[
        float,
        Field(strict=True, allow_inf_nan=False, description="a finite number"),
        AfterValidator(_fit_float32),
    ],
    str: Annotated[str, Field(strict=True, description="text")],
    type(None): None,
}
ARRAY = "an array of JAX, or what a program has in place of one"
UNIONS: Any = (typing.Union, types.UnionType)
LISTS: Any = (tuple, list, Sequence)


# reading annotations


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one parameter may be."""

    kind: Any  # the plain values of its annotation, as pydantic checks them, ...: it has none
    objects: tuple[Any, ...] = ()  # its other members: arrays, functions, classes

    @property
    def takes_arrays(self) -> bool:
        """Whether it may be an array of JAX: a program can take it as an input."""
        # by its module: --help needs the settings, but not JAX
        return any(str(getattr(each, "__module__", "")).startswith("jax") for each in self.objects)

    @functools.cached_property
    def adapter(self) -> TypeAdapter:
        """Returns what checks plain values, made when the first one is checked."""
        try:
            return make_adapter(self.kind)
        except TypeError:  # a note in the annotation of somebody's own cannot be hashed
            return TypeAdapter(self.kind)

    def check(self, name: str, value: Any) -> Any:
        """Returns a value as its annotation has it: a tuple for a list, a float for a whole number.
        Raises InputError, which names the setting, for one that is not allowed.
        """
        value = value.item() if _is_numpy_scalar(value) else value
        plain, allowed = _is_plain(value), list(map(_name_object, self.objects))
        if self.kind is ...:
            if not _is_one_of(value, self.objects):
                raise InputError(f"{name}={show_value(value)}: must be {' or '.join(allowed)}")
            return value
        # what an array of a program holds is not known
        if hasattr(value, "dtype") or (not plain and _is_one_of(value, self.objects)):
            return value
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            words = " or ".join([describe(self.kind), *(() if plain else allowed)])
            near = suggest_nearest(value, map(str, options_of(self.kind))) if plain else ""
            raise InputError(
                f"{name}={show_value(value)}: must be {words}{near}{_explain(error)}"
            ) from None


make_adapter = functools.cache(TypeAdapter)  # many settings share an annotation


def _is_numpy_scalar(value: Any) -> bool:
    return isinstance(value, np.generic | np.ndarray) and value.ndim == 0


def _is_plain(value: Any) -> bool:
    """Returns whether a value is one that a command line can give."""
    plain = isinstance(value, bool | int | float | str | list | tuple | types.NoneType)
    return plain and not hasattr(value, "_fields")


def _is_one_of(value: Any, objects: tuple[Any, ...]) -> bool:
    """Returns whether a value is one of the members of an annotation that are no plain values:
    an array, a function, an object of a class of ours. What else an annotation says is not looked
    at, and allows any.
    """
    return any(
        hasattr(value, "dtype") if member is ARRAY else isinstance(value, member)
        for member in map(_class_of, objects)
    )


def _class_of(hint: Any) -> Any:
    """Returns the class whose objects a member of an annotation allows, `ARRAY` for arrays of JAX,
    and `object` for what is not looked at.
    """
    origin: Any = typing.get_origin(hint) or hint
    if origin is Callable or getattr(origin, "_is_protocol", False):
        return Callable
    looked_at = ("jax", "fedjax_cfl", "pathlib")
    if not isinstance(origin, type) or not origin.__module__.startswith(looked_at):
        return origin if origin is types.NoneType else object
    return ARRAY if origin.__name__.endswith("Array") else origin


def _name_object(hint: Any) -> str:
    named = {types.NoneType: "None", Callable: "a function", ARRAY: "an array"}
    return named.get(_class_of(hint)) or _class_of(hint).__name__


def show_value(value: Any) -> str:
    """Returns a value as the command line writes it; what it cannot write on one line, not whole
    if it is long.
    """
    return format_value(value) if _is_plain(value) else shorten(value)


def _explain(error: ValidationError) -> str:
    """Returns, in brackets, why a number that looks allowed is not."""
    for each in error.errors():
        context = each.get("ctx", {})
        if context.get("le") == INT32_MAX:
            return f" (at most {INT32_MAX}, the largest int32)"
        if "float32" in str(context.get("error", "")):
            return f" ({context['error']})"
    return ""


def list_members(hint: Any) -> Iterator[Any]:
    """Yields the members of an annotation that is a union, or itself."""
    if (value := getattr(hint, "__value__", None)) is not None:  # a named alias
        yield from list_members(value)
    elif typing.get_origin(hint) in UNIONS:
        for part in typing.get_args(hint):
            yield from list_members(part)
    else:
        yield hint


def read_plain(hint: Any) -> Any:
    """Returns one member of an annotation as pydantic checks plain values by it, ... if it is
    about other objects.
    """
    if isinstance(hint, type) and hint in SCALARS:
        return SCALARS[hint]
    origin: Any = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin is Annotated:
        inner = read_kind(parts[0])
        return inner if inner is ... else Annotated[(inner, *parts[1:])]
    if origin is Literal:
        return hint
    if origin in LISTS:
        inside = tuple(part if part is ... else read_kind(part) for part in parts)
        objects = inside.count(...) > parts.count(...)
        return ... if objects or not parts else origin[inside]
    return ...


def read_kind(hint: Any) -> Any:
    """Returns the plain values of an annotation as pydantic checks them, ... if it has none."""
    kinds = [kind for kind in map(read_plain, list_members(hint)) if kind is not ...]
    if SCALARS[float] in kinds:  # which takes whole numbers as well
        kinds = [kind for kind in kinds if kind not in (SCALARS[int], SCALARS[bool])]
    if all(kind is None for kind in kinds):
        return ...
    return functools.reduce(operator.or_, kinds)


def read_setting(hint: Any) -> Setting | None:
    """Returns what an annotation allows, None if it is not about plain values."""
    if (kind := read_kind(hint)) is ...:
        return None
    return Setting(kind, tuple(part for part in list_members(hint) if read_plain(part) is ...))


@functools.cache
def read_settings(function: Callable) -> Mapping[str, Setting]:
    """Returns what every parameter of a function, or field of a class, may be whose annotation
    is about plain values.
    """
    found = {name: read_setting(hint) for name, hint in _read_hints(function).items()}
    return {name: setting for name, setting in found.items() if setting}


@functools.cache
def _read_objects(function: Callable) -> Mapping[str, Setting]:
    """Returns what every parameter may be whose annotation has no plain values but None."""
    members = {name: tuple(list_members(hint)) for name, hint in _read_hints(function).items()}
    return {
        name: Setting(..., parts)
        for name, parts in members.items()
        if all(read_plain(each) in (..., None) for each in parts)
    }


def _read_hints(function: Callable) -> dict[str, Any]:
    if isinstance(function, type):  # a class of its own says what it takes in __init__
        function = vars(function).get("__init__", function)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # names that only a type checker sees, or no function at all
        hints = getattr(function, "__annotations__", {})
    return {name: hint for name, hint in hints.items() if name != "return"}


# words


def describe(kind: Any) -> str:
    """Returns what is allowed in words that complete "must be ..."."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (None, types.NoneType):
        return "null"
    if origin is Annotated:
        said = [getattr(part, "allowed", getattr(part, "description", None)) for part in parts[1:]]
        return next(filter(None, reversed(said)), "") or describe(parts[0])
    if origin is Literal:
        return "one of " * (len(parts) > 1) + ", ".join(map(str, parts))
    if origin in UNIONS:
        parts = sorted(parts, key=lambda kind: kind is not types.NoneType)
        *first, last = " or ".join(map(describe, parts)).split(" or ")
        return f"{', '.join(first)} or {last}" if first else last
    return f"a list, each item {describe(parts[0])}"


def options_of(kind: Any) -> list[Any]:
    """Returns the values that are allowed by name."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return list(parts)
    unions = typing.get_origin(kind) in UNIONS
    return [option for part in parts for option in options_of(part)] if unions else []


# checks


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Returns a value as an annotation has it. Raises InputError for one that it does not allow."""
    setting = read_setting(hint)
    return value if setting is None else setting.check(name, value)


def check_settings(
    function: Callable, values: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Returns `values`, those as their annotations have them that are of a parameter of the
    function, or a field of the class. Raises InputError for the first that is not allowed.

    `prefix` is what the message calls the owner: `m` of "algorithm" is algorithm.m.
    """
    checked = dict(values)
    for name, setting in {**read_settings(function), **_read_objects(function)}.items():
        if name in values:
            checked[name] = setting.check(f"{prefix}.{name}" if prefix else name, values[name])
    return checked


def checked(prefix: str = "") -> Callable[[Function], Function]:
    """Returns a decorator of functions whose arguments are checked by their annotations, see
    `check_settings`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args, **options):
            try:
                bound = _signature(function).bind(*args, **options)
            except TypeError:
                return function(*args, **options)  # which says it better
            bound.arguments = check_settings(function, bound.arguments, prefix)
            return function(*bound.args, **bound.kwargs)

        return typing.cast(Function, call)

    return decorate


_signature = functools.cache(inspect.signature)


def pick(choice: Any, **options: Any) -> Any:
    """Returns what a setting names: the option of this name, or the function itself that a
    caller from Python gave.
    """
    return options[choice] if isinstance(choice, str) else choice


def is_number(value: Any) -> bool:
    """Returns whether this is a Python number, and not an input of a compiled program."""
    return isinstance(value, int | float)
