"""The names of a command line: settings, options and verbs that exist.

Hydra composes the options that are chosen; settings are then set one by one, by Hydra's own
function, so that a name that does not exist is compared with those that do. Imports neither JAX nor
what needs it, so that a misspelt name is answered at once.
"""

import argparse
import copy
import functools
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedjax_cfl.cli.conf import CONF, PACKAGE, resolve_config
from fedjax_cfl.errors import InputError, parse_arguments, suggest_nearest, suggest_options
from fedjax_cfl.formatting import flatten_settings

BOUNDS = ("centralised", "known_groups", "nonfed")  # of algorithm: methods are compared with them
# options of `dataset` that read one file of the user's own, and whether they name its columns
FILES = {"csv": True, "jsonl": True, "parquet": True, "npz": False, "npy": False}


class Line(NamedTuple):
    """The settings of a command line, all of whose names exist."""

    asked: list[Override]
    choices: list[list[str]]  # of each its values, as KEY=VALUE
    composed: DictConfig  # by the first value of each, with the node `hydra`
    # the same, resolved, and with each other value of a setting in turn
    configs: list[dict[str, Any]]


def read_line(texts: Iterable[str], multirun: bool, verbs: Iterable[str]) -> Line:
    """Reads the settings of a command line; `multirun`: each may have several values. Raises
    InputError for a setting, option or verb that does not exist.
    """
    asked = spell_grid([parse_override(text, verbs) for text in expand_overrides(texts)])
    choices = [list_values(each, multirun) for each in asked]
    first = [options[0] for options in choices]
    lines = [first]
    for number, options in enumerate(choices):
        lines += [[*first[:number], other, *first[number + 1 :]] for other in options[1:]]
    filled = [compose(line) for line in lines]
    return Line(asked, choices, filled[0][0], [config for _, config in filled])


# what is typed, as overrides of Hydra


def expand_overrides(texts: Iterable[str]) -> list[str]:
    """Returns overrides as Hydra reads them: lists of layers as options of their own, see
    `store_layers`, and settings of a function of the user's own, which `_target_` names, as
    additions to what the option has that they change.
    """
    texts = list(texts)
    targets = (text.lstrip("+").partition("._target_=") for text in texts)
    nodes = {node for node, named, target in targets if named and not target.startswith(PACKAGE)}

    def expand(text: str) -> str:
        node, _, name = text.partition("=")[0].rpartition(".")
        if text.startswith("personal="):
            plain = re.sub(r"['\" ]", "", text)
            return re.sub(r"\[(.*?)\]|\w+\+[\w+]+", lambda names: store_layers(text, names), plain)
        return f"++{text}" if node in nodes and name != "_target_" and text[0] not in "+~" else text

    return [expand(text) for text in texts]


def store_layers(text: str, listed: re.Match) -> str:
    """Lets several layers, as of personal=[scaffold,ditto], be an option of the group, and returns
    its name, scaffold+ditto; their settings are personal.scaffold.NAME and personal.ditto.NAME.
    """
    names = re.findall(r"[^][,+]+", listed[0])
    check_option(parse_override(f"personal={'+'.join(names) or 'none'}"))
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise InputError(f"{text}: {again} is given twice; use it once")
    option, layers = "+".join(names) or "none", [f"{name}@{name}" for name in names]
    if names:
        ConfigStore.instance().store(option, {"defaults": layers}, group="personal")
    return option


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


def text_of(override: Override) -> str:
    """Returns an override as it was written."""
    return override.input_line or ""


def spell_grid(asked: list[Override]) -> list[Override]:
    """Moves the values of the settings that `vectorize` names into it, for Hydra sees one run:
    vectorize=[seed] seed=0,1 becomes vectorize=['seed=0,1'] seed=0.
    """
    lists = [each.value() for each in asked if each.key_or_group == "vectorize"]
    grid = {str(name): str(name) for names in lists if isinstance(names, list) for name in names}
    for name in grid.keys() & list_groups().keys():
        raise InputError(f"vectorize=[{name}]: names options, which are swept by -m {name}=A,B")
    first = {}
    for override in asked:
        if (name := override.key_or_group) in grid:
            values = list_values(override, several=True)
            first[name] = values[0]
            grid[name] = f"{name}={','.join(text.partition('=')[2] for text in values)}"
    if grid:
        first["vectorize"] = f"vectorize={list(grid.values())}"
    return [parse_override(first.get(each.key_or_group, text_of(each))) for each in asked]


def list_values(override: Override, several: bool) -> list[str]:
    """Returns an override of a sweep once for each of its values, any other as it is. Raises
    InputError unless it may have `several`, and for values that cannot be listed, or that are
    named twice.
    """
    given, name = text_of(override), override.key_or_group
    if not override.is_sweep_override():
        return [given]
    if not several:
        together = "" if name in list_groups() else f", or vectorize=[{name}]"
        raise InputError(f"{given}: several values need -m, a sweep{together}")
    if name == "run_dir":
        raise InputError(f"{given}: several values are not allowed here")
    try:
        texts, values = [*override.sweep_string_iterator()], [*override.sweep_iterator()]
    except HydraException:
        raise InputError(f"{given}: names no values that can be listed") from None
    if any(value in values[:number] for number, value in enumerate(values)):
        raise InputError(f"{given}: names a value twice")
    return [f"{override.get_key_element()}={text}" for text in texts]


# options


@functools.cache
def list_groups() -> dict[str, list[str]]:
    """Returns the options of every group of choices."""
    files = sorted(CONF.glob("*/*.yaml"))
    by_group = itertools.groupby(files, lambda file: file.parent.name)
    return {group: [file.stem for file in options] for group, options in by_group}


def check_option(override: Override) -> None:
    """Raises InputError for an option that its group does not have."""
    group, value = override.key_or_group, override.value()
    options = list_groups().get(group, [])
    text = text_of(override).partition("=")[2].strip("'\"")
    several = text.split("+") if group == "personal" else [text]
    if group == "logger" and isinstance(value, list):  # logger=[tensorboard,wandb]
        several = map(str, value)
    for option in several if options else ():
        if option not in options:
            reader = group == "dataset" and suggest_reader(option)
            hint = reader or suggest_options(option, options)
            raise InputError(f"{group}={option}: unknown {group}{hint}")


def find_reader(path: str) -> str | None:
    """Returns the option of `dataset` that reads files of a name like this, None: none."""
    return next((end[1:] for end in Path(path.lower()).suffixes if end[1:] in FILES), None)


def suggest_reader(path: str, sure: bool = False) -> str:
    """Returns the rest of a message about a file that is given where none is read: what reads it.
    `sure`: it is a file, also where its name does not say which.
    """
    kind = find_reader(path)
    if kind is None:
        return (
            f"; your own file: dataset=KIND dataset.source.path={path}, {', '.join(FILES)}" * sure
        )
    column = " dataset.source.y=COLUMN" * FILES[kind]
    return f"; your own file: dataset={kind} dataset.source.path={path}{column}"


# composition


@functools.cache  # values of a sweep share it
def compose_options(chosen: tuple[str, ...]) -> DictConfig:
    """Returns what Hydra composes of the options chosen, its own node included."""
    return hydra.compose("config", ["hydra.mode=RUN", *chosen], return_hydra_config=True)


def compose(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Returns the configuration of these overrides, Hydra's own node included, and the settings of
    the run, resolved, as a dict. Raises InputError for names that do not exist.
    """
    asked = [parse_override(text) for text in overrides]
    options = [
        each
        for each in asked
        if (each.key_or_group in list_groups() or "/" in each.key_or_group)
        and not isinstance(each.value(), dict)
    ]
    for each in options:
        check_option(each)
    try:
        config = copy.deepcopy(compose_options(tuple(map(text_of, options))))
        # functions first, which take further arguments
        for each in sorted(asked, key=lambda each: not each.key_or_group.endswith("._target_")):
            if each not in options:
                set_value(config, each)
        config.hydra.overrides.task = list(overrides)
        return config, resolve_config(config)
    # OmegaConf looks into a mapping that is null, as in hydra.sweeper.params={a:1}
    except (HydraException, OmegaConfBaseException, AttributeError) as error:
        cause = error.__cause__ or error
        about = {getattr(cause, "full_key", None), *re.findall(r"[\w./]+", str(error))}
        wrong = next((text_of(each) for each in asked if each.key_or_group in about), "conf")
        reason, *_ = str(cause).split("\n", 1)
        raise InputError(f"{wrong}: {reason}") from None


def compose_run(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
    """Returns the configuration of one run of a sweep, as `load_sweep_config` of Hydra's loader
    does, which reads all files again: that takes seven times as long, twice a run.
    """
    config, hydra = compose(sweep_overrides)[0], copy.deepcopy(master_config.hydra)
    hydra.mode, hydra.overrides.task = None, sweep_overrides
    hydra.runtime.choices = config.hydra.runtime.choices
    spelt = hydra.job.config.override_dirname
    hydra.job.override_dirname = get_overrides_dirname(
        [parse_override(text) for text in sweep_overrides],
        kv_sep=spelt.kv_sep,
        item_sep=spelt.item_sep,
        exclude_keys=spelt.exclude_keys,
    )
    config.hydra = hydra
    OmegaConf.copy_cache(from_config=master_config, to_config=config)  # the same time of day
    return config


def set_value(config: DictConfig, override: Override) -> None:
    """Sets, adds or removes one setting of a configuration, as Hydra does. Raises InputError for a
    name that does not exist: only functions take arguments that their node does not have.
    """
    name, settings = override.key_or_group, list_known(config)
    targets = [each for each in (*settings, name) if each.endswith("._target_")]
    takes = any(name.startswith(each.removesuffix("_target_")) for each in targets)
    needed = override.is_delete() and name.endswith(("._target_", ".name", ".select"))
    adds = override.is_delete() or override.is_add() or override.is_force_add()
    if adds and (needed or not takes):
        check_name(override, settings)
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except HydraException:
        check_name(override, settings)
        raise


def list_known(config: DictConfig) -> list[str]:
    """Returns the dotted names of all settings of a configuration, and the groups."""
    settings: Any = OmegaConf.to_container(config, resolve=False)
    return [*(name for name, _ in flatten_settings(settings)), *list_groups()]


def check_name(override: Override, known: Sequence[str]) -> None:
    """Raises InputError unless what is set is one of the dotted names `known`, or leads to one, and
    is not removed.
    """
    given, name = text_of(override), override.key_or_group
    known = [each for each in known if each.startswith("hydra.") == name.startswith("hydra.")]
    if any(other == name or other.startswith(f"{name}.") for other in known):
        if override.is_delete():
            raise InputError(f"{given}: {name} is needed; give it a value, as {name}=VALUE")
        return
    parent, _, last = name.rpartition(".")
    value = given.partition("=")[2]
    if parent in known and not any(other.startswith(f"{parent}.") for other in known):
        raise InputError(f"{given}: {parent}, as it is chosen, has no settings; see --help")
    near = [other for other in known if not other.endswith(("._target_", "._partial_"))]
    names, listed = set(), ""
    while parent and not names:  # of what does exist above it
        below = [other for other in near if other.startswith(f"{parent}.")]
        names = {other[len(parent) + 1 :].partition(".")[0] for other in below} - {"name"}
        near, listed = below or near, f"; {parent} has {', '.join(sorted(names))}"
        parent = parent.rpartition(".")[0]
    namesakes = sorted((other for other in near if other.endswith(f".{last}")), key=len)
    meant = f" (did you mean {namesakes[0]!r}?)" if namesakes else suggest_nearest(name, near)
    if name == "algorithm.m" and "dataset.groups" in known:
        meant = f"; it has no groups. dataset.groups={value} is m of every method that has"
    is_file = last in ("path", "file") and name.startswith("data")
    if "dataset.source.path" not in known and (reader := suggest_reader(value, is_file)):
        raise InputError(f"{given}: unknown setting{reader}")
    raise InputError(f"{given}: unknown setting{meant}{listed if names else '; see --help'}")


def describe_option(group: str, name: str) -> str:
    """Returns the first sentence of an option's file, which says what it is."""
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line[1:].strip() for line in comments if "@package" not in line)
    return re.split(r"(?<! al)\. ", text)[0].rstrip(".")


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl list [CHOICE ...]`."""
    described = "What can be chosen, as algorithm=ifca: names, or what each option of some is."
    parser = argparse.ArgumentParser(prog="fedjax-cfl list", description=described)
    parser.add_argument("choices", nargs="*", metavar="CHOICE", help="as algorithm, or dataset")
    asked, groups = parse_arguments(parser, argv).choices, list_groups()
    for group in asked or groups:
        if group not in groups:
            raise InputError(f"{group}: unknown choice{suggest_options(group, groups)}")
        names = sorted(groups[group], key=BOUNDS.__contains__)
        lines = [f"{name}: {describe_option(group, name)}" for name in names if asked]
        for line in lines or [f"{group}: {', '.join(names)}"]:
            if line.startswith(BOUNDS[0]):
                print("bounds, which methods are compared with:")
            print(textwrap.fill(line, 79, subsequent_indent="  "))
    return 0
