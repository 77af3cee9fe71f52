"""How public functions look in `help()` and in completion: types and defaults by their names, and
of a module what it offers, not what it imports.

It changes what is shown, and no annotation: the ranges of settings are read from those.
"""

import enum
import functools
import inspect
import types
import typing
from typing import Any

from fedjax_cfl import validation

RULES = {
    next(part for part in alias.__metadata__ if isinstance(part, validation.Rule)): name
    for name, alias in vars(validation).items()
    if typing.get_origin(alias) is typing.Annotated
}


class Shown:
    """A text in the place of an annotation or a default."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def tidy(found: Any) -> Any:
    """Returns a public module, function or type, whose signatures and names are short now."""
    if not isinstance(found, types.ModuleType):
        shorten(found)
    elif names := getattr(found, "__all__", None):
        found.__dict__.setdefault("__dir__", lambda: list(names))
        for name in names:
            value = getattr(found, name, None)
            # modules of Flax have a signature of Flax, and others inherit from them
            if inspect.isfunction(value) or hasattr(value, "_fields"):
                shorten(value)
    return found


def shorten(function: Any) -> None:
    """Gives a function or type of the package a signature to show, if it has none yet."""
    if "__signature__" in vars(function) or isinstance(function, enum.EnumType):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it cannot be called
        return
    shown = [
        parameter.replace(
            annotation=_shorten(parameter.annotation, name_type),
            default=_shorten(parameter.default, name_default),
        )
        for parameter in signature.parameters.values()
    ]
    returned = _shorten(signature.return_annotation, name_type)
    function.__signature__ = signature.replace(parameters=shown, return_annotation=returned)


def _shorten(value: Any, name: typing.Callable[[Any], str]) -> Any:
    return value if value is inspect.Parameter.empty else Shown(name(value))


def name_default(value: Any) -> str:
    """Returns a default in words: functions by their names, tuples of options by their type."""
    if isinstance(value, functools.partial):
        value = value.func
    if inspect.isfunction(value) or isinstance(value, type):
        return "..." if value.__name__ == "<lambda>" else value.__name__
    return f"{type(value).__name__}(...)" if hasattr(value, "_fields") else repr(value)


def name_type(annotation: Any) -> str:
    """Returns an annotation in words: PositiveInt | Array."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if origin is typing.Annotated:
        rule = next((part for part in parts[1:] if part in RULES), None)
        return name_type(parts[0]) if rule is None else RULES[rule]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(name_type, parts))
    if origin is typing.Literal:
        return " | ".join(map(repr, parts))
    if origin is None:
        if isinstance(annotation, str):
            return annotation
        # JAX's own Array has a dotted name
        return getattr(annotation, "__name__", str(annotation)).rpartition(".")[2]
    if getattr(origin, "__name__", "") == "Callable":
        return "Callable"
    inside = ", ".join("..." if part is Ellipsis else name_type(part) for part in parts)
    return f"{getattr(origin, '__name__', origin)}[{inside}]"
