"""What the command line asks for, read and checked before Hydra runs anything: names,
values, several values, directories.
"""

import argparse
import copy
import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedjax_cfl.cli.conf import CONF, resolve_config
from fedjax_cfl.cli.rules import check_name, check_settings, collect_rules
from fedjax_cfl.cli.sweep import (
    SETTINGS,
    Sweep,
    grid_axes,
    holds_sweep,
    list_points,
    run_folders,
)
from fedjax_cfl.errors import InputError, suggest_nearest, suggest_options
from fedjax_cfl.runs.results import METRICS_FILE
from fedjax_cfl.runs.run_dir import check_run_dir, make_dir
from fedjax_cfl.validation import flatten_settings

SEVERAL = ("logger",)  # groups of which several options may be chosen, as logger=[a,b]


class Request(NamedTuple):
    """What a command line asks for, checked."""

    overrides: list[str]  # as Hydra wants them
    sweep: Sweep | None
    config: DictConfig  # with the node `hydra`; of a sweep that of its first run


def precheck(given: argparse.Namespace, verbs: Iterable[str]) -> Request:
    """Returns what the overrides ask for. Raises InputError if any of it is not allowed."""
    asked = [parse_override(text, verbs) for text in given.overrides]
    overrides = list(given.overrides)
    together = _vectorized_names(asked)
    choices = [
        _values(override, given.multirun or override.key_or_group in together) for override in asked
    ]
    for number, override in enumerate(asked):  # what is trained as one program is one run to Hydra
        if override.key_or_group in together:
            overrides[number] = choices[number][0]
        elif override.key_or_group == "vectorize":
            overrides[number] = f"vectorize={_vectorized_values(asked, choices, together)}"
            choices[number] = [overrides[number]]
    with hydra.initialize_config_dir(str(CONF), job_name="main", version_base="1.3"):
        composed, config, axes = _check_choices(choices)
    if given.multirun:
        _suggest_room(asked, choices, config)
        apart = [
            choice[:1] if override.key_or_group in together else choice
            for override, choice in zip(asked, choices, strict=True)
        ]
        return Request(*_place_sweep(overrides, asked, apart, config["resume"]), composed)
    if not given.cfg:
        folder = Path(str(config["run_dir"]))
        for path in run_folders(folder, axes) if axes else [folder]:
            check_run_dir(str(path), config["resume"])
        if axes and (folder / METRICS_FILE).exists():
            raise InputError(f"run_dir={config['run_dir']}: holds one run; choose another")
    return Request(overrides, None, composed)


def _suggest_room(asked: list[Override], choices: list[list[str]], config: dict) -> None:
    """Says how the runs of a sweep over the number of groups share what is compiled, where its
    method can and `max_m` is not given.
    """
    for override, values in zip(asked, choices, strict=True):
        several = override.key_or_group == "algorithm.m" and len(values) > 1
        if several and config["algorithm"].get("max_m", 0) is None:
            most = max(int(value.partition("=")[2]) for value in values)
            print(
                f"each algorithm.m is compiled by itself; algorithm.max_m={most} lets the runs"
                " share what is compiled (see the tutorial on sweeps)"
            )


def _check_choices(choices: list[list[str]]) -> tuple[DictConfig, dict, dict[str, list]]:
    """Checks each value of a sweep in turn, with the first of all others; returns the
    first configuration, its settings as a dict, and the axes of its grid.
    """
    first = [options[0] for options in choices]
    composed, config = compose_checked(first)
    axes = grid_axes(config)
    for number, options in enumerate(choices):
        for other in options[1:]:
            check_overrides([*first[:number], other, *first[number + 1 :]])
    return composed, config, axes


def _place_sweep(
    overrides: list[str], asked: list[Override], choices: list[list[str]], resume: str
) -> tuple[list[str], Sweep]:
    """Makes the directory of a sweep, whose runs are numbered folders in it, and returns
    the overrides with the name that Hydra has for it. The same sweep goes on in it, unless
    `resume` is never.
    """
    folder: Any = time.strftime("multirun/%Y%m%d-%H%M%S")
    for number, override in enumerate(asked):
        if override.key_or_group in ("run_dir", "hydra.sweep.dir"):
            overrides[number] = f"hydra.sweep.dir={override.get_value_string()}"
            folder = override.value()
            break
    else:
        overrides.append(f"hydra.sweep.dir={folder}")
    points, path = list_points(choices), Path(str(folder))
    if resume == "never" or not holds_sweep(path, points):
        check_run_dir(str(folder), "never")
    return overrides, Sweep(make_dir(path), points)


def parse_override(text: str, verbs: Iterable[str] = ()) -> Override:
    """Returns one KEY=VALUE of the command line as Hydra reads it."""
    if "=" not in text and not text.startswith("~"):
        raise InputError(
            f"{text}: neither KEY=VALUE nor one of the verbs"
            f" {', '.join(verbs)}{suggest_nearest(text, verbs)}"
        )
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except (HydraException, ValueError, RecursionError):
        # also numbers of thousands of digits, and thousands of brackets
        override = None
    if override is None or not override.key_or_group:
        raise InputError(
            f"{text[:200]}: cannot be read as KEY=VALUE; a value with other characters than"
            " unaccented letters, digits and any of _-./%+ in it needs quotes, as in"
            """ 'run_dir="a,b"'"""
        )
    return override


def _values(override: Override, multirun: bool) -> list[str]:
    """Returns an override of a sweep once for each of its values, any other as it is."""
    if not override.is_sweep_override():
        return [_text_of(override)]
    if not multirun or override.key_or_group == "run_dir":
        together = (
            f", or vectorize=[{override.key_or_group}]" if override.key_or_group in SETTINGS else ""
        )
        raise InputError(
            f"{override.input_line}: several values"
            f" {'are not allowed here' if multirun else 'need -m, a sweep' + together}"
        )
    name, value = override.get_key_element(), override.value()
    try:
        values = (
            value.filter(_groups().get(name, []))
            if isinstance(value, Glob)
            else list(override.sweep_string_iterator())
        )
    except HydraException:
        values = []
    if not values:
        raise InputError(f"{override.input_line}: names no values that can be listed")
    return [f"{name}={value}" for value in values]


def _vectorized_names(asked: list[Override]) -> list[str]:
    """Returns the settings that `vectorize` names."""
    lists = [override.value() for override in asked if override.key_or_group == "vectorize"]
    return [
        str(name).partition("=")[0] for names in lists if isinstance(names, list) for name in names
    ]


def _vectorized_values(asked: list[Override], choices: list[list[str]], together: list[str]) -> str:
    """Returns the value of `vectorize` with the values of everything it names, as the
    command line gives them.
    """
    values = {
        override.key_or_group: [text.partition("=")[2] for text in options]
        for override, options in zip(asked, choices, strict=True)
    }
    return (
        "["
        + ",".join(
            f"'{name}={','.join(values[name])}'" if name in values else f"'{name}'"
            for name in together
        )
        + "]"
    )


@functools.cache
def _groups() -> dict[str, list[str]]:
    """Returns the options of every group of choices."""
    options = {
        folder.name: sorted(option.stem for option in folder.glob("*.yaml"))
        for folder in CONF.iterdir()
        if folder.is_dir()
    }
    return {name: names for name, names in options.items() if names}


@functools.cache
def _compose(chosen: tuple[str, ...]) -> DictConfig:
    """Returns what Hydra composes of these overrides, its own node included; not to be changed."""
    return hydra.compose("config", ["hydra.mode=RUN", *chosen], return_hydra_config=True)


@functools.cache
def _default(chosen: tuple[str, ...]) -> dict[str, Any]:
    """Returns every setting by its dotted name, as it is when nothing but these options
    of groups is chosen.
    """
    return dict(flatten_settings(resolve_config(_compose(chosen))))


def check_overrides(overrides: list[str]) -> dict[str, Any]:
    """Returns a resolved configuration as a dict. Raises InputError for names that do
    not exist and values that are not allowed.
    """
    return compose_checked(overrides)[1]


def compose_checked(overrides: list[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Returns a configuration, and its settings, resolved, as a dict. Raises InputError for names
    that do not exist and values that are not allowed.
    """
    asked = [parse_override(text) for text in overrides]
    options = _check_options(asked)
    chosen = [each for each in asked if each in options or each.is_hydra_override()]
    try:
        default = _default(tuple(map(_text_of, chosen)))
        known, added = [*default, *_groups()], []
        for override in asked:
            name, removed = override.key_or_group, override.is_delete()
            if override.is_add() or override.is_force_add():
                added.append(override)
            elif override not in chosen:
                check_name(_text_of(override), name, known, removed)
        composed = _set_values(asked, chosen)
        config = resolve_config(composed)
        for override in added:
            if not takes_arguments(config, override.key_or_group):
                check_name(_text_of(override), override.key_or_group, known)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        key = getattr(cause, "full_key", None)
        wrong = next((_text_of(o) for o in asked if o.key_or_group == key), None)
        reason = str(cause).splitlines()[0]
        raise InputError(f"{wrong}: {reason}" if wrong else reason) from None
    names = [override.key_or_group for override in asked]
    check_settings(config, default, collect_rules(config), names)
    return composed, config


def _set_values(asked: list[Override], chosen: list[Override]) -> DictConfig:
    """Returns the configuration of all overrides: what Hydra has composed of those `chosen`, with
    the values of the others. Where one adds or removes a setting, Hydra composes again.
    """
    others = [override for override in asked if override not in chosen]
    if any(override.type != OverrideType.CHANGE or override.package for override in others):
        return _compose(tuple(map(_text_of, asked)))
    config = copy.deepcopy(_compose(tuple(map(_text_of, chosen))))
    for override in others:
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    task = [_text_of(override) for override in asked if not override.is_hydra_override()]
    config.hydra.overrides.task = task
    config.hydra.job.override_dirname = ",".join(sorted(task))
    return config


def takes_arguments(config: dict[str, Any], name: str) -> bool:
    """Returns whether a dotted name lies below a `_target_`, whose arguments can be added."""
    *path, _ = name.split(".")
    for part in path:
        config = config.get(part, {})  # of Hydra's own settings there are none
        if not isinstance(config, dict):
            return False
        if "_target_" in config:
            return True
    return False


def _check_options(asked: list[Override]) -> list[Override]:
    """Returns the overrides that choose an option of a group. Raises InputError for an
    option that does not exist.
    """
    groups = _groups()
    chosen = [override for override in asked if override.key_or_group in groups]
    for override in chosen:
        name, value = override.key_or_group, override.value()
        several = value if name in SEVERAL and isinstance(value, list) else None
        text = _text_of(override).partition("=")[2].strip("'\"")
        for option in [text] if several is None else map(str, several):
            if option not in groups[name]:
                raise InputError(
                    f"{name}={option}: unknown {name}{suggest_options(option, groups[name])}"
                )
    return chosen


def _text_of(override: Override) -> str:
    """Returns an override as it was written."""
    return override.input_line or ""
