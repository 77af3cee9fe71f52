"""The checks of a configuration: what each setting may be, and what is said when it is not."""

from functools import partial
from typing import Literal

import hydra
import jax
import numpy as np
import pytest
from conftest import refusal
from omegaconf import OmegaConf

import fedjax_cfl as cfl
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.names import check_name
from fedjax_cfl.cli.rules import check_settings, collect_rules
from fedjax_cfl.runs.run_dir import RUN_FILES, check_run_dir
from fedjax_cfl.validation import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_arguments,
    check_value,
    parameter_rules,
    rule_of,
)

KNOWN = [
    "rounds",
    "local.lr",
    "local.epochs",
    "dataset.lr",
    "algorithm._target_",
    "algorithm.m",
    "algorithm.measure",
    "algorithm.name",
]


@pytest.fixture(scope="module")
def rules():
    """Returns the rules of every option in conf/."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        found = collect_rules(OmegaConf.to_container(hydra.compose("config"), resolve=True))
    for group in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
        for path in (CONF / group).glob("*.yaml"):
            found |= collect_rules({group: OmegaConf.to_container(OmegaConf.load(path))})
    return found


def test_every_rule_says_what_is_allowed_and_refuses_nonsense(rules):
    for name, rule in rules.items():
        for value in (float("nan"), float("inf"), -1, True, "nonsense", [], ""):
            allowed = {
                "run_dir": (-1, "nonsense"),
                "algorithm.prior_mean": (-1,),
                "algorithm.tau": (-1,),  # a cosine, of StoCFL
                "model.module.hidden": ([],),  # no hidden layer
                "algorithm.split_rounds": ([],),  # no split
            }
            named = "text" in rule.allowed or "column" in rule.allowed
            free = ("nonsense", -1, []) if named else ()  # a column's number, no column
            if value is True or value not in allowed.get(name, free):
                assert not rule.holds(value), (name, value)
        assert rule.allowed


@pytest.mark.parametrize(
    "name",
    [
        *("rounds", "seed", "devices", "resume", "checkpoint.every", "discard", "model.l2"),
        *("local.lr", "local.momentum", "local.width", "faults.nan", "faults.scale"),
        *(
            "algorithm.m",
            "algorithm.select.clients_per_round",
            "preset.select_single.clients_per_round",
        ),
        *("dataset.source.num_classes", "dataset.source.users", "dataset.source.alpha"),
        *("partition.clients", "partition.sigma", "partition.test_fraction", "concept.groups"),
        "drift.p",
    ],
)
def test_ranges_come_from_what_takes_the_value(name, rules):
    assert name in rules


def test_a_range_stands_in_the_annotation_of_a_parameter():
    def method(m: PositiveInt, epsilon: PositiveFloat | None, mix: Literal["a", "b"], free, mu=0.0):
        check_arguments(method, locals(), "algorithm")

    method(1, None, "a", "anything", mu="anything")
    method(np.int32(3), np.float32(0.5), "b", None)
    jax.jit(lambda epsilon: method(2, epsilon, "a", None))(-1.0)  # traced values are not known
    for values, said in (
        ((0, None, "a", 1), "algorithm.m=0: must be a whole number >= 1"),
        ((np.int32(0), None, "a", 1), "algorithm.m=0: must be a whole number >= 1"),
        ((1, 0.0, "a", 1), "algorithm.epsilon=0.0: must be null or a finite number > 0"),
        ((1, 1, "c", 1), "algorithm.mix=c: must be one of a, b"),
    ):
        assert refusal(method, *values) == said


def test_what_only_a_type_checker_can_resolve_has_no_rule():
    def method(m, q): ...

    method.__annotations__ = {"m": "NoSuchName", "q": PositiveInt}
    assert set(parameter_rules(method)) == {"q"}


@pytest.mark.parametrize("value, said", [(1e39, "infinite"), (-1e300, "infinite"), (1e-50, "0")])
def test_numbers_that_float32_loses_are_refused(value, said):
    """Runs compute in float32, where 1e39 is infinite: such a run reported an accuracy."""
    line = refusal(check_value, "algorithm.eta_g", value, rule_of(NonNegativeFloat))
    assert line.startswith(f"algorithm.eta_g={value}: must be a finite number >= 0 (in float32")
    assert line.endswith(f"this one is {said})")
    check_value("x", 3e38, rule_of(NonNegativeFloat))
    check_value("x", 0, rule_of(NonNegativeFloat))


def test_a_setting_without_a_rule_keeps_its_kind():
    default = {"a.flag": True, "a.number": 1.5, "a.word": "x", "a.list": [1], "a.free": None}
    kept = {"flag": False, "number": 2, "word": "y", "list": [], "free": "anything", "new": [3]}
    check_settings({"a": kept}, default, {})
    for name, value, shown in (
        ("flag", "no", "no"),
        ("number", True, "true"),
        ("number", None, "null"),
        ("word", 3, "3"),
        ("list", 3, "3"),
    ):
        assert refusal(check_settings, {"a": {name: value}}, default, {}).startswith(
            f"a.{name}={shown}: must be "
        )


def test_what_was_asked_for_is_blamed_first():
    config = {"rounds": 0, "dataset": {"rounds": "none"}}
    rules, default = {"rounds": rule_of(PositiveInt)}, {"dataset.rounds": 3}
    assert refusal(check_settings, config, default, rules).startswith("rounds=0")
    assert refusal(check_settings, config, default, rules, ["dataset.rounds"]).startswith(
        "dataset.rounds=none"
    )


def test_a_missing_value_is_asked_for():
    assert refusal(check_settings, {"path": "???"}, {}, {}) == "path: must be given, as path=VALUE"


@pytest.mark.parametrize(
    "name, hint",
    [
        ("lr", "'local.lr'"),
        ("round", "'rounds'"),
        ("local.epoch", "'local.epochs'"),
        ("algorithm.xq", "algorithm has m, measure"),
        ("q.w", "--help"),
    ],
)
def test_an_unknown_name_leads_to_the_nearest(name, hint):
    assert hint in refusal(check_name, f"{name}=1", name, KNOWN)


def test_a_node_may_be_given_whole_and_only_arguments_removed():
    check_name("local={}", "local", KNOWN)
    check_name("~algorithm.m", "algorithm.m", KNOWN, True)
    for name in ("rounds", "local.lr", "local", "algorithm._target_", "algorithm.name"):
        assert "is needed" in refusal(check_name, f"~{name}", name, KNOWN, True)


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
    assert check_run_dir(str(tmp_path / "new"), resume) == tmp_path / "new"
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
