"""What a method from Python is made of, as names and plain values: a run that goes on must have
the same, and a caller from Python has no settings file that would say so.

A method is functions within functions. Their names, and the values that they have from where they
were made, are what tells two methods apart: step size, epochs, groups, model.
"""

import dataclasses
import functools
import hashlib
import inspect
import types
from typing import Any

import flax.linen as nn
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl.client.execution import Execution

PLAIN = bool | int | float | complex | str | None
WHERE = Execution, Mesh  # say where a run computes, not what


def describe(part: Any, name: str) -> dict[str, Any]:
    """Returns the values that a part of a run is made of, by dotted names that begin with `name`.

    Functions are their names; arrays, and modules of Flax, digests and texts of what they hold.
    What is found twice is listed where it is found first.
    """
    found: dict[str, Any] = {}
    _walk(part, name, {}, found)
    return found


def find_module(part: Any) -> nn.Module | None:
    """Returns the first module of Flax that a part of a run holds, None where it has none."""
    seen: dict[int, Any] = {}
    _walk(part, "", seen, {})
    return next((value for value in seen.values() if isinstance(value, nn.Module)), None)


def _walk(part: Any, path: str, seen: dict[int, Any], found: dict[str, Any]) -> None:
    if isinstance(part, PLAIN):
        found[path] = str(part) if isinstance(part, complex) else part
    elif isinstance(part, WHERE) or id(part) in seen:
        return
    elif isinstance(part, list | set | frozenset) or type(part) is tuple:
        for place, inner in enumerate(part):
            _walk(inner, f"{path}.{place}", seen, found)
    else:
        seen[id(part)] = part  # kept alive meanwhile, so that no other object gets its number
        own, inner = _open(part)
        if own is not None:
            found[path] = own
        for name, value in inner.items():
            _walk(value, f"{path}.{name}", seen, found)


def _open(part: Any) -> tuple[str | None, dict[str, Any]]:
    """Returns what an object is called, and what it holds."""
    if isinstance(part, dict):
        return None, {str(name): value for name, value in part.items()}
    if isinstance(part, nn.Module):
        return " ".join(repr(part).split()), {}
    if hasattr(part, "dtype") and hasattr(part, "shape"):
        array = np.asarray(part)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        return f"{array.dtype}{list(array.shape)} {digest}", {}
    if isinstance(part, tuple):  # with names
        return None, dict(zip(getattr(part, "_fields", ()), part, strict=True))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return None, {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
    if isinstance(part, functools.partial):
        return None, {"func": part.func, "args": part.args, "keywords": part.keywords}
    if isinstance(part, types.MethodType):
        return None, {"func": part.__func__, "self": part.__self__}
    if isinstance(part, types.FunctionType):
        return f"{part.__module__}.{part.__qualname__}", _enclosed(part)
    if hasattr(part, "__wrapped__"):  # by `jit`
        return None, {"wrapped": inspect.unwrap(part)}
    kind = part if isinstance(part, type) else type(part)
    return f"{kind.__module__}.{kind.__qualname__}", {}


def _enclosed(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values that a function has from where it was made."""
    inner = dict(function.__kwdefaults__ or {}) | {"defaults": function.__defaults__ or ()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            inner[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    return inner
