"""The names of a command line: settings, options and verbs that exist.

Imports neither JAX nor what needs it, so that a misspelt name is answered at once.
"""

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedjax_cfl.cli.conf import CONF, PACKAGE, resolve_config
from fedjax_cfl.errors import InputError, suggest_nearest, suggest_options
from fedjax_cfl.formatting import flatten_settings

SEVERAL = ("logger",)  # groups of which several options may be chosen, as logger=[a,b]
# readers of former versions, and what to do instead
REMOVED = {
    name: "is read no more; examples/convert/federated.py writes its files as .npz for dataset=npz"
    for name in ("dataset=tff_hdf5", "dataset=federated_sqlite")
}
# options of `dataset` that read one file of the user's own, and whether they name its columns
FILES = {"csv": True, "jsonl": True, "parquet": True, "npz": False, "npy": False}


class Line(NamedTuple):
    """The settings of a command line, all of whose names exist."""

    asked: list[Override]
    # of each its values, as KEY=VALUE; what is trained as one program is one value to Hydra
    choices: list[list[str]]
    overrides: list[str]  # the same, as Hydra wants them
    composed: DictConfig  # by the first value of each, with the node `hydra`
    # the same, resolved, and with each other value of a setting in turn
    configs: list[dict[str, Any]]


def read_line(texts: Iterable[str], multirun: bool, verbs: Iterable[str]) -> Line:
    """Reads the settings of a command line; `multirun`: each may have several values. Raises
    InputError for a setting, option or verb that does not exist.
    """
    asked = [parse_override(text, verbs) for text in expand_overrides(texts)]
    lists = [each.value() for each in asked if each.key_or_group == "vectorize"]
    together = [
        str(name).partition("=")[0] for names in lists if isinstance(names, list) for name in names
    ]
    for name in set(together) & set(list_groups()):
        raise InputError(f"vectorize=[{name}]: names options, which are swept by -m {name}=A,B")
    choices = [list_values(each, multirun or each.key_or_group in together) for each in asked]
    values = {
        each.key_or_group: "=" + ",".join(text.partition("=")[2] for text in options)
        for each, options in zip(asked, choices, strict=True)
    }
    named = ",".join(f"'{name}{values.get(name, '')}'" for name in together)
    choices = [
        [f"vectorize=[{named}]"] if together and each.key_or_group == "vectorize" else options
        for each, options in zip(asked, choices, strict=True)
    ]
    first = [options[0] for options in choices]
    composed, config = compose(first)
    configs, overrides = [config], list(map(text_of, asked))
    for number, options in enumerate(choices):
        configs += [
            compose([*first[:number], other, *first[number + 1 :]])[1] for other in options[1:]
        ]
        if asked[number].key_or_group in (*together, "vectorize"):
            choices[number] = options[:1]
            overrides[number] = options[0]
    return Line(asked, choices, overrides, composed, configs)


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
    check_options([parse_override(f"personal={name}") for name in names])
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


def list_values(override: Override, multirun: bool) -> list[str]:
    """Returns an override of a sweep once for each of its values, any other as it is. Raises
    InputError for values that cannot be listed, or that are named twice.
    """
    if not override.is_sweep_override():
        return [text_of(override)]
    if not multirun or override.key_or_group == "run_dir":
        name = override.key_or_group
        together = "" if name in list_groups() else f", or vectorize=[{name}]"
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


@functools.cache
def list_groups() -> dict[str, list[str]]:
    """Returns the options of every group of choices."""
    files = sorted(CONF.glob("*/*.yaml"))
    by_group = itertools.groupby(files, lambda file: file.parent.name)
    return {group: [file.stem for file in options] for group, options in by_group}


def compose(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Returns what Hydra composes of these overrides, its own node included, and the settings of
    the run, resolved, as a dict. Raises InputError for names that do not exist.
    """
    asked = [parse_override(text) for text in overrides]
    check_options(asked)
    try:
        composed = hydra.compose("config", ["hydra.mode=RUN", *overrides], return_hydra_config=True)
        for override in asked:
            name, removed = override.key_or_group, override.is_delete()
            changed = removed or override.is_add() or override.is_force_add()
            if changed and not takes_arguments(composed, name, removed):
                check_name(text_of(override), name, list_known(asked), removed)
        return composed, resolve_config(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, asked) from None


def explain(error: Exception, asked: list[Override]) -> InputError:
    """Returns in one line why Hydra cannot compose what is asked for."""
    cause = error.__cause__ or error
    named = re.search(r"'([^']*)'", str(error))
    names = named[1] if named else "", getattr(cause, "full_key", None) or ""
    wrong = next((text_of(each) for each in asked if each.key_or_group in names), None)
    if wrong and str(error).startswith(("Could not override", "Could not delete")):
        for name in names:
            check_name(wrong, name, list_known(asked))
    reason = str(cause).splitlines()[0]
    return InputError(f"{wrong}: {reason}" if wrong else reason)


def list_known(asked: list[Override]) -> list[str]:
    """Returns the dotted names of all settings that the chosen options have, and the groups."""
    chosen = [text_of(each) for each in asked if each.key_or_group in list_groups()]
    config = resolve_config(hydra.compose("config", chosen))
    return [*(name for name, _ in flatten_settings(config)), *list_groups()]


def takes_arguments(config: DictConfig, name: str, removed: bool) -> bool:
    """Returns whether a dotted name lies below a `_target_`, whose arguments can be added, and
    `removed`, but for those that say what it is.
    """
    parent, _, last = name.rpartition(".")
    if removed and last in ("_target_", "name", "select"):
        return False
    path = parent.split(".")
    nodes = (OmegaConf.select(config, ".".join(path[: end + 1])) for end in range(len(path)))
    return any(isinstance(node, DictConfig) and "_target_" in node for node in nodes if parent)


def check_options(asked: list[Override]) -> None:
    """Raises InputError for an option that its group does not have."""
    groups = list_groups()
    for override in (each for each in asked if each.key_or_group in groups):
        group, value = override.key_or_group, override.value()
        text = text_of(override).partition("=")[2].strip("'\"")
        several = text.split("+") if group == "personal" else [text]
        if group in SEVERAL and isinstance(value, list):
            several = map(str, value)
        for option in several:
            if f"{group}={option}" in REMOVED:
                raise InputError(f"{group}={option}: {REMOVED[f'{group}={option}']}")
            if option not in groups[group]:
                hint = suggest_reader(option) if group == "dataset" else ""
                hint = hint or suggest_options(option, groups[group])
                raise InputError(f"{group}={option}: unknown {group}{hint}")


def text_of(override: Override) -> str:
    """Returns an override as it was written."""
    return override.input_line or ""


def suggest_reader(path: str, sure: bool = False) -> str:
    """Returns the rest of a message about a file that is given where none is read: what reads it.
    `sure`: it is a file, also where its name does not say which.
    """
    kind = next((end[1:] for end in Path(path).suffixes if end[1:] in FILES), None)
    if kind is None:
        kinds = ", ".join(FILES)
        return f"; your own file: dataset=KIND dataset.source.path={path}, {kinds}" * sure
    column = " dataset.source.y=COLUMN" * FILES[kind]
    return f"; your own file: dataset={kind} dataset.source.path={path}{column}"


def check_name(given: str, name: str, known: Collection[str], removed: bool = False) -> None:
    """Raises InputError unless `name` is one of the dotted names `known` or leads to
    one; `given` is the override as it was written, which has `removed` it.
    """
    if any(other == name or other.startswith(f"{name}.") for other in known):
        if removed:
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
