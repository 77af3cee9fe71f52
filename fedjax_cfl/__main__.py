"""The command line: Hydra composes a configuration, the parts are built from it, the run writes its directory.

With `command_line` the only file that imports hydra; nothing below sees a configuration object.
"""

import contextlib
import copy
import functools
import importlib
import importlib.metadata
import inspect
import io
import os
import shutil
import sys
import textwrap
from pathlib import Path

import hydra
import jax
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import fedjax_cfl as cfl
from fedjax_cfl import grid, hosts, memory, population, report, session, settings
from fedjax_cfl.command_line import CONF, check, precheck
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.lock import lock
from fedjax_cfl.received import on_received

VERBS = ("compare", "doctor", "download", "paper")


def main() -> int:
    """Runs a verb, or a run; returns the exit status: 0 done, 2 bad input (one line on stderr)."""
    arguments = sys.argv[1:]
    sys.path.append(os.getcwd())  # for a `_target_` of the user's own; last, so that it shadows nothing
    try:
        if arguments and arguments[0] in VERBS:
            return verb(*arguments)
        if arguments == ["--version"]:
            print(f"fedjax-cfl {importlib.metadata.version('fedjax-cfl')}")
            return 0
        sys.argv[1:] = precheck(arguments, VERBS)
        with folded() if {"--help", "-h"} & set(arguments) else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
        return 0
    except InputError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("fedjax-cfl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def verb(name: str, *arguments: str) -> int:
    """Runs a verb, a module of its own that is imported only here: plotting alone takes a second to import."""
    own = importlib.import_module(f"fedjax_cfl.{name}")
    return own.main(list(arguments), CONF, checked, assemble) if name == "paper" else own.main(list(arguments))


@contextlib.contextmanager
def folded():
    """Folds what is printed meanwhile: Hydra gives each group of choices one line, however many there are."""
    try:
        with contextlib.redirect_stdout(io.StringIO()) as held:
            yield
    finally:  # Hydra exits by itself
        for line in held.getvalue().splitlines():
            print(textwrap.fill(line, 130, subsequent_indent="  ") if len(line) > 140 else line)


def refuse(error: Exception | str) -> int:
    """Prints bad input as one line and returns its exit status."""
    if str(error):  # empty: process 0 has said it
        print("fedjax-cfl: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def job(config: DictConfig) -> None:
    """Builds and runs one configuration; Hydra calls it once, or once per run of a sweep."""
    resolved = OmegaConf.to_container(config, resolve=True)
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = Path(str(resolved["run_dir"]) if alone else HydraConfig.get().runtime.output_dir).absolute()
    try:
        session.use_compile_cache()
        axes = grid.axes(resolved)
        status = run_grid(config, axes, run_dir) if axes else run_one(config, resolved, run_dir)
        if status:
            sys.exit(status)
    except (RunError, OSError) as error:
        refuse(f"run_dir={run_dir}: {error.strerror or error}" if isinstance(error, OSError) else error)
        sys.exit(1)
    except InputError as error:
        if not alone and sorted(path.name for path in run_dir.parent.rglob("*")) == sorted(["multirun.yaml", run_dir.name]):
            shutil.rmtree(run_dir.parent)  # of a sweep that never began Hydra has left just these two
        sys.exit(refuse(error))


def run_one(config: DictConfig, resolved: dict, run_dir: Path) -> int:
    """Builds and runs one configuration in its directory; returns the exit status."""
    algorithm, _, data, drift, mesh = parts = build(config, resolved)
    asked = list(HydraConfig.get().overrides.task)
    with contextlib.ExitStack() as locks:

        def begin():
            locks.enter_context(lock(settings.make_dir(run_dir)))
            start = session.resumed(resolved, run_dir, *parts)
            record(config, asked, run_dir)
            return start

        start = session.shared(begin, algorithm, data, drift, mesh, jax.random.key(resolved["seed"]))
        return session.train(resolved, HydraConfig.get().runtime.choices, asked, run_dir, *parts, start)


def run_grid(config: DictConfig, axes: dict[str, list], run_dir: Path) -> int:
    """Builds the runs of a grid and trains them as one program; returns the exit status."""
    shared = [text for text in HydraConfig.get().overrides.task if text.partition("=")[0] not in (*axes, "vectorize", "seeds", "run_dir")]
    members, parts = [], {}
    for point, folder in zip(grid.points(axes), grid.folders(run_dir, axes), strict=True):
        own = copy.deepcopy(config)
        for name, value in {**point, "vectorize": [], "seeds": 1, "run_dir": str(folder)}.items():
            OmegaConf.update(own, name, value)
        resolved = OmegaConf.to_container(own, resolve=True)
        members.append(grid.Member(resolved, [*shared, *(f"{name}={value}" for name, value in point.items())], folder))
        if resolved["seed"] not in parts:
            parts[resolved["seed"]] = own, build(own, resolved)
    own, (_, task, data, _, mesh) = next(iter(parts.values()))
    resolved = OmegaConf.to_container(own, resolve=True)

    def make(values):
        return algorithm_of(own, resolved, task, data, mesh, values)

    with contextlib.ExitStack() as locks:
        for member in members:
            locks.enter_context(lock(settings.make_dir(member.run_dir)))
        until, starts = grid.common_step(grid.folders(run_dir, axes)), []
        for member in members:
            _, built = parts[member.config["seed"]]
            starts.append(session.resumed(member.config, member.run_dir, *built, until=until))
            record(OmegaConf.create(member.config), member.overrides, member.run_dir)
        built = [built for _, built in parts.values()]
        return grid.train(members, HydraConfig.get().runtime.choices, axes, built, make, starts, run_dir)


def checked(overrides: list[str]) -> dict:
    """Returns the settings of the run that these overrides describe, as a dict. Raises InputError for what is not allowed."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return check(overrides)


def assemble(overrides: list[str]) -> tuple:
    """Returns (settings as a dict, task, data, local) of the run that these overrides describe, without running it."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        resolved = check(overrides)
        config = hydra.compose("config", overrides)
    _, task, data, _, mesh = build(config, resolved)
    return resolved, task, data, local_of(config, resolved, task, data, mesh)


def build(config: DictConfig, resolved: dict):
    """Returns (algorithm, task, data, drift, mesh) from a configuration. Raises InputError for data or sizes that do not fit."""
    hosts.connect(resolved["coordinator"], resolved["processes"], resolved["process"])
    if os.environ.get("JAX_PLATFORMS", "cpu").startswith("cpu"):
        cfl.use_cpu_cores()
    jax.config.update("jax_default_matmul_precision", config.precision)  # by default accelerators round inputs to TF32 or bfloat16
    mesh = cfl.mesh_of(config.devices)
    pool = made("dataset.source", config.dataset.source)
    concept = functools.partial(made, "concept", config.concept) if config.concept else None
    data = cfl.federate(pool, made("partition", config.partition, pool), concept, on_host=config.resident == "host")
    settings.check_sizes(resolved, data.num_clients, int(data.test.size.sum()))
    module = made("model.module", config.model.module, num_classes=pool.num_classes)
    l2 = config.model.get("l2", 0.0) if config.preset.l2 is None else config.preset.l2
    try:
        task = cfl.as_task(module, pool.x.shape[1:], pool.num_classes, l2=l2)
    except InputError as error:
        raise InputError(f"model={config.model.name}: {error}") from None
    algorithm, drift = algorithm_of(config, resolved, task, data, mesh), made("drift", config.drift)
    population.check(data, algorithm, drift)
    return algorithm, task, data, drift, mesh


def algorithm_of(config: DictConfig, resolved: dict, task, data, mesh, values: dict | None = None):
    """Returns the algorithm; `values` replace those of the settings in which the runs of a grid differ, and may be traced."""
    local = local_of(config, resolved, task, data, mesh)
    if values is not None:
        local = local._replace(members=True, lr=values.get("local.lr", local.lr))
    own = {name.partition(".")[2]: value for name, value in (values or {}).items() if name.startswith("algorithm.")}
    fixed = {"num_clients": data.num_clients} if config.algorithm.select.get("_partial_") else {}
    select = made("algorithm.select", config.algorithm.select, **fixed)
    rest = {name: value for name, value in resolved["algorithm"].items() if name not in ("name", "select")}
    algorithm = made("algorithm", OmegaConf.create(rest), task, local, select, **own)
    return on_received(algorithm, select) if config.test_on == "received" else algorithm


def local_of(config: DictConfig, resolved: dict, task, data, mesh) -> cfl.Local:
    """Returns how clients train."""
    width = memory.width(resolved["local"], task, data, mesh)
    batch_size = min(config.local.batch_size, data.capacity)  # more than anybody has is a full batch, and memory is taken for B samples
    faults = cfl.Faults(**resolved["faults"])
    return cfl.Local(config.local.lr, config.local.epochs, batch_size, width, mesh, faults, config.local.first_layer, config.local.momentum)


def made(field: str, node: DictConfig, *arguments, **options):
    """Calls the function that a node's `_target_` names, with the node's other values; its own errors stay its own."""
    target = node.get("_target_")
    try:
        function = instantiate(node, _partial_=True, _convert_="all")
    except HydraException as error:
        while error.__cause__:
            error = error.__cause__
        raise InputError(f"{field}._target_={target}: cannot be imported: {error}") from None
    try:
        inspect.signature(function.func).bind(*arguments, **function.keywords | options)
    except (TypeError, ValueError) as error:  # arguments it does not take, or no signature at all
        raise InputError(f"{field}._target_={target}: {error}") from None
    return function(*arguments, **options)


def record(config: DictConfig, overrides: list[str], run_dir: Path) -> None:
    """Writes what was asked for to .hydra/, as Hydra itself would."""
    folder = run_dir / ".hydra"
    folder.mkdir(exist_ok=True)
    for name, value in (("config", config), ("overrides", OmegaConf.create(overrides)), ("hydra", HydraConfig.get())):
        with report.replacing(folder / f"{name}.yaml") as temporary:
            OmegaConf.save(value, temporary)


if __name__ == "__main__":
    sys.exit(main())
