"""The names of a command line: settings, options and verbs that exist.

Imports neither JAX nor what needs it, so that a misspelt name is answered at once.
"""

import argparse
import copy
import functools
from collections.abc import Collection, Iterable
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedjax_cfl.cli.conf import CONF, resolve_config
from fedjax_cfl.errors import InputError, suggest_nearest, suggest_options
from fedjax_cfl.formatting import flatten_settings

PACKAGE = "fedjax_cfl."
SEVERAL = ("logger",)  # groups of which several options may be chosen, as logger=[a,b]
# readers of former versions, and what to do instead
CONVERTED = (
    "is read no more; examples/convert/federated.py writes its files as .npz for dataset=npz"
)
REMOVED = {"dataset": {"tff_hdf5": CONVERTED, "federated_sqlite": CONVERTED}}


def check_names(
    given: argparse.Namespace, verbs: Iterable[str]
) -> tuple[list[Override], list[list[str]]]:
    """Returns the overrides of a command line, and each of them once for each of its values. Raises
    InputError for a setting, option or verb that does not exist.
    """
    given.overrides = expand_overrides(given.overrides)
    asked = [parse_override(text, verbs) for text in given.overrides]
    together = vectorized_names(asked)
    choices = [
        list_values(override, given.multirun or override.key_or_group in together)
        for override in asked
    ]
    compose_named([options[0] for options in choices])  # for its errors
    for other in (text for options in choices for text in options[1:]):
        check_options([parse_override(other)])
    return asked, choices


def expand_overrides(overrides: Iterable[str]) -> list[str]:
    """Returns overrides as Hydra reads them: lists of layers one by one, see `split_layers`, and
    settings of a function of the user's own, which `_target_` names, as additions to what the
    option has that they change.
    """
    expanded = split_layers(overrides)
    targets = (text.lstrip("+").partition("._target_=") for text in expanded)
    nodes = {node for node, named, target in targets if named and not target.startswith(PACKAGE)}

    def expand(text: str) -> str:
        node, _, name = text.partition("=")[0].rpartition(".")
        return f"++{text}" if node in nodes and name != "_target_" and text[0] not in "+~" else text

    return [expand(text) for text in expanded]


def split_layers(overrides: Iterable[str]) -> list[str]:
    """Returns overrides in which a list of layers, personal=[scaffold,ditto], is a choice of each,
    whose settings are personal.scaffold.NAME and personal.ditto.NAME.
    """
    split: list[str] = []
    for text in overrides:
        inside = text.removeprefix("personal=").strip("'\" ")
        if not text.startswith("personal=") or not (inside[:1] == "[" and inside[-1:] == "]"):
            split.append(text)
            continue
        names = [name.strip() for name in inside[1:-1].split(",") if name.strip()]
        check_options([parse_override(f"personal={name}") for name in names])
        again = next((name for name in names if names.count(name) > 1), None)
        if again is not None:
            raise InputError(f"{text}: {again} is given twice; use it once")
        split += ["personal=none", *(f"+personal@personal.{name}={name}" for name in names)]
    return split


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


def list_values(override: Override, multirun: bool) -> list[str]:
    """Returns an override of a sweep once for each of its values, any other as it is. Raises
    InputError for values that cannot be listed, or that are named twice.
    """
    if not override.is_sweep_override():
        return [text_of(override)]
    if not multirun or override.key_or_group == "run_dir":
        name = override.key_or_group
        together = f", or vectorize=[{name}]"
        raise InputError(
            f"{override.input_line}: several values"
            f" {'are not allowed here' if multirun else 'need -m, a sweep' + together}"
        )
    name, value = override.get_key_element(), override.value()
    try:
        values = (
            value.filter(list_groups().get(name, []))
            if isinstance(value, Glob)
            else list(override.sweep_string_iterator())
        )
    except HydraException:
        values = []
    if not values:
        raise InputError(f"{override.input_line}: names no values that can be listed")
    read = [parse_override(f"{name}={value}").value() for value in values]
    if any(value in read[:number] for number, value in enumerate(read)):
        raise InputError(f"{override.input_line}: names a value twice")
    return [f"{name}={value}" for value in values]


def vectorized_names(asked: list[Override]) -> list[str]:
    """Returns the settings that `vectorize` names."""
    lists = [override.value() for override in asked if override.key_or_group == "vectorize"]
    return [
        str(name).partition("=")[0] for names in lists if isinstance(names, list) for name in names
    ]


@functools.cache
def list_groups() -> dict[str, list[str]]:
    """Returns the options of every group of choices."""
    options = {
        folder.name: sorted(option.stem for option in folder.glob("*.yaml"))
        for folder in CONF.iterdir()
        if folder.is_dir()
    }
    return {name: names for name, names in options.items() if names}


@functools.cache
def compose_options(chosen: tuple[str, ...]) -> DictConfig:
    """Returns what Hydra composes of these overrides, its own node included; not to be changed."""
    return hydra.compose("config", ["hydra.mode=RUN", *chosen], return_hydra_config=True)


@functools.cache
def default_settings(chosen: tuple[str, ...]) -> dict[str, Any]:
    """Returns every setting by its dotted name, as it is when nothing but these options
    of groups is chosen.
    """
    return dict(flatten_settings(resolve_config(compose_options(chosen))))


def compose_named(
    overrides: list[str],
) -> tuple[DictConfig, dict[str, Any], dict[str, Any], list[str]]:
    """Returns a configuration, its settings, resolved, as a dict, those of the chosen options by
    dotted name, and the names that are given. Raises InputError for names that do not exist.
    """
    asked = [parse_override(text) for text in expand_overrides(overrides)]
    options = check_options(asked)
    chosen = [each for each in asked if each in options or each.is_hydra_override()]
    try:
        default = default_settings(tuple(map(text_of, chosen)))
        known, added = [*default, *list_groups()], []
        for override in asked:
            name, removed = override.key_or_group, override.is_delete()
            if override.is_add() or override.is_force_add():
                added.append(override)
            elif override not in chosen:
                check_name(text_of(override), name, known, removed)
        composed = _set_values(asked, chosen)
        config = resolve_config(composed)
        for override in added:
            if not takes_arguments(config, override.key_or_group):
                check_name(text_of(override), override.key_or_group, known)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        key = getattr(cause, "full_key", None)
        wrong = next((text_of(o) for o in asked if o.key_or_group == key), None)
        reason = str(cause).splitlines()[0]
        raise InputError(f"{wrong}: {reason}" if wrong else reason) from None
    return composed, config, default, [override.key_or_group for override in asked]


def _set_values(asked: list[Override], chosen: list[Override]) -> DictConfig:
    """Returns the configuration of all overrides: what Hydra has composed of those `chosen`, with
    the values of the others. Where one adds or removes a setting, Hydra composes again.
    """
    others = [override for override in asked if override not in chosen]
    if any(override.type != OverrideType.CHANGE or override.package for override in others):
        return copy.deepcopy(compose_options(tuple(map(text_of, asked))))
    config = copy.deepcopy(compose_options(tuple(map(text_of, chosen))))
    for override in others:
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    task = [text_of(override) for override in asked if not override.is_hydra_override()]
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


def check_options(asked: list[Override]) -> list[Override]:
    """Returns the overrides that choose an option of a group. Raises InputError for an
    option that does not exist.
    """
    groups = list_groups()
    chosen = [override for override in asked if override.key_or_group in groups]
    for override in chosen:
        name, value = override.key_or_group, override.value()
        several = value if name in SEVERAL and isinstance(value, list) else None
        text = text_of(override).partition("=")[2].strip("'\"")
        for option in [text] if several is None else map(str, several):
            if option in REMOVED.get(name, ()):
                raise InputError(f"{name}={option}: {REMOVED[name][option]}")
            if option not in groups[name]:
                raise InputError(
                    f"{name}={option}: unknown {name}{suggest_options(option, groups[name])}"
                )
    return chosen


def text_of(override: Override) -> str:
    """Returns an override as it was written."""
    return override.input_line or ""


def check_name(given: str, name: str, known: Collection[str], removed: bool = False) -> None:
    """Raises InputError unless `name` is one of the dotted names `known` or leads to
    one; `given` is the override as it was written.

    Only an argument of a `_target_` can be removed.
    """
    parent, _, last = name.rpartition(".")
    if any(other == name or other.startswith(f"{name}.") for other in known):
        if removed and (
            f"{parent}._target_" not in known or last in ("_target_", "name", "select")
        ):
            raise InputError(f"{given}: {name} is needed; give it a value, as {name}=VALUE")
        return
    if parent in known and not any(other.startswith(f"{parent}.") for other in known):
        raise InputError(f"{given}: {parent}, as it is chosen, has no settings; see --help")
    siblings = {other for other in known if parent and other.startswith(f"{parent}.")}
    namesakes = [other for other in known if not parent and other.endswith(f".{last}")]
    hint = (
        f" (did you mean {min(namesakes, key=len)!r}?)"
        if namesakes
        else suggest_nearest(name, siblings or known)
    )
    if name == "algorithm.m" and "dataset.groups" in known:
        value = given.partition("=")[2]
        hint = f"; it has no groups. dataset.groups={value} is m of every method that has"
    own = sorted(
        {other[len(parent) + 1 :].partition(".")[0] for other in siblings}
        - {"_target_", "_partial_", "name"}
    )
    listed = f"; {parent} has {', '.join(own)}" if own else "; see --help"
    raise InputError(f"{given}: unknown setting{hint}{listed}")
