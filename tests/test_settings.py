"""The checks of a configuration: what each setting may be, and what is said when it is not."""

from functools import partial

import jax
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.cli.config_check import check_name, check_settings
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.run_dir import RUN_FILES, check_run_dir
from fedjax_cfl.validation import RULES

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


def refusal(function, *arguments) -> str:
    """Returns the one line that refuses."""
    with pytest.raises(InputError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_says_what_is_allowed_and_refuses_nonsense(name):
    for value in (float("nan"), float("inf"), -1, True, "nonsense", [], ""):
        if name == "run_dir" and value in (-1, "nonsense"):
            continue
        assert not RULES[name].holds(value), value
    assert RULES[name].allowed


def test_a_setting_without_a_rule_keeps_its_kind():
    default = {"a.flag": True, "a.number": 1.5, "a.word": "x", "a.list": [1], "a.free": None}
    check_settings(
        {
            "a": {
                "flag": False,
                "number": 2,
                "word": "y",
                "list": [],
                "free": "anything",
                "new": [3],
            }
        },
        default,
    )
    for name, value, shown in (
        ("flag", "no", "no"),
        ("number", True, "true"),
        ("number", None, "null"),
        ("word", 3, "3"),
        ("list", 3, "3"),
    ):
        assert refusal(check_settings, {"a": {name: value}}, default).startswith(
            f"a.{name}={shown}: must be "
        )


def test_what_was_asked_for_is_blamed_first():
    config = {"rounds": 0, "dataset": {"rounds": "none"}}
    assert refusal(check_settings, config, {"dataset.rounds": 3}).startswith("rounds=0")
    assert refusal(check_settings, config, {"dataset.rounds": 3}, ["dataset.rounds"]).startswith(
        "dataset.rounds=none"
    )


def test_a_missing_value_is_asked_for():
    assert refusal(check_settings, {"path": "???"}, {}) == "path: must be given, as path=VALUE"


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

    def run(local=local, select=select, **options):
        return cfl.run(
            cfl.algorithms.fedavg(linear, local, select),
            linear,
            toy,
            key,
            **{"rounds": 1} | options,
        )

    for options, said in (
        ({"rounds": 0}, "rounds=0: must be a whole number >= 1"),
        ({"eval_every": 0}, "eval_every=0: must be a whole number >= 1"),
        ({"discard": "never"}, "discard=never: must be one of rounds, met, none"),
        ({"local": local._replace(epochs=0)}, "local.epochs=0: must be a whole number from 1 to"),
        (
            {"local": local._replace(batch_size=0)},
            "local.batch_size=0: must be a whole number >= 1",
        ),
        ({"local": local._replace(lr=-1.0)}, "local.lr=-1.0: must be a finite number > 0"),
        (
            {"select": cfl.select.uniform(99)},
            f"clients_per_round=99: must be at most {toy.num_clients}, the number of clients",
        ),
    ):
        assert refusal(partial(run, **options)).startswith(said)
    assert refusal(cfl.select.uniform, 0) == "clients_per_round=0: must be a whole number >= 1"
