"""Going on with a run: what must be the same, and where it stands."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_cfl import distributed
from fedjax_cfl.errors import FinishedRun, InputError, SaidBefore, warn
from fedjax_cfl.formatting import flatten_settings
from fedjax_cfl.runs.assignments import PART, read_lines
from fedjax_cfl.runs.callbacks import CHECKPOINTS
from fedjax_cfl.runs.checkpoint import Checkpoint, list_steps, restore_latest
from fedjax_cfl.runs.labels import list_own_functions
from fedjax_cfl.runs.results import METRICS_FILE, atomic_write, parse_row, read_summary
from fedjax_cfl.runs.run_dir import RUN_FILES, check_run_dir
from fedjax_cfl.runs.settings import RunSettings, run_identity
from fedjax_cfl.sharding import place
from fedjax_cfl.simulation.callback import Snapshot
from fedjax_cfl.simulation.rounds import Setup, state_shapes
from fedjax_cfl.simulation.rows import COUNTERS

# Settings that may differ between the processes of one run: only process 0 reads them, or they
# say where a process is.
PROCESS_MAY_DIFFER = ("run_dir", "process", "coordinator", "offline", "resume", "checkpoint.")
PROCESS_MAY_DIFFER += ("logger",)
FINISHED = "already holds this run, finished after {} rounds{}; choose another or more rounds"


def common_step(run_dirs: Sequence[Path]) -> int | None:
    """Returns the last round of which every member has a checkpoint, None where all begin.

    All begin if no member has any checkpoint, or if a grid was killed while it wrote the first
    ones: some have theirs of round 0, which are nothing to lose, and the others none. Raises
    InputError if they have checkpoints of further rounds, but of no common one.
    """
    steps = [set(list_steps(run_dir / CHECKPOINTS)) for run_dir in run_dirs]
    if not all(steps) and set.union(*steps) <= {0}:
        return None
    shared = set.intersection(*steps)
    if not shared:
        raise InputError(
            f"run_dir={run_dirs[0].parent}: its runs stand at different rounds; continue each by"
            " itself, or choose another"
        )
    return max(shared)


def resume_grid(runs: Sequence[tuple[RunSettings, Path, Setup]]) -> list[Snapshot] | None:
    """Returns where the runs of a grid stand, all after the same round, None: they begin.

    Args: (settings, run_dir, setup) of each. If the last checkpoint of which all have one cannot
    be read, all go further back. Raises InputError as `common_step` and `resume_run` do.
    """
    until = common_step([run_dir for _, run_dir, _ in runs])
    ended = until is not None and all(has_ended(run[0], run[1], until) for run in runs)
    if until is None or ended:
        for run in runs:  # one of other settings or data is refused, not passed over
            with contextlib.suppress(FinishedRun):
                resume_run(*run)
    if until is None:
        return None
    if ended:
        raise FinishedRun(f"run_dir={runs[0][1].parent}: {describe_end(runs[0][0], until)}")
    while True:
        starts = [start for run in runs if (start := resume_run(*run, until=until))]
        rounds = {int(start.state.round) for start in starts}
        if len(rounds) == 1:
            return starts
        until = min(rounds)


def describe_end(settings: RunSettings, step: int) -> str:
    """Returns what is said of a run that has ended after round `step`. What makes two runs the same
    names functions of the user's own, and not what they do.
    """
    own = [name for name in list_own_functions(settings.everything) if "." in name]
    edits = f" (edits of {', '.join(own)} since then are not seen)" if own else ""
    return FINISHED.format(step, edits)


def has_ended(settings: RunSettings, run_dir: Path, step: int) -> bool:
    """Returns whether a run has ended after round `step`, its last or by its patience; one whose
    summary is damaged writes it again.
    """
    try:
        summary = read_summary(run_dir)
        return summary is not None and (step >= settings.plan.rounds or "ended_early" in summary)
    except InputError as error:
        warn(f"{error}; it is written again")
        return False


def resume_run(
    settings: RunSettings,
    run_dir: Path,
    setup: Setup,
    say: Callable[[str], None] = print,
    until: int | None = None,
) -> Snapshot | None:
    """Returns where an unfinished run of this directory stands, with its metrics cut
    back to that round, or None to begin.

    That is the newest checkpoint that can be read and whose rows are still there.
    `say` gets the line that says so. With `until`, only the newest readable checkpoint up to that
    round is tried.
    Raises InputError if the directory belongs to another run, if the run has finished or
    cannot be continued, or if the setting `resume` forbids it.
    """
    check_run_dir(str(run_dir), settings.resume)
    folder, key, data = run_dir / CHECKPOINTS, jax.random.key(settings.seed), setup.data

    def restore(until: int | None) -> Checkpoint | None:
        like = state_shapes(setup, key)
        arrays = make_host_arrays(like) if jax.process_count() > 1 else like
        return restore_latest(folder, arrays, run_identity(settings, data), warn, until)

    found = restore(until) if list_steps(folder) else None
    if found is None and until is not None:
        raise InputError(f"run_dir={run_dir}: no checkpoint of round {until} or before can be read")
    if found is None:
        clear_unsaved(settings, run_dir)
        return None
    if until is None and has_ended(settings, run_dir, found.step):
        raise FinishedRun(f"run_dir={run_dir}: {describe_end(settings, found.step)}")
    lost = f"run_dir={run_dir}: {METRICS_FILE} has lost rows before round {found.step}"
    newest = found.step
    while (kept := cut_rows(run_dir, found)) is None:
        older = restore(found.step - 1) if until is None and found.step else None
        if older is None:
            raise InputError(f"{lost}; put the file back, or choose another")
        found = older
    if found.step < newest:
        warn(f"{lost}; goes on from round {found.step}, whose rows are there")
    for name, content in kept.items():
        with atomic_write(run_dir / name) as temporary:
            temporary.write_bytes(content)
    say(f"resuming after round {found.step}")
    state, data_state = found.tree
    return Snapshot(state, data_state, found.facts["counters"])


def clear_unsaved(settings: RunSettings, run_dir: Path) -> None:
    """Removes what a run has left that was killed before its first checkpoint. Raises
    InputError where there is more than that, or `resume` wants a checkpoint.
    """
    if settings.resume == "must":
        raise InputError(f"resume=must: {run_dir} has no checkpoint to resume from")
    if not {inside.name for inside in run_dir.iterdir()} <= RUN_FILES:
        raise InputError(f"run_dir={run_dir}: already exists and is not empty; choose another")
    for name in (METRICS_FILE, PART):
        (run_dir / name).unlink(missing_ok=True)


def cut_rows(run_dir: Path, found: Checkpoint) -> dict[str, bytes] | None:
    """Returns what a run keeps of its files, by name, when it goes on from a checkpoint: as many
    rows, and groups, as there were then. None: the last of these rows is not there. Fewer groups
    are warned of.
    """
    count, path = found.facts["rows"], run_dir / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)[:count] if path.is_file() else []
    last = parse_row(lines[-1]) if lines else None
    if len(lines) < count or (last and last["round"] != found.step) or (count and not last):
        return None
    groups = read_lines(run_dir)
    if len(groups) < found.facts["groups"]:  # the training is paid for, and does not need them
        warn(f"run_dir={run_dir}: groups are lost; goes on without those before {found.step}")
        groups = []
    kept = "".join(groups[: found.facts["groups"]]).encode()
    return {METRICS_FILE: b"".join(lines), PART: kept}


def sync_resume(
    resume: Callable[[], Snapshot | None], settings: RunSettings, setup: Setup
) -> Snapshot | None:
    """Calls `resume`, a use of `resume_run`, in process 0, and returns its result in all processes.
    If it raises InputError, the others raise SaidBefore. Raises InputError in all of them if they
    were given different settings or data.
    """
    given = run_identity(settings, setup.data) | dict(flatten_settings(settings.everything))
    distributed.check_same(
        {name: value for name, value in given.items() if not name.startswith(PROCESS_MAY_DIFFER)}
    )
    start, refused = None, None
    if distributed.is_primary():
        try:
            start = resume()
        except InputError as error:
            refused = error
    # 0 begin, 1 go on, 2 refused
    verdict = int(distributed.broadcast_from_primary(np.int32(2 if refused else start is not None)))
    if verdict == 2:
        raise refused or SaidBefore("process 0 refuses the run, and has said why")
    if verdict == 0 or jax.process_count() == 1:
        return start
    like = state_shapes(setup, jax.random.key(settings.seed))
    mine = (start.state, start.data_state) if start else make_host_arrays(like)
    state, data_state = place(distributed.broadcast_from_primary(mine), like)
    return Snapshot(state, data_state, start.counters if start else dict(COUNTERS))


def make_host_arrays(shapes: Any) -> Any:
    """Returns NumPy arrays of the given shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
