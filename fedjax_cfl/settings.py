"""What a configuration may say: the checks that run before anything is loaded or trained."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_cfl.errors import InputError, nearest


class Rule(NamedTuple):
    """What one setting may be."""

    allowed: str
    holds: Callable[[Any], bool]


def _whole(low: int, high: int | None = None, or_none: bool = False) -> Rule:
    text = f"a whole number {'from ' + str(low) + ' to ' + str(high) if high is not None else '>= ' + str(low)}"

    def holds(value):
        if value is None:
            return or_none
        return isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)

    return Rule(text + (" or null" if or_none else ""), holds)


def _number(text: str, inside: Callable[[float], bool]) -> Rule:
    def holds(value):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and inside(value)

    return Rule(text, holds)


def _one_of(*options) -> Rule:
    return Rule("one of " + ", ".join(map(str, options)), lambda value: value in options)


_positive = _number("a finite number > 0", lambda value: value > 0)
_not_negative = _number("a finite number >= 0", lambda value: value >= 0)
_fraction = _number("a number between 0 and 1", lambda value: 0 <= value <= 1)
_trim = _number("a number from 0 to 0.5 (the median)", lambda value: 0 <= value <= 0.5)
_flag = Rule("true or false", lambda value: isinstance(value, bool))
_text = Rule("text", lambda value: isinstance(value, str) and bool(value))
_any_number = _number("a finite number", lambda value: True)
_below_one = _number("a number from 0 to below 1", lambda value: 0 <= value < 1)
_list = Rule("a list, as [1,2]", lambda value: isinstance(value, list))
_anything = Rule("anything", lambda value: True)

RULES = {
    "seed": _whole(0, 2**31 - 1),
    "seeds": _whole(1),
    "rounds": _whole(1),
    "clients_per_round": _whole(1),
    "eval_every": _whole(1),
    "devices": _whole(1, or_none=True),
    "precision": _one_of("float32", "tensorfloat32", "bfloat16"),
    "coordinator": Rule("null, auto or HOST:PORT", lambda value: value in (None, "auto") or re.fullmatch(r"\S+:\d{1,5}", str(value))),
    "processes": _whole(1, or_none=True),
    "process": _whole(0, or_none=True),
    "run_dir": Rule("the name of a directory", lambda value: type(value) in (str, int) and bool(str(value).strip())),
    "resume": _one_of("auto", "must", "never"),
    "checkpoint.every": _whole(1),
    "checkpoint.minutes": _positive,
    "checkpoint.keep": _whole(1),
    "faults.dropout": _fraction,
    "faults.straggler": _fraction,
    "faults.nan": _fraction,
    "faults.byzantine": _fraction,
    "faults.scale": _not_negative,
    "resident": _one_of("device", "host"),
    "discard": _one_of("rounds", "met", "none"),
    "test_on": _one_of("group", "received"),
    "local.lr": _positive,
    "local.epochs": _whole(1, 100_000),
    "local.batch_size": _whole(1),
    "local.momentum": _below_one,
    "local.width": Rule("auto or a whole number >= 1", lambda value: value == "auto" or _whole(1).holds(value)),
    "local.first_layer": _one_of("auto", "direct", "dual"),
    "model.l2": _not_negative,
    "preset.l2": Rule("null or a finite number >= 0", lambda value: value is None or _not_negative.holds(value)),
    "algorithm.m": _whole(1),
    "algorithm.alpha": _whole(1),
    "algorithm.eta_g": _not_negative,
    "algorithm.mu": _not_negative,
    "algorithm.q": _not_negative,
    "algorithm.server_lr": _positive,
    "algorithm.momentum": _below_one,
    "algorithm.b1": _below_one,
    "algorithm.b2": _below_one,
    "algorithm.tau": _positive,
    "algorithm.drop_percent": _fraction,
    "algorithm.share": _fraction,
    "algorithm.restarts": _whole(1),
    "algorithm.spare": _below_one,
    "algorithm.restart_rounds": _whole(1),
    "algorithm.temperature_max": _number("a finite number > 1", lambda value: value > 1),
    "algorithm.epsilon": Rule("null or a finite number > 0", lambda value: value is None or _positive.holds(value)),
    "algorithm.beta": _trim,
    "algorithm.theta": _trim,
    "algorithm.erm_epochs": _whole(1, 100_000, or_none=True),
    "algorithm.iterations": _whole(1),
    "algorithm.eps1": _not_negative,
    "algorithm.eps2": _not_negative,
    "algorithm.gamma_max": _fraction,
    "algorithm.min_size": _whole(1),
    "algorithm.warm_up": _whole(0),
    "algorithm.threshold": Rule("null or a finite number > 0", lambda value: value is None or _positive.holds(value)),
    "dataset.source.num_classes": _whole(1, or_none=True),
    "dataset.source.users": _whole(1, or_none=True),
    "dataset.source.match_total": _whole(1, or_none=True),
    "dataset.source.alpha": _not_negative,
    "dataset.source.beta": _not_negative,
    "partition.clients": _whole(1),
    "partition.alpha": _positive,
    "partition.test_fraction": _below_one,
    "partition.classes_per_client": _whole(1),
    "partition.shards_per_client": _whole(1),
    "partition.samples_per_client": _whole(1),
    "partition.seed_samples": _whole(1),
    "partition.min_samples": _whole(0),
    "partition.sigma": _positive,
    "concept.groups": _whole(1),
}


def leaves(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every leaf of a nested dict."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check_name(given: str, name: str, known: Collection[str], removed: bool = False) -> None:
    """Raises InputError unless `name` is one of the dotted names `known` or leads to one; `given` is the override as it was written.

    Only an argument of a `_target_` can be removed.
    """
    parent, _, last = name.rpartition(".")
    if any(other == name or other.startswith(f"{name}.") for other in known):
        if removed and (f"{parent}._target_" not in known or last in ("_target_", "name", "select")):
            raise InputError(f"{given}: {name} is needed; give it a value, as {name}=VALUE")
        return
    siblings = {other for other in known if parent and other.startswith(f"{parent}.")}
    namesakes = [other for other in known if not parent and other.endswith(f".{last}")]
    hint = f" (did you mean {min(namesakes, key=len)!r}?)" if namesakes else nearest(name, siblings or known)
    own = sorted({other[len(parent) + 1 :].partition(".")[0] for other in siblings} - {"_target_", "_partial_", "name"})
    listed = f"; {parent} has {', '.join(own)}" if own else "; see --help"
    raise InputError(f"{given}: unknown setting{hint}{listed}")


def check(config: dict, default: dict[str, Any], asked: Collection[str] = ()) -> None:
    """Raises InputError for the first setting of a resolved configuration that is not allowed, beginning with those `asked` for.

    `default` holds the value of every dotted name before it was changed: a setting without a rule of its own keeps its kind.
    """
    check_shape(config, default)
    for name, value in sorted(leaves(config), key=lambda leaf: leaf[0] not in asked):
        if value == "???":
            raise InputError(f"{name}: must be given, as {name}=VALUE")
        allow(name, value, RULES.get(name) or _like(default.get(name)))


def allow(name: str, value: Any, rule: Rule | None = None) -> None:
    """Raises InputError for a value that a setting may not have, by default by its rule in RULES."""
    rule = rule or RULES[name]
    if not rule.holds(value):
        raise InputError(f"{name}={_written(value)}: must be {rule.allowed}")


def check_shape(config: dict, default: dict[str, Any]) -> None:
    """Raises InputError where a single value has taken the place of a group of settings, or the other way round."""
    for name in default:
        path, value = "", config
        for part in name.split("."):
            if not isinstance(value, dict):
                raise InputError(f"{path}={_written(value)}: is a group of settings; change one of them, as {path}.{part}=VALUE")
            if part not in value:
                break  # removed by the user
            path, value = f"{path}.{part}".lstrip("."), value[part]
        if path == name and isinstance(value, dict):
            raise InputError(f"{name}={value}: must be a single value")


def _like(default: Any) -> Rule:
    kinds = {bool: _flag, int: _any_number, float: _any_number, str: _text, list: _list}
    return kinds.get(type(default), _anything)


def _written(value: Any) -> str:
    """Returns a value as the command line writes it."""
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)


def check_sizes(config: dict, num_clients: int, test_samples: int) -> None:
    """Raises InputError for settings that do not fit the clients and test samples the data turned out to have."""
    if not test_samples:
        raise InputError("partition: no client holds a test sample, so that nothing can be scored; raise partition.test_fraction")
    for name, value in (("clients_per_round", config["clients_per_round"]), ("algorithm.m", config["algorithm"].get("m", 1))):
        if value > num_clients:
            raise InputError(f"{name}={value}: must be at most {num_clients}, the number of clients")


RUN_FILES = {".hydra", ".lock", "metrics.jsonl", "checkpoints"}  # what an unfinished run has in its directory


def check_run_dir(run_dir: str, resume: str) -> Path:
    """Returns the path of a run directory. Raises InputError if it holds something that `resume` (auto | must | never) does not allow."""
    path = Path(run_dir)
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"run_dir={run_dir}: already exists and is not a directory; choose another")
        names = {inside.name for inside in path.iterdir()} - {".lock"} if path.exists() else set()
    except OSError as error:
        raise InputError(f"run_dir={run_dir}: cannot be used: {error.strerror}") from None
    if resume == "must" and "checkpoints" not in names:
        raise InputError(f"resume=must: {run_dir} has no checkpoint to resume from")
    if names and (resume == "never" or not ("checkpoints" in names or names <= RUN_FILES)):
        raise InputError(f"run_dir={run_dir}: already exists and is not empty; choose another")
    return path


def make_dir(path: Path) -> Path:
    """Makes a run directory and returns its path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run_dir={path}: cannot be made: {error.strerror}") from None
    return path


def unknown(name: str, options: Iterable[str]) -> str:
    """Returns the rest of a message about an unknown name: the nearest option, or all of them."""
    options = sorted(options)
    return nearest(name, options) or f"; allowed: {', '.join(options)}"
