"""Trackers: callbacks that give the numbers of each row to TensorBoard, Weights & Biases or MLflow.

If one fails, a warning is printed, it gets no further rows, and the run goes on. What the run
itself needs is in its own files.
"""

import contextlib
import importlib
import importlib.util
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fedjax_cfl.errors import InputError, warn
from fedjax_cfl.runs.results import to_plain
from fedjax_cfl.simulation.callback import Callback, Grouping, RowCallback, RunInfo, Take


class Guarded(RowCallback):
    """A tracker whose failures end no run: they are said, and it is told nothing more."""

    def __init__(self, name: str, tracker: Callback, files: contextlib.ExitStack):
        """`files` close the tracker, also where the run fails."""
        self.name, self.tracker, self.files, self.works = name, tracker, files, True

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Opens the tracker."""
        self._attempt(lambda: self.tracker.on_start(run, take))
        self.files.callback(self._attempt, lambda: self.tracker.on_end(take))

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Gives it a row."""
        self._attempt(lambda: self.tracker.on_rows(row, grouping, take))

    def _attempt(self, call: Callable[[], Any]) -> None:
        if not self.works:
            return
        try:
            call()
        # whatever a tracker, its disk or its network does; some libraries call sys.exit
        except (Exception, SystemExit) as error:
            self.works = False
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            warn(f"logger {self.name} failed and gets no more rows: {reason}")


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


class TensorBoard(RowCallback):
    """Writes scalars for TensorBoard to run_dir/tensorboard; a resumed run hides what comes
    again.
    """

    def __init__(self) -> None:
        require_package("tensorboardX", "tensorboard")

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Opens a file of events."""
        assert run.run_dir is not None
        self.writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(run.run_dir / "tensorboard"), purge_step=run.begun + 1
        )

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Writes a row."""
        for name, value in list_numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()

    def on_end(self, take: Take) -> None:
        """Closes the file."""
        self.writer.close()


class WandB(RowCallback):
    """Records a run with Weights & Biases, under an id that run_dir/wandb/run-id.txt keeps."""

    def __init__(
        self, project: str = "fedjax-cfl", mode: Literal["offline", "online"] = "offline"
    ) -> None:
        require_package("wandb", "wandb")
        self.project, self.mode = project, mode

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Begins or goes on with the record."""
        assert run.run_dir is not None
        package = importlib.import_module("wandb")
        self.record = package.init(
            project=self.project,
            name=run.run_dir.name,
            id=read_or_write(run.run_dir / "wandb" / "run-id.txt", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            dir=str(run.run_dir),
            config=run.settings,
            mode=self.mode,
            settings=package.Settings(console="off", silent=True),
        )

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Records a row."""
        self.record.log(list_numbers(row), step=row["round"])

    def on_end(self, take: Take) -> None:
        """Ends the record."""
        self.record.finish()


class MLflow(RowCallback):
    """Records a run with MLflow, under an id that run_dir/mlflow-run.txt keeps."""

    def __init__(self, uri: str = "mlruns", experiment: str = "fedjax-cfl") -> None:
        require_package("mlflow", "mlflow")
        if ":" not in uri:  # MLflow 3 opens folders only where this says so
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.uri, self.experiment = uri, experiment

    def on_start(self, run: RunInfo, take: Take) -> None:
        """Begins or goes on with the record."""
        run_dir, uri, experiment = run.run_dir, self.uri, self.experiment
        assert run_dir is not None
        client = importlib.import_module("mlflow").MlflowClient(
            uri if ":" in uri else Path(uri).absolute().as_uri()
        )

        def create() -> str:
            found = client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else client.create_experiment(experiment)
            made = client.create_run(number, run_name=run_dir.name)
            for name, value in run.settings.items():
                client.log_param(made.info.run_id, name, str(value)[:500])
            return made.info.run_id

        self.client, self.run_id = client, read_or_write(run_dir / "mlflow-run.txt", create)

    def on_rows(self, row: dict[str, Any], grouping: Grouping, take: Take) -> None:
        """Records a row."""
        metric = importlib.import_module("mlflow.entities").Metric
        numbers = list_numbers(row).items()
        metrics = [metric(name, value, 0, row["round"]) for name, value in numbers]
        self.client.log_batch(self.run_id, metrics=metrics)

    def on_end(self, take: Take) -> None:
        """Ends the record."""
        self.client.set_terminated(self.run_id)
