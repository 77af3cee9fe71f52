"""Builds what a run is made of from its settings: samples, who holds which, their scale, the task
and the method, each by a function that needs no other. What of them a user may not expect is
logged.
"""

import contextlib
import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from hydra.utils import instantiate
from jax.sharding import Mesh

from fedjax_cfl import distributed
from fedjax_cfl.cli.conf import COMMAND, PACKAGE
from fedjax_cfl.cli.settings import collect_settings, find_targets, resolve_settings, resolve_target
from fedjax_cfl.client import Local, make_execution
from fedjax_cfl.client.sgd import list_loops
from fedjax_cfl.data.dealing import set_apart_validation
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.federated import federate, take_clients
from fedjax_cfl.data.scaling import Scaling, describe_scales, standardize
from fedjax_cfl.errors import InputError, is_new
from fedjax_cfl.formatting import flatten_settings
from fedjax_cfl.method import Method
from fedjax_cfl.models import as_task
from fedjax_cfl.runs.labels import list_own_functions
from fedjax_cfl.sharding import is_cpu, make_mesh, use_cpu_cores
from fedjax_cfl.simulation import width
from fedjax_cfl.simulation.callback import Callback
from fedjax_cfl.simulation.compiler import check_jax_settings
from fedjax_cfl.simulation.personalize import check_rule, hold_out_clients, refuse_mixture
from fedjax_cfl.simulation.program import Inputs, Store, check_data, check_without_classes
from fedjax_cfl.simulation.rounds import Setup
from fedjax_cfl.system import Faults, System
from fedjax_cfl.system.clock import CohortSizes
from fedjax_cfl.tasks import CLASSIFICATION, count_outputs, kind_of
from fedjax_cfl.types import Algorithm, FederatedData, Partition, Pool, Selection, Task
from fedjax_cfl.validation import ARRAY

log = logging.getLogger(__name__)
INPUT = re.compile(r"local\.lr|(algorithm|drift)\.\w+")  # what `find_inputs` looks at
# what says where a run goes, how long or which samples it has: programs get both as arguments
NOT_COMPILED = ("assignments", "callbacks", "checkpoint.", "concept.", "curves", "dataset.")
NOT_COMPILED += ("discard", "eval_every", "evaluate.", "logger", "offline", "partition.", "resume")
NOT_COMPILED += ("rounds", "run_dir", "seed", "shared_samples.")
NEWCOMERS = ("new_clients", "validation_clients")  # shares of clients that are held out
# readers that take numbers to regress for y
FILES = "csv", "huggingface", "jsonl", "leaf", "npy", "npz", "parquet"


def assemble(overrides: list[str]) -> tuple[dict, Task, FederatedData, Local]:
    """Returns (settings as a dict, task, data, local) of the run that these overrides
    describe, without running it.
    """
    config = resolve_settings(overrides)
    setup, local = build(config)
    return config, setup.task, setup.data, local


def build(config: dict[str, Any], may_shrink: bool = True) -> tuple[Setup, Local]:
    """Returns what a resolved configuration describes, and how its clients train. Raises InputError
    for data or sizes that do not fit. `may_shrink`: see `shrink_cohort`.
    """
    mesh = open_devices(config)
    drift = instantiate_target("drift", config["drift"])
    check_extras(config, drift)
    pool = load_pool(config)
    holdings = split_pool(config, pool)
    data, scaling = scale_data(config, pool, holdings)
    if may_shrink:
        shrink_cohort(config, data.num_clients)
    check_sizes(config, data.num_clients, int(np.asarray(data.test.size).sum()))
    task = build_task(config, pool, data.x.shape[1:])
    if config["resident"] != "host":
        # before a batch is cut to the most that a client can have
        data = bound_client_samples(data, drift)
    algorithm, local = build_method(config, task, data, drift, mesh)
    return Setup(algorithm, task, data, drift, mesh, scaling), local


# the parts


def load_pool(config: dict[str, Any]) -> Pool:
    """Returns all samples. Raises InputError where y are not what the task is about."""
    source = config["dataset"]["source"]
    asked = instantiate_target("task", config["task"]) or CLASSIFICATION
    ours = source["_target_"].startswith(PACKAGE)
    if config["task"] and ours and "num_classes" in source:  # a file of the user's own
        if source["num_classes"]:
            raise InputError(
                f"dataset.source.num_classes={source['num_classes']}: task={asked.name} has no"
                " classes; use null, or task=classification"
            )
        source = source | {"num_classes": 0}
    pool = instantiate_target("dataset.source", source)
    if asked.name != (there := kind_of(pool)).name:
        raise InputError(
            f"task={asked.name}: needs {asked.needs}, and y of"
            f" dataset={config['dataset']['name']} are {there.describe(pool)}; use"
            f" task={there.name}, or a file of your own, dataset={', '.join(FILES)}"
        )
    return pool


def split_pool(config: dict[str, Any], pool: Pool) -> Partition:
    """Returns which client holds which sample of the pool, and for what. Raises InputError where
    rows are to be scored on samples that are not set apart.
    """
    share, part = (config["evaluate"][name] for name in ("validation", "part"))
    if part == "validation" and not share:
        raise InputError(
            "evaluate.part=validation: no samples are set apart; use evaluate.validation=0.2"
        )
    holdings = instantiate_target("partition", config["partition"], pool)
    if not share:
        return holdings
    chooses = bool(asks_validation(config))
    keep = "both" if chooses and part == "test" else part
    holdings = set_apart_validation(holdings, share, config["seed"], keep)
    if chooses and part == "validation":
        holdings = holdings._replace(validation=holdings.test)
    return holdings


def scale_data(
    config: dict[str, Any], pool: Pool, holdings: Partition
) -> tuple[FederatedData, Scaling | None]:
    """Returns the data of the clients that take part, and the scale of their features; notes what
    a user may not expect of them.
    """
    evaluate, by = config["evaluate"], config["dataset"]["standardize"]
    if not evaluate["validation"]:
        note(describe_unused(config, pool, holdings))
    data = federate_samples(config, pool, holdings)
    if evaluate["part"] == "validation":
        note(f"scored on {int(data.test.size.sum()):,} validation samples; no test sample is read")
    if any(evaluate[name] for name in NEWCOMERS):
        data = take_clients(data, hold_out(config, data)[0])
    note(describe_scales(data, by))
    return standardize(data, by)


def build_task(config: dict[str, Any], pool: Pool, shape: tuple[int, ...]) -> Task:
    """Returns the model as a task on the samples of a pool, of the `shape` that clients see."""
    model, l2 = config["model"], config["preset"]["l2"]
    targets = instantiate_target("task", config["task"])
    module = instantiate_target("model.module", model["module"], num_classes=count_outputs(pool))
    if size := getattr(module, "vocabulary", None):
        check_ids(config, pool, size)
    try:
        weight = model.get("l2", 0.0) if l2 is None else l2
        return as_task(module, shape, pool.num_classes, weight, targets)
    except InputError as error:
        raise InputError(f"model={model['name']}: {error}") from None


def build_method(
    config: dict[str, Any], task: Task, data: FederatedData, drift: Drift, mesh: Mesh
) -> tuple[Algorithm, Local]:
    """Returns the method, and how its clients train on the devices of `mesh`. Raises InputError
    where task, data, drift and the method do not go together.
    """
    local = build_local(config, task, data, mesh)
    make = functools.partial(build_algorithm, config, task, data, local)
    algorithm, key = make(), jax.random.key(config["seed"])
    check_data(algorithm, task, drift, data)
    check_without_classes(algorithm, drift, data)
    if epochs := config["evaluate"]["finetune"]:
        state = jax.eval_shape(algorithm.init, key, data)
        refuse_mixture(f"evaluate.finetune={epochs}", jax.eval_shape(algorithm.serve, state))
    if newcomers := name_newcomers(config):
        check_rule(make, data, key, config["clients_per_round"], f"evaluate.{newcomers}")
    return algorithm, local


# devices


def open_devices(config: dict[str, Any]) -> Mesh:
    """Connects the processes of a run, and returns the devices that it uses. Raises InputError for
    settings that they do not have.
    """
    check_jax_settings()
    distributed.connect(config["coordinator"], config["processes"], config["process"])
    use_run_devices()
    # by default accelerators round inputs to TF32 or bfloat16
    jax.config.update("jax_default_matmul_precision", config["precision"])
    mesh = make_mesh(config["devices"])
    if config["local"]["executor"] == "debug":
        raise InputError(
            "local.executor=debug: runs in Python only (docs/tutorials/own_algorithm.md); use auto,"
            " sequential or lanes"
        )
    if config["precision"] != "float32" and is_cpu(mesh):
        raise InputError(
            f"precision={config['precision']}: CPUs always use float32; use float32, or an"
            " accelerator"
        )
    return mesh


def use_run_devices() -> None:
    """Makes every CPU core a device, unless JAX_PLATFORMS names another platform, or a caller from
    Python has started JAX: then it keeps the devices that it has.
    """
    if os.environ.get("JAX_PLATFORMS", "cpu").startswith("cpu"):
        with contextlib.suppress(InputError):
            use_cpu_cores()


# data


def deal_samples(config: dict[str, Any]) -> tuple[Pool, Partition]:
    """Returns the pool, and which client holds which sample of it."""
    pool = load_pool(config)
    return pool, split_pool(config, pool)


def federate_samples(config: dict[str, Any], pool: Pool, holdings: Partition) -> FederatedData:
    """Returns the data of all clients, those to be held out included."""
    held = instantiate_target("shared_samples", config["shared_samples"], pool, holdings)
    concept = None
    if config["concept"]:
        concept = functools.partial(instantiate_target, "concept", config["concept"])
    drift = instantiate_target("drift", config["drift"])
    on_host = config["resident"] == "host"
    if drift.federate and not on_host:
        return drift.federate(pool, held, concept)
    return federate(pool, held, concept, on_host=on_host)


def asks_validation(config: dict[str, Any]) -> str | None:
    """Returns the setting by which rounds are judged on validation samples, None: none is."""
    choose, patience = (config["evaluate"][name] for name in ("choose", "patience"))
    if choose != "last":
        return f"evaluate.choose={choose}"
    return f"evaluate.patience={patience}" if patience else None


def name_newcomers(config: dict[str, Any]) -> str | None:
    """Returns the setting that holds out the clients which a run meets at its end: those for
    testing, or, of a run that reads no test sample, those for validation. None: it meets none.
    """
    evaluate = config["evaluate"]
    if evaluate["part"] == "validation" and evaluate["validation_clients"]:
        return "validation_clients"
    return "new_clients" if evaluate["new_clients"] else None


def hold_out(config: dict[str, Any], data: FederatedData) -> tuple[np.ndarray, np.ndarray]:
    """Returns the clients that take part, and those that the run meets at its end."""
    share, apart = (config["evaluate"][name] for name in NEWCOMERS)
    kept, *held = hold_out_clients(data, share, config["seed"], apart)
    return kept, held[name_newcomers(config) == "validation_clients"]


def describe_unused(config: dict[str, Any], pool: Pool, holdings: Partition) -> str | None:
    """Returns what of a file of the user's own the run does not use, None: it uses all."""
    if "path" not in config["dataset"]["source"]:  # only files of the user's own are named
        return None
    unused = []
    if pool.client is not None:
        kept = np.unique(pool.client[holdings.sample], return_inverse=True)[1]  # perhaps not all
        unused += [] if np.array_equal(kept, holdings.owner) else ["client"]
    if pool.test is not None and not np.array_equal(pool.test[holdings.sample], holdings.test):
        unused.append("split")
    if pool.concept is not None and (holdings.concept is None or config["concept"]):
        unused.append("concept")
    lines = []
    if unused:
        name = str(config["partition"]["_target_"]).rpartition(".")[2]
        lines.append(
            f"partition={name} deals the samples again; {', '.join(unused)} of the file"
            f" {'are' if len(unused) > 1 else 'is'} not used (partition=auto uses all)"
        )
    if pool.time is not None and not str(config["drift"]["_target_"]).endswith(".by_time"):
        lines.append("time of the file is not used (drift=by_time uses it)")
    return "\n".join(lines) or None


def note(line: str | None) -> None:
    """Logs a line about the data, if there is one, in process 0 alone, and once in a command."""
    if line and distributed.is_primary() and is_new(line):
        log.info(line)


def shrink_cohort(config: dict[str, Any], num_clients: int) -> None:
    """Lets all clients take part where they are fewer than the cohort that is the data set's
    default, and notes it; another value of `clients_per_round` is left as it is.
    """
    default = config["dataset"]["clients_per_round"]
    if config["clients_per_round"] == default and num_clients < default:
        replace_setting(config, ("clients_per_round", "participants"), default, num_clients)
        note(
            f"clients_per_round={num_clients}: all clients of the data, fewer than the {default}"
            " that it is by default"
        )


def replace_setting(node: Any, names: tuple[str, ...], old: Any, new: Any) -> None:
    """Replaces the value `old` of settings of these names, wherever in the configuration."""
    for name, value in node.items():
        if isinstance(value, dict):
            replace_setting(value, names, old, new)
        elif name in names and value == old:
            node[name] = new


# the method


def build_local(config: dict[str, Any], task: Task, data: FederatedData, mesh: Mesh) -> Local:
    """Returns how clients train."""
    local = dict(config["local"])
    asked, who = local.pop("width"), {name: local.pop(name) for name in ("executor", "first_layer")}
    asked = None if asked == "auto" else asked
    # more than any client can have is a full batch, and memory is taken for B samples
    local["batch_size"] = min(local["batch_size"], data.max_client_samples)
    found = Local(
        **local,
        schedule=instantiate_target("schedule", config["schedule"]),
        personal=build_layers(config["personal"]),
        execution=make_execution(mesh, asked, **who),
    )
    lanes = width.choose_width(found, task, data, config["clients_per_round"], asked)
    return found.replace(execution=make_execution(mesh, lanes, **who))


def build_layers(node: dict[str, Any]) -> list[Method]:
    """Returns the layers of a configuration: none, one, or several by name."""
    if not node or "_target_" in node:
        return [instantiate_target("personal", node)] if node else []
    return [instantiate_target(f"personal.{name}", layer) for name, layer in node.items()]


def build_algorithm(
    config: dict[str, Any],
    task: Task,
    data: FederatedData,
    local: Local,
    select: Selection | None = None,
    values: Mapping[str, Any] | None = None,
    runs_as_one: bool = False,
) -> Algorithm:
    """Returns the algorithm of a configuration.

    Args: `config` are all settings, resolved; `data` are those of the run, whose sizes count;
    `local` is how its clients train; `select` replaces the selection, None: that of the settings;
    `values` replace those of settings by dotted name, and may be traced; `runs_as_one` is as in
    `Execution`.
    """
    values, execution = values or {}, local.execution._replace(runs_as_one=runs_as_one)
    local = local.replace(lr=values.get("local.lr", local.lr), execution=execution)
    node = {name: value for name, value in config["algorithm"].items() if name != "name"}
    draw = node.pop("select")
    # a table of all rounds; not in the settings, so that a run can be continued with more of them
    table = {"num_clients": data.num_clients, "rounds": config["rounds"]}
    given = table if "_partial_" in draw else {}
    function = resolve_target("algorithm.select", str(draw.get("_target_")))
    if {"task", "local"} <= set(inspect.signature(function).parameters):
        given = {"task": task, "local": local}  # it tries models on clients' data
    chosen = select or instantiate_target("algorithm.select", draw, **given)
    sizes = CohortSizes(
        data.num_clients, config["local"]["batch_size"], config["clients_per_round"]
    )
    clock = instantiate_target("clock", config["clock"], sizes)
    system = System(chosen, Faults(**config["faults"]), clock)
    if layer := values_of("personal", values):
        personal = instantiate_target("personal", config["personal"], **layer)
        local = local.replace(personal=personal)
    own = values_of("algorithm", values)
    return instantiate_target("algorithm", node, task, local, system, **own)


def values_of(node: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the settings of one node, without its name."""
    return {
        name.removeprefix(f"{node}."): value
        for name, value in values.items()
        if name.startswith(f"{node}.")
    }


# programs


def find_inputs(
    config: dict[str, Any], setup: Setup, local: Local, store: Store | None = None
) -> Inputs:
    """Returns what a run's programs are given: the numbers of the settings that may be
    traced, by their annotations. 0 and null often leave a part out, and are compiled in.

    Args: `config` are all settings, resolved; `local` is how the clients of the `setup` train;
    `store` has the programs of other runs, None: of none.
    """
    given = dict(flatten_settings(config))
    values = {
        name: float(given[name])
        for name, kinds in collect_settings(config).items()
        if any(kind.words == ARRAY for kind in kinds) and INPUT.fullmatch(name) and given.get(name)
    }
    if not given.get("algorithm.max_m"):
        values.pop("algorithm.m", None)  # groups are as many as rows of arrays

    def build_with(values: Mapping[str, jax.Array]) -> tuple[Algorithm, Drift]:
        own = values_of("drift", values)
        drift = instantiate_target("drift", config["drift"], **own)
        algorithm = build_algorithm(config, setup.task, setup.data, local, values=values)
        return algorithm, drift

    # what programs are made of besides these, shapes and plan; sizes are chosen by the data
    made_of = {
        name: value
        for name, value in given.items()
        if name not in values and not name.startswith(NOT_COMPILED)
    }
    loops = list_loops(setup.task, local, setup.data.max_client_samples)
    table = "algorithm.select._partial_" in given and given["rounds"]  # see `build_algorithm`
    recipe = made_of, sorted(values), local.batch_size, local.execution.width, loops, table
    # no name tells what functions of somebody's own do, or what a file of devices says
    own = list_own_functions(config) or given.get("clock.path")
    lasting = COMMAND in os.environ and not own
    return Inputs(values, build_with, json.dumps(recipe, default=str), store, lasting)


def build_callbacks(config: dict[str, Any]) -> tuple[dict[str, Callback], list[Callback]]:
    """Returns the trackers that `logger` names, and the user's own callbacks of a run, in order."""

    def build_one(field: str, node: Any) -> Callback:
        if not isinstance(node, dict) or "_target_" not in node:
            raise InputError(f"{field}={node}: give {{_target_:my_file.MyCallback}}")
        callback = instantiate_target(field, node)
        if not isinstance(callback, Callback):
            raise InputError(f"{field}._target_={node['_target_']}: is no cfl.Callback")
        return callback

    trackers = {
        n: build_one(f"logger.{n}", node) for n, node in (config.get("logger") or {}).items()
    }
    return trackers, [build_one(f"callbacks[{n}]", x) for n, x in enumerate(config["callbacks"])]


# checks


def check_extras(config: dict[str, Any], drift: Drift) -> None:
    """Raises InputError for a run whose extras, see `extras.py`, cannot be measured, and for one
    whose rounds cannot be judged on validation samples.
    """
    evaluate, extras = config["evaluate"], ("finetune", *NEWCOMERS)
    here = {
        "resident=device": config["resident"] == "host",
        "coordinator=null": config["coordinator"] is not None,
    }
    still = here | {"drift=none": drift.moves}
    needs = {
        f"evaluate.{name}={evaluate[name]}": still if name in NEWCOMERS else here
        for name in extras
        if evaluate[name]
    }
    if asked := asks_validation(config):
        needs[asked] = still | {
            "evaluate.validation=0.2, or another share": not evaluate["validation"]
        }
        if evaluate["choose"] != "last":  # these begin with the last models
            needs[asked] |= {f"evaluate.{name}=0": bool(evaluate[name]) for name in extras}
    if config["dataset"]["standardize"] == "client":  # their scale is that of their first client
        moves = "drift=none, or dataset.standardize=pool"
        needs["dataset.standardize=client"] = {moves: drift.moves}
    for setting, others in needs.items():
        for other in (other for other, missed in others.items() if missed):
            raise InputError(f"{setting}: needs {other}")


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


def check_ids(config: dict[str, Any], pool: Pool, size: int) -> None:
    """Raises InputError for samples that are not whole numbers from 0 to `size` - 1, which a model
    of text reads.
    """
    model, by = config["model"]["name"], config["dataset"]["standardize"]
    if by != "none":
        raise InputError(f"dataset.standardize={by}: model={model} reads whole numbers; use none")
    if pool.x.dtype == np.uint8:
        raise InputError(
            f"model={model}: reads whole numbers, and uint8 is read as x / 255; store"
            " x.astype(numpy.int32)"
        )
    whole = (pool.x >= 0) & (pool.x < size) & (pool.x == np.floor(pool.x))
    if not whole.all():
        raise InputError(
            f"model={model}: x is {pool.x[~whole][0]:g} somewhere, expected whole numbers from 0 to"
            f" {size - 1}"
        )


# functions that settings name


def instantiate_target(
    field: str, node: dict[str, Any] | None, *arguments: Any, **options: Any
) -> Any:
    """Calls the function that a node's `_target_` names, with the node's other values; what
    the function raises is passed on. Returns None where there is no node. Raises InputError for a
    name that cannot be imported and for arguments that the function does not take.
    """
    if not node:
        return None
    target = str(node.get("_target_"))
    list(find_targets(node, field))  # it can be imported, and so can functions that are values
    function = instantiate(node, _partial_=True, _convert_="all")
    given = function.keywords | options
    try:
        inspect.signature(function.func).bind(*arguments, **given)
    except (TypeError, ValueError) as error:  # arguments it does not take, or no signature at all
        raise InputError(f"{field}._target_={target}: {error}") from None
    return function.func(*arguments, **given)
