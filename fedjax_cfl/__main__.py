"""The command line: Hydra composes a configuration, the parts are built from it, the run writes its directory.

The only file that imports hydra; nothing below it sees a configuration object.
"""

import contextlib
import functools
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
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import fedjax_cfl as cfl
from fedjax_cfl import compare, doctor, download, paper, report, session, settings
from fedjax_cfl.errors import InputError, RunError, nearest
from fedjax_cfl.lock import lock

HERE = Path(__file__).resolve().parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # inside a wheel, or a checkout
VERBS = {
    "compare": compare.main,
    "download": download.main,
    "doctor": doctor.main,
    "paper": lambda argv: paper.main(argv, CONF, assemble),
}
ASIDE = ("help", "hydra_help", "shell_completion", "info")  # flags that show something instead of running


def main() -> int:
    """Runs a verb, or a run; returns the exit status: 0 done, 2 bad input (one line on stderr)."""
    arguments = sys.argv[1:]
    sys.path.append(os.getcwd())  # for a `_target_` of the user's own; last, so that it shadows nothing
    try:
        if arguments and arguments[0] in VERBS:
            return VERBS[arguments[0]](arguments[1:])
        if arguments == ["--version"]:
            print(f"fedjax-cfl {importlib.metadata.version('fedjax-cfl')}")
            return 0
        sys.argv[1:] = precheck(arguments)
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
    print("fedjax-cfl: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def precheck(arguments: list[str]) -> list[str]:
    """Returns the arguments as Hydra wants them, flags first. Raises InputError if anything they ask for is not allowed."""
    parser = get_args_parser()
    parser.error = _bad_flag
    given = parser.parse_intermixed_args(arguments)
    if given.run + given.multirun + bool(given.cfg) > 1 or (given.resolve and not given.cfg):
        raise InputError("--run, --multirun and --cfg exclude one another, and --resolve goes with --cfg; see --help")
    flags = [argument for argument in arguments if argument not in given.overrides]
    if any(getattr(given, flag) for flag in ASIDE):
        return flags + given.overrides
    asked = [parsed(text) for text in given.overrides]
    choices = [_values(override, given.multirun) for override in asked]
    first = [options[0] for options in choices]
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = check(first)
        for number, options in enumerate(choices):  # a sweep: each value in turn, with the first of all others
            for other in options[1:]:
                check([*first[:number], other, *first[number + 1 :]])
    if given.multirun:  # the runs of a sweep are numbered folders of one directory, which Hydra knows by another name
        for number, override in enumerate(asked):
            if override.key_or_group in ("run_dir", "hydra.sweep.dir"):
                settings.make_dir(settings.check_run_dir(str(override.value()), "never"))
                given.overrides[number] = f"hydra.sweep.dir={override.get_value_string()}"
    elif not given.cfg:
        settings.check_run_dir(str(config["run_dir"]), config["resume"])
    return flags + given.overrides


def _bad_flag(message: str):
    raise InputError(f"{message.removeprefix('unrecognized arguments: ')}: no such flag; settings are KEY=VALUE without dashes; see --help")


def parsed(text: str) -> Override:
    """Returns one KEY=VALUE of the command line as Hydra reads it."""
    if "=" not in text and not text.startswith("~"):
        raise InputError(f"{text}: neither KEY=VALUE nor one of the verbs {', '.join(VERBS)}{nearest(text, VERBS)}")
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except (HydraException, ValueError, RecursionError):  # also numbers of thousands of digits, and thousands of brackets
        override = None
    if override is None or not override.key_or_group:
        raise InputError(
            f"""{text[:200]}: cannot be read as KEY=VALUE; a value with any of ,=()[]{{}}:' in it needs quotes, as in 'run_dir="a,b"'"""
        )
    return override


def _values(override: Override, multirun: bool) -> list[str]:
    """Returns an override of a sweep once for each of its values, any other as it is."""
    if not override.is_sweep_override():
        return [override.input_line]
    if not multirun or override.key_or_group == "run_dir":
        raise InputError(f"{override.input_line}: several values {'need -m, a sweep' if not multirun else 'are not allowed here'}")
    name, value = override.get_key_element(), override.value()
    try:
        values = value.filter(_groups().get(name, [])) if isinstance(value, Glob) else list(override.sweep_string_iterator())
    except HydraException:
        values = []
    if not values:
        raise InputError(f"{override.input_line}: names no values that can be listed")
    return [f"{name}={value}" for value in values]


@functools.cache
def _groups() -> dict[str, list[str]]:
    """Returns the options of every group of choices."""
    return {folder.name: sorted(option.stem for option in folder.glob("*.yaml")) for folder in CONF.iterdir() if folder.is_dir()}


@functools.cache
def _default(chosen: tuple[str, ...]) -> dict:
    """Returns every setting by its dotted name, as it is when nothing but these options of groups is chosen."""
    return dict(settings.leaves(OmegaConf.to_container(hydra.compose("config", list(chosen)), resolve=True)))


def check(overrides: list[str]) -> dict:
    """Returns a resolved configuration as a dict. Raises InputError for names that do not exist and values that are not allowed."""
    groups, asked = _groups(), [parsed(text) for text in overrides]
    chosen = [override for override in asked if override.key_or_group in groups]
    for override in chosen:
        name, value = override.key_or_group, override.input_line.partition("=")[2].strip("'\"")
        if value not in groups[name]:
            raise InputError(f"{name}={value}: unknown {name}{settings.unknown(value, groups[name])}")
    try:
        default = _default(tuple(override.input_line for override in chosen))
        for override in asked:
            if not (override in chosen or override.is_add() or override.is_force_add() or override.is_hydra_override()):
                settings.check_name(override.input_line, override.key_or_group, [*default, *groups], override.is_delete())
        config = OmegaConf.to_container(hydra.compose("config", overrides), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        wrong = next((o.input_line for o in asked if o.key_or_group == getattr(cause, "full_key", None)), None)
        reason = str(cause).splitlines()[0]
        raise InputError(f"{wrong}: {reason}" if wrong else reason) from None
    settings.check(config, default, [override.key_or_group for override in asked])
    return config


def job(config: DictConfig) -> None:
    """Builds and runs one configuration; Hydra calls it once, or once per run of a sweep."""
    resolved = OmegaConf.to_container(config, resolve=True)
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = Path(str(resolved["run_dir"]) if alone else HydraConfig.get().runtime.output_dir).absolute()
    try:
        session.use_compile_cache()
        parts = build(config, resolved)
        with lock(settings.make_dir(run_dir)):
            start = session.resumed(resolved, run_dir, *parts)
            record(config, run_dir)
            chosen, overrides = HydraConfig.get().runtime.choices, list(HydraConfig.get().overrides.task)
            status = session.train(resolved, chosen, overrides, run_dir, *parts, start)
        if status:
            sys.exit(status)
    except (RunError, OSError) as error:
        refuse(f"run_dir={run_dir}: {error.strerror or error}" if isinstance(error, OSError) else error)
        sys.exit(1)
    except InputError as error:
        if not alone and sorted(path.name for path in run_dir.parent.rglob("*")) == sorted(["multirun.yaml", run_dir.name]):
            shutil.rmtree(run_dir.parent)  # of a sweep that never began Hydra has left just these two
        sys.exit(refuse(error))


def assemble(overrides: list[str]) -> tuple:
    """Returns (settings as a dict, task, data, local) of the run that these overrides describe, without running it."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        resolved = check(overrides)
        config = hydra.compose("config", overrides)
    _, task, data, _, mesh = build(config, resolved)
    return resolved, task, data, local_of(config, resolved, data, mesh)


def build(config: DictConfig, resolved: dict):
    """Returns (algorithm, task, data, drift, mesh) from a configuration. Raises InputError for data or sizes that do not fit."""
    if os.environ.get("JAX_PLATFORMS", "cpu").startswith("cpu"):
        cfl.use_cpu_cores()
    jax.config.update("jax_default_matmul_precision", "float32")  # accelerators would otherwise round inputs to TF32 or bfloat16
    mesh = cfl.mesh_of(config.devices)
    pool = made("dataset.source", config.dataset.source)
    concept = functools.partial(made, "concept", config.concept)
    data = cfl.federate(pool, made("partition", config.partition, pool), concept)
    settings.check_sizes(resolved, data.num_clients, int(data.test.size.sum()))
    module = made("model.module", config.model.module, num_classes=pool.num_classes)
    l2 = config.model.get("l2", 0.0) if config.preset.l2 is None else config.preset.l2
    try:
        task = cfl.as_task(module, pool.x.shape[1:], pool.num_classes, l2=l2)
    except InputError as error:
        raise InputError(f"model={config.model.name}: {error}") from None
    local = local_of(config, resolved, data, mesh)
    fixed = {"num_clients": data.num_clients} if config.algorithm.select.get("_partial_") else {}
    select = made("algorithm.select", config.algorithm.select, **fixed)
    rest = {name: value for name, value in resolved["algorithm"].items() if name not in ("name", "select")}
    return made("algorithm", OmegaConf.create(rest), task, local, select), task, data, made("drift", config.drift), mesh


def local_of(config: DictConfig, resolved: dict, data, mesh) -> cfl.Local:
    """Returns how clients train."""
    width = None if config.local.width == "auto" else config.local.width
    batch_size = min(config.local.batch_size, data.capacity)  # more than anybody has is a full batch, and memory is taken for B samples
    faults = cfl.Faults(**resolved["faults"])
    return cfl.Local(config.local.lr, config.local.epochs, batch_size, width, mesh, faults, config.local.first_layer)


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
        inspect.signature(function.func).bind(*arguments, **function.keywords, **options)
    except (TypeError, ValueError) as error:  # arguments it does not take, or no signature at all
        raise InputError(f"{field}._target_={target}: {error}") from None
    return function(*arguments, **options)


def record(config: DictConfig, run_dir: Path) -> None:
    """Writes what was asked for to .hydra/, as Hydra itself would."""
    folder = run_dir / ".hydra"
    folder.mkdir(exist_ok=True)
    overrides = HydraConfig.get().overrides.task
    for name, value in (("config", config), ("overrides", OmegaConf.create(list(overrides))), ("hydra", HydraConfig.get())):
        with report.replacing(folder / f"{name}.yaml") as temporary:
            OmegaConf.save(value, temporary)


if __name__ == "__main__":
    sys.exit(main())
