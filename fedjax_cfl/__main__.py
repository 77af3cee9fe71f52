"""The command line: Hydra composes a configuration, the parts are built from it, the run writes its directory.

The only file that imports hydra; nothing below it sees a configuration object.
"""

import functools
import importlib.metadata
import inspect
import itertools
import os
import sys
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedjax_cfl import compare, doctor, download, plot, report, settings
from fedjax_cfl.errors import InputError, nearest

HERE = Path(__file__).resolve().parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # inside a wheel, or a checkout
VERBS = {"compare": compare.main, "download": download.main, "doctor": doctor.main}
ASIDE = ("help", "hydra_help", "shell_completion", "info")  # flags that show something instead of running
PACKAGES = ("fedjax-cfl", "jax", "jaxlib", "flax", "optax", "numpy", "hydra-core")


def main() -> int:
    """Runs a verb, or a run; returns the exit status: 0 done, 2 bad input (one line on stderr)."""
    arguments = sys.argv[1:]
    sys.path.append(os.getcwd())  # for a `_target_` of the user's own; last, so that it shadows nothing
    try:
        if arguments and arguments[0] in VERBS:
            return VERBS[arguments[0]](arguments[1:])
        sys.argv[1:] = precheck(arguments)
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


def refuse(error: Exception) -> int:
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
        renamed = [text.replace("run_dir=", "hydra.sweep.dir=", 1) if text.startswith("run_dir=") else text for text in given.overrides]
        swept = [str(override.value()) for override in asked if override.key_or_group in ("run_dir", "hydra.sweep.dir")]
        for folder in swept:
            settings.check_run_dir(folder)
        return flags + renamed
    if not given.cfg:
        settings.check_run_dir(str(config["run_dir"]))
    return flags + given.overrides


def _bad_flag(message: str):
    raise InputError(f"{message.removeprefix('unrecognized arguments: ')}: no such flag; settings are KEY=VALUE without dashes; see --help")


def parsed(text: str) -> Override:
    """Returns one KEY=VALUE of the command line as Hydra reads it."""
    if "=" not in text and not text.startswith("~"):
        raise InputError(f"{text}: neither KEY=VALUE nor one of the verbs {', '.join(VERBS)}{nearest(text, VERBS)}")
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException:
        override = None
    if override is None or not override.key_or_group:
        raise InputError(
            f"""{text}: cannot be read as KEY=VALUE; a value with any of ,=()[]{{}}:' in it needs quotes, as in 'run_dir="a,b"'"""
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
    return {folder.name: sorted(option.stem for option in folder.glob("*.yaml")) for folder in CONF.iterdir() if folder.is_dir()}


def check(overrides: list[str]) -> dict:
    """Returns a resolved configuration as a dict. Raises InputError for names that do not exist and values that are not allowed."""
    groups, asked = _groups(), [parsed(text) for text in overrides]
    chosen = [override for override in asked if override.key_or_group in groups]
    for override in chosen:
        name, value = override.key_or_group, str(override.value())
        if value not in groups[name]:
            raise InputError(f"{name}={value}: unknown {name}{settings.unknown(value, groups[name])}")
    try:
        default = dict(
            settings.leaves(OmegaConf.to_container(hydra.compose("config", [override.input_line for override in chosen]), resolve=True))
        )
        for override in asked:
            name = override.key_or_group
            if not (override.is_add() or override.is_force_add() or override.is_hydra_override() or override in chosen):
                settings.check_name(override.input_line, name, [*default, *groups])
        config = OmegaConf.to_container(hydra.compose("config", overrides), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        wrong = next((o.input_line for o in asked if o.key_or_group == getattr(cause, "full_key", None)), None)
        reason = str(cause).splitlines()[0]
        raise InputError(f"{wrong}: {reason}" if wrong else reason) from None
    settings.check(config, default)
    return config


def job(config: DictConfig) -> None:
    """Builds and runs one configuration; Hydra calls it once, or once per run of a sweep."""
    resolved = OmegaConf.to_container(config, resolve=True)
    alone = HydraConfig.get().mode == RunMode.RUN
    run_dir = Path(str(resolved["run_dir"]) if alone else HydraConfig.get().runtime.output_dir).absolute()
    try:
        parts = build(config, resolved)
        record(config, run_dir)
        train(resolved, run_dir, *parts)
    except InputError as error:
        if not alone:
            tidy(run_dir)
        sys.exit(refuse(error))


def tidy(run_dir: Path) -> None:
    """Removes the directory of a run of a sweep that never began, and the sweep's own if that was all."""
    sweep = run_dir.parent
    run_dir.rmdir()
    if [file.name for file in sweep.iterdir()] == ["multirun.yaml"]:
        (sweep / "multirun.yaml").unlink()
        sweep.rmdir()


def build(config: DictConfig, resolved: dict):
    """Returns (algorithm, task, data, mesh) from a configuration. Raises InputError for data or sizes that do not fit."""
    import jax

    import fedjax_cfl as cfl

    if os.environ.get("JAX_PLATFORMS", "cpu").startswith("cpu"):
        cfl.use_cpu_cores()
    jax.config.update("jax_default_matmul_precision", "float32")  # accelerators would otherwise round inputs to TF32 or bfloat16
    mesh = cfl.mesh_of(config.devices)
    pool = made("dataset.source", config.dataset.source)
    concept = functools.partial(made, "concept", config.concept)
    data = cfl.federate(pool, made("partition", config.partition, pool), concept)
    settings.check_sizes(resolved, data.num_clients)
    module = made("model.module", config.model.module, num_classes=pool.num_classes)
    l2 = config.model.get("l2", 0.0) if config.preset.l2 is None else config.preset.l2
    task = cfl.as_task(module, pool.x.shape[1:], pool.num_classes, l2=l2)
    width = None if config.local.width == "auto" else config.local.width
    batch_size = min(config.local.batch_size, data.capacity)  # more than anybody has is a full batch, and memory is taken for B samples
    local = cfl.Local(config.local.lr, config.local.epochs, batch_size, width, mesh)
    fixed = {"num_clients": data.num_clients} if config.algorithm.select.get("_partial_") else {}
    select = made("algorithm.select", config.algorithm.select, **fixed)
    rest = {name: value for name, value in resolved["algorithm"].items() if name not in ("name", "select")}
    return made("algorithm", OmegaConf.create(rest), task, local, select), task, data, mesh


def made(field: str, node: DictConfig, *arguments, **options):
    """Calls the function that a node's `_target_` names, with the node's other values; its own errors stay its own."""
    target = node.get("_target_")
    try:
        function = instantiate(node, _partial_=True)
    except HydraException as error:
        while error.__cause__:
            error = error.__cause__
        raise InputError(f"{field}._target_={target}: cannot be imported: {error}") from None
    try:
        inspect.signature(function.func).bind(*arguments, **function.keywords, **options)
    except TypeError as error:
        raise InputError(f"{field}: {target} {error}") from None
    return function(*arguments, **options)


def record(config: DictConfig, run_dir: Path) -> None:
    """Writes what was asked for to .hydra/, as Hydra itself would."""
    folder = run_dir / ".hydra"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run_dir={run_dir}: cannot be made: {error.strerror}") from None
    overrides = HydraConfig.get().overrides.task
    for name, value in (("config", config), ("overrides", OmegaConf.create(list(overrides))), ("hydra", HydraConfig.get())):
        with report.replacing(folder / f"{name}.yaml") as temporary:
            OmegaConf.save(value, temporary)


def train(config: dict, run_dir: Path, algorithm, task, data, mesh) -> None:
    """Runs, shows progress, and writes metrics.jsonl, clients.parquet, summary.json and curves.png."""
    import jax
    import numpy as np
    from rich.console import Console

    from fedjax_cfl import run
    from fedjax_cfl.data import describe

    console = Console()
    console.print(opening(config, describe(data), mesh), soft_wrap=True)
    with report.open_metrics(run_dir) as handle, report.progress(config["rounds"]) as show:

        def on_row(row):
            report.append_row(handle, row)
            show(row)

        key = jax.random.key(config["seed"])
        options = {"rounds": config["rounds"], "eval_every": config["eval_every"], "discard": config["discard"]}
        result = run(algorithm, task, data, key, **options, with_auxiliary=config["eval_auxiliary"], mesh=mesh, on_row=on_row)
    table, served = result.clients, algorithm.serve(result.state).index
    columns = {"client": np.arange(data.num_clients), "group": served, "concept": data.concept, "train_samples": data.train.size}
    report.write_clients(run_dir, columns | {"test_samples": table.samples, "accuracy": table.accuracy, "loss": table.loss, "f1": table.f1})
    summary = summarise(config, result, mesh)
    report.write_json(run_dir / "summary.json", summary)
    plot.curves(run_dir)
    console.print(report.final_table(spoken(summary)))
    if algorithm.clustered and summary["best_accuracy"] is None:
        console.print(f"no accuracy yet: discard={config['discard']} waits until every client has been met; more rounds, or discard=none")
    console.print(f"written to {run_dir}", soft_wrap=True, markup=False)


def opening(config: dict, sizes: dict, mesh) -> str:
    """Returns the first line a run prints: the method, the data and the machine."""
    few = [
        f"{sizes[f'clients_without_{side}']:,} clients without {side} samples"
        for side in ("train", "test")
        if sizes[f"clients_without_{side}"]
    ]
    parts = [
        f"{sizes['clients']:,} clients",
        f"{sizes['classes']:,} classes",
        f"{sizes['train_samples']:,} train and {sizes['test_samples']:,} test samples",
        f"{sizes['min_train']:,} to {sizes['max_train']:,} train samples a client (median {sizes['median_train']:,g})",
        *few,
        f"{mesh.size} {mesh.devices.flat[0].platform.upper()} device{'s' * (mesh.size > 1)}",
    ]
    return f"{config['algorithm']['name']} on {config['dataset']['name']}: {', '.join(parts)}"


def spoken(summary: dict) -> dict:
    """Returns a summary as its reader wants it: rates beside their counts, one line for the seconds, no lists."""
    shown = {name: value for name, value in summary.items() if not name.endswith(("_s", "_mean", "_variance")) and name != "concept"}
    for name in ("client_updates", "local_steps"):
        shown[name] = f"{summary[name]:,} ({summary[f'{name}_per_s']:,.0f} /s)"
    seconds = {"compiling": "compile_s", "training": "train_s", "evaluating": "eval_s"}
    shown["seconds"] = ", ".join(f"{what} {summary[name]:.2f}" for what, name in seconds.items())
    shown["group_sizes"] = ", ".join(map(str, summary["group_sizes"]))
    shown["peak_memory"] = report.scaled(shown.pop("peak_memory_bytes"), "B")
    shown["devices"] = ", ".join(shown.pop("devices"))
    return shown


def summarise(config: dict, result, mesh) -> dict:
    """Returns the contents of summary.json."""
    from fedjax_cfl import run

    chosen = HydraConfig.get().runtime.choices
    names = {group: chosen[group] for group in ("algorithm", "dataset", "partition", "model", "concept", "preset")}
    numbers = report.summarise(result.rows)
    seconds = max(result.times["train_s"], 1e-9)
    devices = [f"{count} x {kind}" for kind, count in _counted(device.device_kind for device in mesh.devices.flat)]
    return {
        **names,
        "seed": config["seed"],
        **numbers,
        "client_updates_per_s": numbers["client_updates"] / seconds,
        "local_steps_per_s": numbers["local_steps"] / seconds,
        **result.times,
        "peak_memory_bytes": sys.modules[run.__module__].peak_memory_bytes(),
        "devices": devices,
        "versions": {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES},
        "overrides": list(HydraConfig.get().overrides.task),
    }


def _counted(items):
    return [(item, len(list(same))) for item, same in itertools.groupby(sorted(items))]


if __name__ == "__main__":
    sys.exit(main())
