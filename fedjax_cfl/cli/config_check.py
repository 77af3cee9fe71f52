"""Checks of a composed configuration, before anything is loaded or trained."""

from collections.abc import Collection
from typing import Any

from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.validation import (
    ANYTHING,
    FLAG,
    LIST,
    TEXT,
    FiniteFloat,
    Rule,
    check_value,
    flatten_settings,
    format_value,
    rule_of,
)

KEPT_KINDS = {
    bool: FLAG,
    int: rule_of(FiniteFloat),
    float: rule_of(FiniteFloat),
    str: TEXT,
    list: LIST,
}


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


def check_settings(
    config: dict, default: dict[str, Any], rules: dict[str, Rule], asked: Collection[str] = ()
) -> None:
    """Raises InputError for the first setting of a resolved configuration that is not
    allowed, beginning with those `asked` for.

    `rules` and `default` go by dotted name; `default` has the values without overrides. A setting
    without a rule must keep the type of its default.
    """
    check_nesting(config, default)
    for name, value in sorted(flatten_settings(config), key=lambda leaf: leaf[0] not in asked):
        if value == "???":
            raise InputError(f"{name}: must be given, as {name}=VALUE")
        check_value(
            name, value, rules.get(name) or KEPT_KINDS.get(type(default.get(name))) or ANYTHING
        )


def check_nesting(config: dict, default: dict[str, Any]) -> None:
    """Raises InputError where a single value has taken the place of a group of
    settings, or the other way round.
    """
    for name in default:
        path, value = "", config
        for part in name.split("."):
            if not isinstance(value, dict):
                raise InputError(
                    f"{path}={format_value(value)}: is a group of settings; change one of them, as"
                    f" {path}.{part}=VALUE"
                )
            if part not in value:
                break  # removed by the user
            path, value = f"{path}.{part}".lstrip("."), value[part]
        if path == name and isinstance(value, dict):
            raise InputError(f"{name}={value}: must be a single value")


def check_sizes(config: dict, num_clients: int, test_samples: int) -> None:
    """Raises InputError for settings that do not fit the clients and test samples the
    data turned out to have.
    """
    if not test_samples:
        raise InputError(
            "partition: no client holds a test sample, so that nothing can be scored; raise"
            " partition.test_fraction or, where a file has a split, mark samples with 1"
        )
    for name, value in (
        ("clients_per_round", config["clients_per_round"]),
        ("algorithm.m", config["algorithm"].get("m", 1)),
    ):
        if value > num_clients:
            raise InputError(
                f"{name}={value}: must be at most {num_clients}, the number of clients"
            )
