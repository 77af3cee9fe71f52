"""One run in its directory, or a grid of runs trained as one program, `vectorize=[...]`: files,
checkpoints, signals and resuming. Knows nothing of Hydra.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from rich.console import Console

from fedjax_cfl import distributed
from fedjax_cfl.data.federated import format_description
from fedjax_cfl.errors import InputError, RunError
from fedjax_cfl.formatting import escape_markup, flatten_settings
from fedjax_cfl.runs.assignments import sample_clients
from fedjax_cfl.runs.callbacks import Checkpoints, Interrupt, Log, Rows, Validation
from fedjax_cfl.runs.display import describe_met_rule, print_summary
from fedjax_cfl.runs.finish import Member, attempt, finish_run
from fedjax_cfl.runs.labels import name_parts
from fedjax_cfl.runs.results import SUMMARY_FILE, read_metrics, to_plain, write_text
from fedjax_cfl.runs.resume import resume_run, sync_resume
from fedjax_cfl.runs.run_dir import lock, make_dir
from fedjax_cfl.runs.settings import RunSettings
from fedjax_cfl.runs.trackers import Guarded
from fedjax_cfl.simulation.callback import RunInfo, Snapshot
from fedjax_cfl.simulation.driver import Watch, drive
from fedjax_cfl.simulation.program import Inputs, Program, compile_run
from fedjax_cfl.simulation.rounds import Plan, Setup
from fedjax_cfl.simulation.vectorize import compile_members


def train_in_dir(member: Member, setup: Setup, inputs: Inputs | None) -> int:
    """Runs, or goes on with, a run in its directory, which is locked meanwhile; returns the exit
    status as `train_run` does. Its settings are written once the directory is known to be this
    run's. Raises InputError for a directory that is not, and RunError as `train_run` does.
    """
    run_dir, settings = member.run_dir, member.settings
    with contextlib.ExitStack() as locks:

        def lock_and_resume() -> Snapshot | None:
            locks.enter_context(lock(make_dir(run_dir)))
            start = resume_run(settings, run_dir, setup, make_console(member.verbose).print)
            write_settings(member)
            return start

        return train_run(member, setup, inputs, sync_resume(lock_and_resume, settings, setup))


def write_settings(member: Member) -> None:
    """Writes settings, every one with its value, and overrides to .hydra/, where Hydra's own
    tools look for them.
    """
    folder = member.run_dir / ".hydra"
    folder.mkdir(exist_ok=True)
    for name, value in ("config", member.settings.everything), ("overrides", member.overrides):
        text = yaml.safe_dump(to_plain(value), sort_keys=False)
        write_text(folder / f"{name}.yaml", text)


def train_run(member: Member, setup: Setup, inputs: Inputs | None, start: Snapshot | None) -> int:
    """Runs, or goes on with, one run, and writes its files; returns the exit status: 0, or
    128 + the signal that stopped it.

    Raises RunError if it cannot go on; what was written until then stays, and the last
    checkpoint can be resumed.

    `inputs` are the numbers that its programs are given, see `Inputs`, None: they hold all
    numbers; `start` is where it stands, None: it begins.
    """
    console, key = print_head(member, setup), jax.random.key(member.settings.seed)
    compile_program = partial(compile_run, setup, key, fresh=start is None, inputs=inputs)
    starts = None if start is None else [start]
    status, summaries = train_members([member], [setup], compile_program, starts)
    for summary in summaries:
        print_summary(member.settings, member.run_dir, setup.algorithm.clustered, summary, console)
        draw = partial(member.draw, member.run_dir, summary)
        attempt("curves.png is not drawn", draw, without_disk=True)
    return status


def print_head(member: Member, setup: Setup, before: str = "") -> Console:
    """Prints what runs, on which data and devices, and from when on accuracies count, if they do
    so only once every client has a group; returns what it is printed to. `before` stands before
    the data.
    """
    settings, mesh, console = member.settings, setup.mesh, make_console(member.verbose)
    names = {part: settings.everything[part]["name"] for part in ("algorithm", "dataset")}
    names = name_parts(names, member.overrides)
    what = f"[bold]{escape_markup(names['algorithm'])}[/] on {escape_markup(names['dataset'])}"
    tested = settings.everything.get("evaluate", {}).get("part", "test")
    devices = f"{mesh.size} {mesh.devices.flat[0].platform.upper()} device{'s' * (mesh.size > 1)}"
    hosts = f" on {jax.process_count()} hosts" * (jax.process_count() > 1)
    described = format_description(setup.data, tested)
    console.print(f"{what}: {before}{described}, {devices}{hosts}")
    cohort = settings.clients_per_round
    if setup.algorithm.clustered and settings.plan.discard == "met" and cohort:
        counts = setup.data.num_clients, cohort, settings.plan.rounds
        console.print(describe_met_rule(*counts), markup=False)
    return console


def make_console(verbose: bool = True) -> Console:
    """Returns what prints to stdout, in process 0 alone, and only if `verbose`."""
    quiet = not (verbose and distributed.is_primary())
    return Console(highlight=False, soft_wrap=True, quiet=quiet)


def train_members(
    members: Sequence[Member],
    setups: Sequence[Setup],
    compile_program: Callable[[Plan], Program],
    starts: Sequence[Snapshot] | None,
) -> tuple[int, list[dict]]:
    """Trains runs as one program and writes the files of each, in process 0; returns
    the exit status and the summaries, none if the runs were stopped.

    Args: `setups` of each; `compile_program` compiles them for a plan; `starts` of each, or None
    to begin. Raises RunError.
    """
    settings, run_dir = members[0].settings, members[0].run_dir
    plan = settings.plan
    if starts and has_ended_early(settings, run_dir):  # killed before it was finished
        plan = plan._replace(rounds=int(starts[0].state.round))
    try:
        with catch_signals() as asked, contextlib.ExitStack() as files:
            program = compile_program(plan)
            each = zip(members, setups, starts or [None] * len(members), strict=True)
            watches = [watch_run(*one, len(members), asked, files) for one in each]
            found = drive(program, plan, starts, watches)
            done = int(found[0].state.round)
            if done < plan.rounds and not has_ended_early(settings, run_dir):
                make_console(members[0].verbose).print(f"stopped after round {done}")
                return 128 + (asked[0] if asked else signal.SIGTERM), []  # or another process was
            if not distributed.is_primary():
                return 0, []
            return 0, [*map(finish_run, members, setups, found)]
    except OSError as error:
        raise RunError(
            f"run_dir={run_dir}: {error.strerror or error}; what was written before can be resumed"
        ) from None
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a collective raises either
        if not isinstance(error, InputError):
            distributed.end_if_alone(error)
        raise


def watch_run(
    member: Member,
    setup: Setup,
    start: Snapshot | None,
    together: int,
    signals: list[int],
    files: contextlib.ExitStack,
) -> Watch:
    """Returns the callbacks of a run, in process 0; the others only see whether it is stopped.

    Args: `start` is where it stands, None: it begins; so many runs are trained `together`;
    `signals` are those that have come; files are closed with `files`.
    """
    if not distributed.is_primary():
        return Watch([Interrupt(signals)])
    settings, run_dir = member.settings, member.run_dir
    begun = int(start.state.round) if start else 0
    if together > 1:  # a grid that is killed while it saves goes on from the last that all have
        every = settings.checkpoint
        settings = settings._replace(checkpoint=every._replace(keep=max(2, every.keep)))
    if begun < settings.plan.rounds:  # of fewer rounds: while it goes on, the run is not finished
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    clients = sample_clients(setup.data.num_clients, settings.assignments, settings.seed)
    rows = Rows(run_dir, clients, files)
    has_validation = settings.patience or settings.choose == "best_validation"
    callbacks = [
        *([Validation(settings, read_metrics(run_dir))] if has_validation else []),
        rows,
        *(Guarded(name, tracker, files) for name, tracker in member.trackers.items()),
        *member.callbacks,
        Log(settings.plan.rounds, run_dir, begun, member.verbose, files),
        Interrupt(signals),
        Checkpoints(settings, setup, rows),
    ]
    everything = dict(flatten_settings(settings.everything))
    return Watch(callbacks, RunInfo(run_dir, everything, begun))


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yields a list that the first SIGTERM or SIGINT is put into; a second one ends the
    process at once.

    A thread listens, because Python's own handlers have to wait until a compiled block
    of rounds returns. Only the main thread can be told of signals: elsewhere none is caught.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    listening, waking = os.pipe()
    os.set_blocking(waking, False)

    def listen():
        while number := os.read(listening, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if asked:
                os._exit(128 + number[0])
            asked.append(number[0])
            print(
                "fedjax-cfl: stopping after this block of rounds; once more stops at once",
                file=sys.stderr,
            )

    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    descriptor = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(waking)
        listener.join()
        os.close(listening)


def has_ended_early(settings: RunSettings, run_dir: Path) -> bool:
    """Returns whether the rows of a run say that it ends where they do."""
    return settings.patience > 0 and Validation(settings, read_metrics(run_dir)).should_stop()


# a grid


def grid_points(grid: dict[str, list]) -> list[dict[str, Any]]:
    """Returns the members' settings, the first axis outermost."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def train_grid(
    members: list[Member],
    grid: dict[str, list],
    setups: list[Setup],
    make: Callable,
    starts: list[Snapshot] | None,
) -> int:
    """Trains the runs of a grid as one program and writes the files of each as if it had run alone;
    returns the exit status as `train_run` does.

    Args: `grid`: the values of each setting; `setups` of each seed; `make(values)` ->
    (Algorithm, Drift); `starts` of the members, None: they begin.
    """
    for member in members:
        write_settings(member)
    settings, first = members[0].settings, setups[0]
    said = ", ".join(f"{name}={','.join(map(str, values))}" for name, values in grid.items())
    print_head(members[0], first, f"{len(members)} runs as one, {said}\nthe first: ")
    sets = [setup.data for setup in setups]
    if len({member.settings.data_digest for member in members}) == 1:
        sets = sets[:1]
    inside = grid_points({name: values for name, values in grid.items() if name != "seed"})
    values = {name: [point[name] for point in inside] for name in inside[0]}
    keys = jnp.stack([jax.random.key(seed) for seed in grid.get("seed", [settings.seed])])
    each = [setup for setup in setups for _ in inside]
    compile_program = partial(compile_members, make, first, sets, keys, values)
    return train_members(members, each, compile_program, starts)[0]
