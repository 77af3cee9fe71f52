"""The checks of a configuration: what each setting may be, and what is said when it is not."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import hydra
import jax
import numpy as np
import pytest
from conftest import refusal
from omegaconf import OmegaConf

import fedjax_cfl as cfl
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import (
    OWN_WORDS,
    check_settings,
    collect_settings,
    find_targets,
    resolve_settings,
)
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import flatten_settings
from fedjax_cfl.runs.run_dir import RUN_FILES, check_run_dir
from fedjax_cfl.validation import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check,
    check_value,
    checked,
    join_kinds,
    read_kinds,
    read_settings,
)

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
OPTIONS = [
    (group, path.stem)
    for group in GROUPS
    if group not in ("preset", "experiment", "hydra")
    for path in sorted((CONF / group).glob("*.yaml"))
]


@pytest.fixture(scope="module")
def settings():
    """Returns what the settings of every option in conf/ may be."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        found = collect_settings(OmegaConf.to_container(hydra.compose("config"), resolve=True))
    for group, option in OPTIONS:
        node = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
        if group != "logger":  # of packages that need not be there
            found |= collect_settings({group: node})
    return found


def holds(kinds, value):
    """Returns whether a setting allows a value."""
    try:
        check("x", value, kinds)
    except InputError:
        return False
    return True


def test_every_setting_says_what_is_allowed_and_refuses_nonsense(settings):
    assert len(settings) > 250
    for name, kinds in settings.items():
        if not (said := join_kinds(kinds)).plain:
            continue  # a function, or an object
        said = join_kinds([kind for kind in kinds if kind.plain]).words
        for value in (float("nan"), float("inf"), -1, True, "nonsense", [], ""):
            listed = said.startswith(("a list", "null or a list")) and "or more" not in said
            free = {
                "run_dir": (-1, "nonsense"),
                "algorithm.prior_mean": (-1,),
                "algorithm.tau": (-1,),  # a cosine, of StoCFL
            }.get(name, ("nonsense", -1, "") if "text" in said or "column" in said else ())
            free = (*free, -1) if said.endswith(("a whole number", "a finite number")) else free
            flag = value is True and "true or false" in said
            if not (flag or (value == [] and listed) or (value is not True and value in free)):
                assert not holds(kinds, value), (name, value)
        assert said


@pytest.mark.parametrize(
    "name",
    [
        *("rounds", "seed", "devices", "resume", "checkpoint.every", "discard", "model.l2"),
        *("local.lr", "local.momentum", "local.width", "faults.nan", "faults.scale"),
        *("algorithm.m", "preset.select_single.clients_per_round", "algorithm.measure"),
        *("dataset.source.num_classes", "dataset.source.users", "dataset.source.alpha"),
        *("partition.clients", "partition.sigma", "partition.test_fraction", "concept.groups"),
        *("drift.p", "algorithm.detector", "algorithm.split_rounds"),
    ],
)
def test_ranges_come_from_what_takes_the_value(name, settings):
    assert name in settings


def read_option(group, option):
    """Returns the settings of a file of conf/, those of the files it is based on included."""
    node = OmegaConf.load(CONF / group / f"{option}.yaml")
    bases = [str(base) for base in node.pop("defaults", []) if isinstance(base, str)]
    given = [read_option(group, base) for base in bases if (group, base) in OPTIONS]
    return {k: v for each in [*given, OmegaConf.to_container(node)] for k, v in each.items()}


# numbers of a paper, where Python has none, or all
DIFFER = {"classes": "femnist", "users": "sent140"}
DIFFER |= {"test_samples": ("rotated_groups", "source_groups")}


def freeze(value):
    """Returns a value with tuples for its lists."""
    return tuple(map(freeze, value)) if isinstance(value, list) else value


@pytest.mark.parametrize(("group", "option"), [each for each in OPTIONS if each[0] != "logger"])
def test_a_file_has_the_settings_of_its_function(group, option):
    """The same names; where a function's own file gives a value, the default; every name that a
    setting can have stands in the comment on it.
    """
    lines = (CONF / group / f"{option}.yaml").read_text().splitlines()
    text = {line.split(":")[0].strip(): line.partition("#")[2] for line in lines if "#" in line}
    for _, node, function in find_targets(read_option(group, option)):
        parameters = inspect.signature(function).parameters
        open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        given = {name: node[name] for name in node if name not in (*OWN_WORDS, "module", "l2")}
        assert open_ended or set(given) <= set(parameters), set(given) - set(parameters)
        if function.__name__ != option:
            continue
        for name, value in given.items():
            default = parameters[name].default
            free = str(value).startswith(("${", "???")) or option in DIFFER.get(name, ())
            if not free and default is not inspect.Parameter.empty:
                near = pytest.approx(default, rel=1e-5) if isinstance(default, float) else default
                assert freeze(value) == near, name
        for name, kinds in read_settings(function).items():
            if name in text and (options := join_kinds(kinds).options):
                words = f"{text[name]} {given.get(name)} none"  # ablations have files of their own
                assert not [each for each in options if str(each) not in words], name


def test_a_preset_names_what_differs_and_nothing_else():
    clean = OmegaConf.to_container(OmegaConf.load(CONF / "preset" / "clean.yaml"))
    for option in ("paper", "ref", "plain", "fedscale"):
        own = OmegaConf.to_container(OmegaConf.load(CONF / "preset" / f"{option}.yaml"))
        own = own.get("preset", own)
        assert set(own) <= {*clean, "defaults"}
        assert {name for name in own if name in clean and own[name] == clean[name]} == set()


# values


@checked("algorithm")
def method(
    m: PositiveInt,
    epsilon: PositiveFloat | jax.Array | None,
    mix: Literal["a", "b"] | Callable[[int], int] = "a",
    rounds: tuple[PositiveInt, ...] = (1,),
    with_l2: bool = False,
    free: Any = None,
):
    """Returns what it is called with."""
    return m, epsilon, mix, rounds, with_l2, free


def test_a_function_gets_the_values_that_its_annotations_describe():
    assert method(1, None) == (1, None, "a", (1,), False, None)
    got = method(np.int32(3), np.float32(0.5), abs, [2, 3], free=print)
    assert got == (3, 0.5, abs, (2, 3), False, print) and type(got[0]) is int
    traced = jax.jit(lambda epsilon: method(2, epsilon)[1])(-1.0)  # its value is not known
    assert traced == -1
    assert method.__name__ == "method" and method.__doc__.startswith("Returns")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'epsilon'"):
        method(1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"m": 0}, "algorithm.m=0: must be a whole number >= 1"),
        ({"m": np.int32(0)}, "algorithm.m=0: must be a whole number >= 1"),
        ({"m": True}, "algorithm.m=true: must be a whole number >= 1"),
        ({"m": "3"}, "algorithm.m=3: must be a whole number >= 1"),
        ({"m": 2**31}, "algorithm.m=2147483648: must be a whole number >= 1 (at most 2147483647,"),
        ({"epsilon": 0.0}, "algorithm.epsilon=0.0: must be null or a finite number > 0"),
        ({"epsilon": "x"}, "algorithm.epsilon=x: must be null or a finite number > 0"),
        ({"mix": "bb"}, "algorithm.mix=bb: must be one of a, b (did you mean 'b'?)"),
        ({"mix": None}, "algorithm.mix=null: must be one of a, b"),
        ({"rounds": 3}, "algorithm.rounds=3: must be a list, each item a whole number >= 1"),
        ({"rounds": [0]}, "algorithm.rounds=[0]: must be a list, each item a whole number >= 1"),
        ({"with_l2": "yes"}, "algorithm.with_l2=yes: must be true or false"),
        ({"with_l2": 1}, "algorithm.with_l2=1: must be true or false"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(given, said):
    assert refusal(method, **({"m": 1, "epsilon": None} | given)).startswith(said)


def test_help_shows_an_annotation_by_its_name():
    assert str(inspect.signature(method)).startswith(
        "(m: PositiveInt, epsilon: Union[PositiveFloat"
    )


def test_what_only_a_type_checker_can_resolve_is_not_checked():
    def method(m, q): ...

    method.__annotations__ = {"m": "NoSuchName", "q": PositiveInt}
    assert set(read_settings(method)) == {"q"}


@pytest.mark.parametrize("value, said", [(1e39, "infinite"), (-1e300, "infinite"), (1e-50, "0")])
def test_numbers_that_float32_loses_are_refused(value, said):
    """Runs compute in float32, where 1e39 is infinite: such a run reported an accuracy."""
    line = refusal(check_value, "algorithm.eta_g", value, NonNegativeFloat)
    assert line.startswith(f"algorithm.eta_g={value}: must be a finite number >= 0 (in float32")
    assert line.endswith(f"this one is {said})")
    check_value("x", 3e38, NonNegativeFloat)
    check_value("x", 0, NonNegativeFloat)


def test_every_setting_of_every_option_is_checked(settings):
    """By what takes it, or by `OWN`; values of presets are checked where they go."""
    for group, option in OPTIONS:
        if group == "logger":
            continue
        for name, value in flatten_settings({group: read_option(group, option)}):
            free = name.rpartition(".")[2] in (*OWN_WORDS, "swap_labels")
            assert free or name in settings or str(value).startswith("${"), (name, option)


OWN_METHOD = """
from typing import Literal

import fedjax_cfl as cfl
from fedjax_cfl.validation import Fraction, PositiveInt


def mine(
    task, local, system, *, m: PositiveInt, gain: Fraction = 0.1, keep: Literal["a", "bb"] = "a"
):
    return cfl.algorithms.ifca(task, local, system, m=m)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Returns what names a method of a package of the user's own, in the current folder."""
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").touch()
    (tmp_path / "stranger" / "methods.py").write_text(OWN_METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield ["algorithm=fedavg", "algorithm._target_=stranger.methods.mine"]
    for name in ("stranger", "stranger.methods"):
        sys.modules.pop(name, None)


def test_a_method_of_another_package_has_its_settings_checked_and_completed(own):
    for given in ("algorithm.m=3", "+algorithm.m=3"):
        config = resolve_settings([*own, given, "algorithm.keep=bb"])
        node = config["algorithm"]
        assert (node["m"], node["gain"], node["keep"]) == (3, 0.1, "bb")
        assert node["name"] == "mine" and config["run_dir"].startswith("runs/mine-digits-")
    for given, said in (
        ("algorithm.gain=0", "algorithm.m: must be given, as algorithm.m=VALUE"),
        ("algorithm.m=0", "algorithm.m=0: must be a whole number >= 1"),
        ("algorithm.m=3 algorithm.gain=2", "algorithm.gain=2: must be a number between 0 and"),
        ("algorithm.m=3 algorithm.keep=b", "algorithm.keep=b: must be one of a, bb (did you"),
        ("algorithm.m=3 algorithm.gian=0", "algorithm.gian=0: unknown setting (did you mean"),
    ):
        assert refusal(resolve_settings, [*own, *given.split()]).startswith(said)


def test_what_was_asked_for_is_blamed_first():
    config = {"rounds": 0, "dataset": {"rounds": "none"}}
    rules = dict.fromkeys(("rounds", "dataset.rounds"), read_kinds(PositiveInt))
    assert refusal(check_settings, config, rules).startswith("rounds=0")
    assert refusal(check_settings, config, rules, ["dataset.rounds"]).startswith(
        "dataset.rounds=none"
    )


RESUME = ("auto", "must", "never")


def filled(path, *names):
    """Makes a directory with files and, of names that end in /, folders."""
    for name in names:
        (
            (path / name).mkdir(parents=True, exist_ok=True)
            if name.endswith("/")
            else (path / name).write_text("")
        )
    return str(path)


@pytest.mark.parametrize("resume", RESUME)
def test_run_directories_that_are_none(tmp_path, resume):
    (tmp_path / "file").write_text("")
    assert "not a directory" in refusal(check_run_dir, str(tmp_path / "file"), resume)
    assert "cannot be used" in refusal(check_run_dir, str(tmp_path / ("x" * 300)), resume)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_run_directory_is_missing_or_empty(tmp_path, resume):
    check_run_dir(str(tmp_path / "new"), resume)
    check_run_dir(str(tmp_path), resume)
    check_run_dir(filled(tmp_path, ".lock"), resume)
    assert "not empty" in refusal(check_run_dir, filled(tmp_path, "precious"), resume)


@pytest.mark.parametrize("name", sorted(RUN_FILES - {".lock", "checkpoints"}))
def test_files_of_a_run_that_saved_nothing_yet_only_allow_auto(tmp_path, name):
    check_run_dir(filled(tmp_path, name), "auto")
    assert "not empty" in refusal(check_run_dir, str(tmp_path), "never")
    assert "no checkpoint" in refusal(check_run_dir, str(tmp_path), "must")
    assert "not empty" in refusal(check_run_dir, filled(tmp_path, "precious"), "auto")


def test_checkpoints_allow_auto_and_must(tmp_path):
    for names in (
        ["checkpoints/"],
        ["metrics.jsonl", ".hydra/"],
        ["summary.json", "clients.parquet", "curves.png"],
    ):
        filled(tmp_path, *names)
        for resume in ("auto", "must"):
            check_run_dir(str(tmp_path), resume)
        assert "not empty" in refusal(check_run_dir, str(tmp_path), "never")


@pytest.mark.parametrize("missing", ["new", ""])
def test_must_needs_checkpoints(tmp_path, missing):
    assert refusal(check_run_dir, str(tmp_path / missing), "must").startswith("resume=must: ")


def test_python_is_answered_as_the_command_line(toy, linear, local):
    select, key = cfl.select.uniform(5), jax.random.key(0)

    def run(local=local, changes=None, select=select, **options):
        return cfl.run(
            cfl.algorithms.fedavg(linear, local.replace(**changes or {}), select),
            linear,
            toy,
            key,
            **{"rounds": 1} | options,
        )

    for options, said in (
        ({"rounds": 0}, "rounds=0: must be a whole number >= 1"),
        ({"eval_every": 0}, "eval_every=0: must be a whole number >= 1"),
        ({"discard": "never"}, "discard=never: must be one of rounds, met, none"),
        ({"changes": {"epochs": 0}}, "local.epochs=0: must be a whole number from 1 to"),
        (
            {"changes": {"batch_size": 0}},
            "local.batch_size=0: must be a whole number >= 1",
        ),
        ({"changes": {"lr": -1.0}}, "local.lr=-1.0: must be a finite number > 0"),
        (
            {"select": cfl.select.uniform(99)},
            f"clients_per_round=99: must be at most {toy.num_clients}, the number of clients",
        ),
    ):
        assert refusal(partial(run, **options)).startswith(said)
    assert refusal(cfl.select.uniform, 0) == "clients_per_round=0: must be a whole number >= 1"
