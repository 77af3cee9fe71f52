"""Trackers: what gets the rows of a run in addition to metrics.jsonl.

A tracker is opened for one run and gets each row. If it fails, a warning is printed, it gets no
further rows, and the run goes on. What the run itself needs is in its own files.
"""

import contextlib
import importlib
import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedjax_cfl.errors import InputError, warn
from fedjax_cfl.runs.results import to_plain
from fedjax_cfl.simulation.callback import Grouping, RowCallback, RunInfo, Take


class Tracker(NamedTuple):
    """An open record of one run."""

    log: Callable[[int, dict[str, float]], None]  # (round, numbers of the row)
    close: Callable[[], None]


Opener = Callable[[RunInfo], Tracker]


class Trackers(RowCallback):
    """Gives the numbers of each row to every tracker that still works."""

    def __init__(self, openers: Mapping[str, Opener], files: contextlib.ExitStack):
        """`openers` make each tracker, by name; trackers are closed with `files`."""
        self.openers, self.trackers, self.files = openers, {}, files

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Opens the trackers."""
        for name, opener in self.openers.items():
            tracker = self._attempt(name, lambda opener=opener: opener(run))
            if tracker is not None:
                self.trackers[name] = tracker
                self.files.callback(self._close, name)

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Gives them a row."""
        numbers = list_numbers(row) if self.trackers else {}
        for name, tracker in list(self.trackers.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(row["round"], numbers))

    def _close(self, name: str) -> None:
        if name in self.trackers:
            self._attempt(name, self.trackers[name].close)

    def _attempt(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        # whatever a tracker, its disk or its network does; some libraries call sys.exit
        except (Exception, SystemExit) as error:
            self.trackers.pop(name, None)
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            warn(f"logger {name} failed and gets no more rows: {reason}")


def list_numbers(row: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row by name, those of a list as name/0, name/1, ...; nulls
    are left out.
    """
    found = {}
    for name, value in to_plain(row).items():
        several = isinstance(value, list)
        parts = {f"{name}/{n}": part for n, part in enumerate(value)} if several else {name: value}
        found |= {key: part for key, part in parts.items() if isinstance(part, int | float)}
    return found


def require_package(name: str, extra: str) -> None:
    """Raises InputError unless a package is installed."""
    if importlib.util.find_spec(name) is None:
        raise InputError(f"logger={extra}: needs the package {name}; install fedjax-cfl[{extra}]")


def read_or_write(path: Path, make: Callable[[], str]) -> str:
    """Returns what a file says; where there is none, what `make` returns, written to it."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:  # a link that leads nowhere is not followed
            file.write(make())
    return path.read_text(encoding="utf-8").strip()


def tensorboard() -> Opener:
    """Writes scalars for TensorBoard to run_dir/tensorboard; a resumed run hides what comes
    again.
    """
    require_package("tensorboardX", "tensorboard")

    def opener(run: RunInfo) -> Tracker:
        assert run.run_dir is not None
        writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(run.run_dir / "tensorboard"), purge_step=run.begun + 1
        )

        def log(round: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, round)
            writer.flush()

        return Tracker(log, writer.close)

    return opener


def wandb(project: str = "fedjax-cfl", mode: Literal["offline", "online"] = "offline") -> Opener:
    """Records a run with Weights & Biases, under an id that run_dir/wandb/run-id.txt keeps."""
    require_package("wandb", "wandb")

    def opener(run: RunInfo) -> Tracker:
        assert run.run_dir is not None
        package = importlib.import_module("wandb")
        record = package.init(
            project=project,
            name=run.run_dir.name,
            id=read_or_write(run.run_dir / "wandb" / "run-id.txt", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.run_dir),
            config=run.settings,
            mode=mode,
            settings=package.Settings(console="off", silent=True),
        )
        return Tracker(lambda round, numbers: record.log(numbers, step=round), record.finish)

    return opener


def mlflow(uri: str = "mlruns", experiment: str = "fedjax-cfl") -> Opener:
    """Records a run with MLflow, under an id that run_dir/mlflow-run.txt keeps."""
    require_package("mlflow", "mlflow")
    if ":" not in uri:  # MLflow 3 opens folders only where this says so
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

    def opener(run: RunInfo) -> Tracker:
        run_dir = run.run_dir
        assert run_dir is not None
        client = importlib.import_module("mlflow").MlflowClient(
            uri if ":" in uri else Path(uri).absolute().as_uri()
        )
        metric = importlib.import_module("mlflow.entities").Metric

        def create() -> str:
            found = client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else client.create_experiment(experiment)
            made = client.create_run(number, run_name=run_dir.name)
            for name, value in run.settings.items():
                client.log_param(made.info.run_id, name, str(value)[:500])
            return made.info.run_id

        identity = read_or_write(run_dir / "mlflow-run.txt", create)

        def log(round: int, numbers: dict[str, float]) -> None:
            now = [metric(name, value, 0, round) for name, value in numbers.items()]
            client.log_batch(identity, metrics=now)

        return Tracker(log, lambda: client.set_terminated(identity))

    return opener
