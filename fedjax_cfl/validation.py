"""What a setting may be: the annotation of the parameter that takes it, and nothing else, says so.

    @checked("algorithm")
    def tkm(task, local, system, *, m: PositiveInt, beta: Trim = 0.2) -> Algorithm: ...

pydantic checks values by it, strictly: True is not 1, and "3" is not 3. The command line checks
every `_target_` of a configuration by the same annotations, before anything is loaded.
"""

import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
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
Made = TypeVar("Made", covariant=True)
Whole = typing.ParamSpec("Whole")


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


class Kind(NamedTuple):
    """One kind of values that an annotation allows."""

    schema: Any  # as pydantic checks it
    words: str  # completes "must be ..."
    options: tuple[str, ...] = ()  # the values, where they are allowed by name
    plain: bool = True  # a command line can give them


def single(hint: type, words: str, *notes: Any, **options: Any) -> Kind:
    """Returns what a single value of Python may be, checked strictly."""
    return Kind(Annotated[(hint, Field(strict=True, **options), *notes)], words)


SCALARS = {
    bool: single(bool, "true or false"),
    int: single(int, "a whole number"),
    float: single(float, "a finite number", AfterValidator(_fit_float32), allow_inf_nan=False),
    str: single(str, "text"),
    types.NoneType: Kind(None, "null"),
    list: Kind(list, "a list"),
    Any: Kind(Any, "anything", plain=False),
}
LISTS: Any = (tuple, list, Sequence)
ARRAY = "an array of JAX"  # or what a program has in place of one
LOOKED_AT = "jax", "fedjax_cfl", "pathlib"  # packages whose objects are known by their class


# reading annotations


def read_kinds(hint: Any) -> list[Kind]:
    """Returns the kinds of values that an annotation allows: single values strictly, lists item by
    item, objects by their class alone.
    """
    hint = getattr(hint, "__value__", hint)  # of a named alias
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for part in parts for kind in read_kinds(part)]
        whole = SCALARS[int], SCALARS[bool]  # which a float takes as well
        return [kind for kind in kinds if SCALARS[float] not in kinds or kind not in whole]
    if origin is Literal:
        options = tuple(map(str, parts))
        return [Kind(hint, "one of " * (len(options) > 1) + ", ".join(options), options)]
    if origin is Annotated:
        inner = join_kinds(read_kinds(parts[0]))
        said = [getattr(part, "allowed", getattr(part, "description", None)) for part in parts[1:]]
        words = next(filter(None, reversed(said)), inner.words)
        return [inner._replace(schema=Annotated[(inner.schema, *parts[1:])], words=words)]
    if origin in LISTS:
        items = [join_kinds(read_kinds(part)) for part in parts if part is not ...]
        schemas = (*(item.schema for item in items), *(part for part in parts if part is ...))
        plain = all(item.plain for item in items)
        return [Kind(origin[schemas], f"a list, each item {items[0].words}", plain=plain)]
    return [SCALARS[hint] if hint in (*SCALARS,) else read_class(origin or hint)]


def read_class(hint: Any) -> Kind:
    """Returns what an object may be: arrays, functions and objects of our classes are known by
    what they are; of other classes, all but values that a command line can give.
    """
    name = getattr(hint, "__name__", str(hint))
    if hint is Callable or getattr(hint, "_is_protocol", False):
        rule = Rule("a function", callable)
    elif not isinstance(hint, type) or not hint.__module__.startswith(LOOKED_AT):
        home = getattr(hint, "__module__", "").partition(".")[0]
        rule = Rule(f"a {name} of {home}" if home else name, lambda value: not is_given(value))
    elif name.endswith("Array"):
        rule = Rule(ARRAY, lambda value: hasattr(value, "dtype"))
    else:
        rule = Rule(name, lambda value: isinstance(value, hint))
    return Kind(Annotated[Any, rule], rule.allowed, plain=False)


def is_given(value: Any) -> bool:
    """Returns whether a value is one that a command line can give."""
    plain = isinstance(value, bool | int | float | str | list | tuple | types.NoneType)
    return plain and not hasattr(value, "_fields")


def join_kinds(kinds: Sequence[Kind]) -> Kind:
    """Returns several kinds as one."""
    schema = functools.reduce(operator.or_, [kind.schema for kind in kinds])
    *first, last = [kind.words for kind in sorted(kinds, key=lambda kind: kind.words != "null")]
    between = ", " if " or " in last else " or "
    words = f"{', '.join(first)}{between}{last}" if first else last
    options = tuple(option for kind in kinds for option in kind.options)
    return Kind(schema, words, options, any(kind.plain for kind in kinds if kind.schema))


@functools.cache
def read_settings(function: Callable) -> Mapping[str, list[Kind]]:
    """Returns what every parameter of a function, or field of a class, may be."""
    if isinstance(function, type):  # a class of its own says what it takes in __init__
        function = vars(function).get("__init__", function)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # names that only a type checker sees, or no function at all
        hints = getattr(function, "__annotations__", {})
    known = {name: hint for name, hint in hints.items() if not isinstance(hint, str)}
    return {name: read_kinds(hint) for name, hint in known.items() if name != "return"}


# checks


make_adapter = functools.cache(TypeAdapter)  # many settings share an annotation


def check(name: str, value: Any, kinds: Sequence[Kind]) -> Any:
    """Returns a value as its annotation has it: a tuple for a list, a float for a whole number.
    Raises InputError, which names the setting, for one that is not of these kinds.
    """
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    kind = join_kinds(kinds)
    if kind.plain and hasattr(value, "dtype"):
        return value  # what an array of a program holds is not known
    try:
        adapter = make_adapter(kind.schema)
    except TypeError:  # a note in the annotation of somebody's own cannot be hashed
        adapter = TypeAdapter(kind.schema)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        line, near = f"{name}={shorten(value)}", ""
        if is_given(value):
            line, near = f"{name}={format_value(value)}", suggest_nearest(str(value), kind.options)
            kind = join_kinds([each for each in kinds if each.plain]) if kind.plain else kind
        raise InputError(f"{line}: must be {kind.words}{near}{explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Returns, in brackets, why a number that looks allowed is not."""
    for context in (each.get("ctx", {}) for each in error.errors()):
        if context.get("le") == INT32_MAX:
            return f" (at most {INT32_MAX}, the largest int32)"
        if "float32" in str(context.get("error", "")):
            return f" ({context['error']})"
    return ""


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Returns a value as an annotation has it. Raises InputError for one that it does not allow."""
    return check(name, value, read_kinds(hint))


def check_settings(
    function: Callable, values: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Returns `values`, those as their annotations have them that are of a parameter of the
    function, or a field of the class. Raises InputError for the first that is not allowed.

    `prefix` is what the message calls the owner: `m` of "algorithm" is algorithm.m.
    """
    kinds = read_settings(function)
    return {
        name: check(f"{prefix}.{name}".lstrip("."), value, kinds[name]) if name in kinds else value
        for name, value in values.items()
    }


class Maker(typing.Protocol[Whole, Made]):
    """A method or partition for type checkers: called with settings alone it is a recipe."""

    @typing.overload
    def __call__(self, *parts: Whole.args, **settings: Whole.kwargs) -> Made: ...
    @typing.overload
    def __call__(self, **settings: Any) -> "Recipe": ...


@typing.overload
def checked(
    prefix: Literal["algorithm", "partition"],
) -> Callable[[Callable[Whole, Made]], Maker[Whole, Made]]: ...
@typing.overload
def checked(prefix: str = "") -> Callable[[Function], Function]: ...
def checked(prefix: str = "") -> Any:
    """Returns a decorator of functions whose arguments are checked by their annotations, see
    `check_settings`.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **options):
            try:
                bound = _signature(function).bind(*args, **options)
            except TypeError:
                if is_recipe(function, args, options):
                    return Recipe(call, **check_settings(function, options, prefix))
                return function(*args, **options)  # which says it better
            bound.arguments = check_settings(function, bound.arguments, prefix)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


_signature = functools.cache(inspect.signature)


class Recipe(functools.partial):
    """A function with its settings, without the parts that it is called with later: a method
    without task, local and system, or a partition without its pool.
    """

    def __repr__(self) -> str:
        """Shows it as it is written."""
        given = ", ".join(f"{name}={shorten(value)}" for name, value in self.keywords.items())
        return f"{self.func.__name__}({given})"


PARTS = (["task", "local", "system"], ["pool"])  # without which a function is a recipe


def is_recipe(function: Callable, parts: Sequence[Any], settings: Mapping[str, Any]) -> bool:
    """Returns whether a function is called with settings that it takes, and without its parts."""
    parameters = _signature(function).parameters
    first = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if first not in PARTS or parts or set(first) & set(settings):
        return False
    try:
        _signature(function).bind(*first, **settings)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    return True


def pick(choice: Any, **options: Any) -> Any:
    """Returns what a setting names: the option of this name, or the function itself that a
    caller from Python gave.
    """
    return options[choice] if isinstance(choice, str) else choice


def is_number(value: Any) -> bool:
    """Returns whether this is a Python number, and not an input of a compiled program."""
    return isinstance(value, int | float)
