"""The settings of a run that a caller from Python describes by objects instead of a file."""

import dataclasses
import hashlib
import json
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.described import describe, find_module
from fedjax_cfl.runs.identity import digest_data
from fedjax_cfl.runs.settings import CheckpointSettings, RunSettings
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.types import Key
from fedjax_cfl.validation import format_value

__all__ = ["list_given", "make_settings"]
NAMED = ("algorithm", "dataset", "partition", "model")  # parts that a caller may name
ASSIGNMENTS, CHECKPOINT = 10_000, CheckpointSettings(50, 5, 2)  # as in conf/config.yaml


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
    digest = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
    module = find_module(setup.task)
    names = {
        "algorithm": f"method-{digest[:6]}",
        "dataset": f"data-{data[:6]}",
        "model": type(module).__name__ if module else "model",
    } | {name: value for name, value in given.items() if name in NAMED}
    everything: dict[str, Any] = {name: {"name": value} for name, value in names.items()}
    everything["model"]["module"] = describe_module(module)
    everything |= {"given": {name: given[name] for name in given if name not in NAMED}}
    everything |= {"seed": seed, **plan._asdict(), "made_of": parts}
    return RunSettings(
        seed,
        plan,
        None,
        1,
        Faults(),
        ASSIGNMENTS,
        CHECKPOINT,
        "auto",
        data,
        {"algorithm": names["algorithm"], "dataset": names["dataset"]},
        names,
        everything,
    )


def list_given(given: dict[str, Any]) -> list[str]:
    """Returns what a caller says of a run as the command line would write it."""
    return [f"{name}={format_value(value)}" for name, value in given.items() if name not in NAMED]


def find_seed(key: Key) -> int:
    """Returns the seed of a key. Raises InputError for a key that `jax.random.key` does not make of
    a seed.
    """
    try:
        words = np.asarray(jax.random.key_data(key))
        seed = int(words[-1])
        if words.shape == (2,) and not words[0] and seed < 2**31:
            return seed
    except TypeError:
        pass
    raise InputError(
        "key: a run in a directory records the seed that it was drawn by; use jax.random.key(SEED),"
        " with a SEED from 0 to 2147483647"
    )


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
