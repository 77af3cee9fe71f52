"""The command line: Hydra composes a configuration, the parts are built from it, the run writes its directory.

The only file that imports hydra; nothing below it sees a configuration object.
"""

import importlib.metadata
import itertools
import os
import re
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedjax_cfl import compare, doctor, download, plot, report, settings
from fedjax_cfl.errors import InputError

HERE = Path(__file__).resolve().parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # inside a wheel, or a checkout
VERBS = {"compare": compare.main, "download": download.main, "doctor": doctor.main}
ASIDE = ("help", "hydra_help", "version", "shell_completion", "cfg", "info")  # flags that show something instead of running
PACKAGES = ("fedjax-cfl", "jax", "jaxlib", "flax", "optax", "numpy", "hydra-core")


def main() -> int:
    """Runs a verb, or a run; returns the exit status: 0 done, 2 bad input (one line on stderr)."""
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in VERBS:
            return VERBS[arguments[0]](arguments[1:])
        sys.argv[1:] = arguments = [_sweep_dir(argument, arguments) for argument in arguments]
        precheck(arguments)
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
        return 0
    except InputError as error:
        return refuse(error)
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def refuse(error: Exception) -> int:
    """Prints bad input as one line and returns its exit status."""
    print("fedjax-cfl: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def _sweep_dir(argument: str, arguments: list[str]) -> str:
    # A sweep's runs are numbered folders of one directory, which Hydra knows by another name.
    several = {"-m", "--multirun"} & set(arguments)
    return argument.replace("run_dir=", "hydra.sweep.dir=", 1) if several and argument.startswith("run_dir=") else argument


def precheck(arguments: list[str]) -> None:
    """Composes every configuration that the command line asks for and raises InputError for the first that is not allowed."""
    from hydra._internal.utils import get_args_parser

    given = get_args_parser().parse_args(arguments)
    if any(getattr(given, flag, None) for flag in ASIDE):
        return
    try:
        parsed = OverridesParser.create().parse_overrides(given.overrides)
    except HydraException as error:
        wrong = next((o for o in given.overrides if "=" not in o and not o.startswith("~")), None)
        hint = settings.unknown(wrong, VERBS) if wrong else ""
        raise InputError(f"{wrong}: neither KEY=VALUE nor a verb{hint}" if wrong else str(error).splitlines()[0]) from None
    choices = [[o.input_line] for o in parsed]
    for number, override in enumerate(parsed):
        if override.is_sweep_override():
            if not given.multirun:
                raise InputError(f"{override.input_line}: several values need -m, a sweep")
            choices[number] = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    first = [options[0] for options in choices]
    variants = [first] + [[*first[:n], other, *first[n + 1 :]] for n, options in enumerate(choices) for other in options[1:]]
    for overrides in variants:
        config = composed(overrides)
        settings.check(config)
        if not given.multirun:
            settings.check_run_dir(config["run_dir"])


def composed(overrides: list[str]) -> dict:
    """Returns the resolved configuration as a dict. Raises InputError for unknown names and wrong syntax."""
    groups = {path.name: sorted(option.stem for option in path.glob("*.yaml")) for path in CONF.iterdir() if path.is_dir()}
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name in groups and value not in groups[name]:
            raise InputError(f"{name}={value}: unknown {name}{settings.unknown(value, groups[name])}")
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        try:
            config = hydra.compose("config", overrides=overrides)
            return OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            text = str(error.__cause__ or error)
            if key := re.search(r"Key '([^']+)' is not in struct|Could not override '([^']+)'", str(error) + text):
                chosen = [o for o in overrides if o.partition("=")[0] in groups]
                known = [name for name, _ in settings.leaves(OmegaConf.to_container(hydra.compose("config", overrides=chosen)))]
                wrong = next((o.partition("=")[0] for o in overrides if key[1] and o.partition("=")[0].endswith(key[1])), key[2] or key[1])
                raise InputError(f"{wrong}: unknown setting{settings.nearest(wrong, [*known, *groups])}; see --help") from None
            raise InputError(text.splitlines()[0]) from None


def job(config: DictConfig) -> None:
    """Builds and runs one configuration; Hydra calls it once, or once per run of a sweep."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        resolved = OmegaConf.to_container(config, resolve=True)
        settings.check(resolved)
        settings.check_run_dir(str(run_dir))
        parts = build(config, resolved)
        record(config, run_dir)
        train(resolved, run_dir, *parts)
    except InputError as error:
        if run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()
        sys.exit(refuse(error))


def build(config: DictConfig, resolved: dict):
    """Returns (algorithm, task, data, mesh) from a configuration. Raises InputError for data or sizes that do not fit."""
    import jax

    import fedjax_cfl as cfl

    if os.environ.get("JAX_PLATFORMS", "cpu").startswith("cpu"):
        cfl.use_cpu_cores(config.devices)
    jax.config.update("jax_default_matmul_precision", "float32")  # accelerators would otherwise round inputs to TF32 or bfloat16
    mesh = cfl.mesh_of(config.devices)
    pool = part(config.dataset.source)()
    data = cfl.federate(pool, part(config.partition)(pool), part(config.concept))
    settings.check_sizes(resolved, data.num_clients)
    module = part(config.model.module)(num_classes=pool.num_classes)
    l2 = config.model.get("l2", 0.0) if config.preset.l2 is None else config.preset.l2
    task = cfl.as_task(module, pool.x.shape[1:], pool.num_classes, l2=l2)
    width = None if config.local.width == "auto" else config.local.width
    local = cfl.Local(config.local.lr, config.local.epochs, config.local.batch_size, width, mesh)
    select = part(config.algorithm.select)
    fixed = {"num_clients": data.num_clients} if config.algorithm.select.get("_partial_") else {}
    rest = OmegaConf.create({name: value for name, value in resolved["algorithm"].items() if name not in ("name", "select")})
    return part(rest)(task, local, select(**fixed)), task, data, mesh


def part(node: DictConfig):
    """Returns the function a `_target_` names, with the node's other values bound; it is called by us, so that its errors stay its own."""
    try:
        return instantiate(node, _partial_=True)
    except HydraException as error:
        raise InputError(str(error).splitlines()[0]) from None


def record(config: DictConfig, run_dir: Path) -> None:
    """Writes what was asked for to .hydra/, as Hydra itself would."""
    folder = run_dir / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
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
    sizes = ", ".join(f"{value:g} {name.replace('_', ' ')}" for name, value in describe(data).items())
    console.print(f"[bold]{config['algorithm']['name']}[/] on {config['dataset']['name']}: {sizes}; {mesh.size} devices")
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
    console.print(report.final_table(summary))
    console.print(f"written to {run_dir}", soft_wrap=True)


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
