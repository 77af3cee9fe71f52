"""The settings of a run that a caller from Python describes by objects instead of a file.

A run that goes on must have the same method, and a method is functions within functions. Their
names, and the values that they have from where they were made, are what tells two methods apart:
step size, epochs, groups, model. Of the caller's own functions and classes the code counts as well,
for two of one name may do different things.
"""

import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl.client.execution import Execution
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import format_value
from fedjax_cfl.keys import find_seed
from fedjax_cfl.runs.settings import RunSettings, digest_data
from fedjax_cfl.simulation.rounds import Plan, Setup
from fedjax_cfl.types import Key

NAMED = ("algorithm", "dataset", "partition", "model")  # parts that a caller may name
PLAIN = bool | int | float | complex | str | None
WHERE = Execution, Mesh  # say where a run computes, not what
OURS = "fedjax_cfl", "jax", "jaxlib", "builtins"  # what their objects hold is found elsewhere
PACKAGES = "-packages"  # in the path of what is installed


def make_settings(setup: Setup, plan: Plan, key: Key, given: dict[str, Any]) -> RunSettings:
    """Returns the settings of a run. Raises InputError for a `key` that is not that of a seed, and
    for `given` names and values that no file can hold.

    An algorithm or data set without a name gets one of what it is made of, so that tables do not
    put different ones together.
    """
    seed, data = find_seed(key), digest_data(setup.data)
    for name, value in given.items():
        texts = [value] if name in NAMED else [name, format_value(value)]
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise InputError(
                f"settings[{name!r}]={value!r}: names and values of one line are allowed"
            )
    parts = describe({"task": setup.task, "algorithm": setup.algorithm}, "made_of")
    parts |= describe(setup.drift, "made_of.drift")
    if setup.scaling is not None:
        parts |= describe(setup.scaling, "made_of.scaling")
    digest = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
    module = find_module(setup.task)
    names = {
        "algorithm": f"method-{digest[:6]}",
        "dataset": f"data-{data[:6]}",
        "model": type(module).__name__ if module else "model",
    } | {name: value for name, value in given.items() if name in NAMED}
    everything: dict[str, Any] = {name: {"name": value} for name, value in names.items()}
    everything["model"]["module"] = describe_module(module)
    if settings := setup.task.targets.settings:
        everything["task"] = dict(settings)
    everything |= {"given": {name: given[name] for name in given if name not in NAMED}}
    everything |= {"seed": seed, **plan._asdict(), "made_of": parts}
    return RunSettings(seed, plan, data, names, everything)


def list_given(given: dict[str, Any]) -> list[str]:
    """Returns what a caller says of a run as the command line would write it."""
    return [f"{name}={format_value(value)}" for name, value in given.items() if name not in NAMED]


def describe_module(module: nn.Module | None) -> dict[str, Any]:
    """Returns a module as settings name it; `load_run` builds those of the package from it, but for
    their number of classes.
    """
    if module is None:
        return {"_target_": "unknown"}
    kind = type(module)
    fields = [one.name for one in dataclasses.fields(module) if one.name not in ("parent", "name")]
    values = {name: getattr(module, name) for name in fields if name != "num_classes"}
    plain = json.loads(json.dumps(values, default=str))
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **plain}


# what a method is made of


def describe(part: Any, name: str) -> dict[str, Any]:
    """Returns the values that a part of a run is made of, by dotted names that begin with `name`.

    Functions are their names; arrays, and modules of Flax, digests and texts of what they hold.
    What is found twice is listed where it is found first.
    """
    return dict(_walk(part, name, {}))


def find_module(part: Any) -> nn.Module | None:
    """Returns the first module of Flax that a part of a run holds, None where it has none."""
    seen: dict[int, Any] = {}
    dict(_walk(part, "", seen))
    return next((value for value in seen.values() if isinstance(value, nn.Module)), None)


def _walk(part: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each value, with its dotted name; `seen` gets every object on the way."""
    if isinstance(part, PLAIN):
        yield path, str(part) if isinstance(part, complex) else part
    elif isinstance(part, list | set | frozenset) or type(part) is tuple:
        for place, inner in enumerate(part):
            yield from _walk(inner, f"{path}.{place}", seen)
    elif not isinstance(part, WHERE) and id(part) not in seen:
        seen[id(part)] = part  # kept alive meanwhile, so that no other object gets its number
        own, held = _open(part)
        if own is not None:
            yield path, own
        for name, inner in held.items():
            yield from _walk(inner, f"{path}.{name}", seen)


def _open(part: Any) -> tuple[str | None, dict[str, Any]]:
    """Returns what an object is called, and what it holds."""
    if isinstance(part, dict):
        return None, {str(name): value for name, value in part.items()}
    if isinstance(part, nn.Module):
        return " ".join(repr(part).split()), _list_methods(type(part))
    if hasattr(part, "dtype") and hasattr(part, "shape"):
        is_key = isinstance(part, jax.Array) and jnp.issubdtype(part.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(part) if is_key else part)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        return f"{array.dtype}{list(array.shape)} {digest}", {}
    if isinstance(part, tuple):  # with names
        return None, dict(zip(getattr(part, "_fields", ()), part, strict=True))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        values = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
        return None, values | _list_methods(type(part))
    if isinstance(part, functools.partial):
        return None, {"func": part.func, "args": part.args, "keywords": part.keywords}
    if isinstance(part, types.MethodType):
        return None, {"func": part.__func__, "self": part.__self__}
    if isinstance(part, types.FunctionType):
        name = f"{part.__module__}.{part.__qualname__}"
        if not _is_own(part):
            return name, _enclosed(part)
        code = [*_read_code(part.__code__)]
        digest = hashlib.sha256(repr(code).encode(errors="backslashreplace")).hexdigest()[:8]
        return f"{name} {digest}", _enclosed(part) | _list_globals(part)
    if hasattr(part, "__wrapped__"):  # by `jit`
        return None, {"wrapped": inspect.unwrap(part)}
    kind: Any = part if isinstance(part, type) else type(part)
    state = {} if kind is part else getattr(part, "__dict__", {})
    inner = state | _list_methods(kind) if kind.__module__.partition(".")[0] not in OURS else {}
    return f"{kind.__module__}.{kind.__qualname__}", inner


def _is_own(part: Any) -> bool:
    """Returns whether a function or class is the caller's, and of no package."""
    home = str(part.__module__)
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return home.partition(".")[0] not in {*OURS, *sys.stdlib_module_names} and PACKAGES not in file


def _list_methods(kind: type) -> dict[str, Any]:
    """Returns by name the methods of a class that are the caller's own, its own and inherited."""
    found: dict[str, Any] = {}
    for each in filter(_is_own, reversed(kind.__mro__)):
        found |= {
            name: inspect.unwrap(value) for name, value in vars(each).items() if callable(value)
        }
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, types.FunctionType) and (name == "__call__" or name[:2] != "__")
    }


def _read_code(code: types.CodeType) -> Iterator[Any]:
    """Yields what a function's code does, in an order that does not change, without its lines."""
    yield from (code.co_code, code.co_names, code.co_freevars)
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _read_code(value)
        else:
            yield sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _list_globals(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values of its module that a function reads, but for modules."""
    codes, names = [function.__code__], set()
    for code in codes:
        names |= {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
        codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]
    known = {name: function.__globals__[name] for name in names & {*function.__globals__}}
    return {n: known[n] for n in sorted(known) if not isinstance(known[n], types.ModuleType)}


def _enclosed(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values that a function has from where it was made."""
    inner = dict(function.__kwdefaults__ or {}) | {"defaults": function.__defaults__ or ()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet filled
            inner[name] = cell.cell_contents
    return inner
