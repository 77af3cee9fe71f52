"""`fedjax-cfl predict RUN_DIR FILE.npz`: predicts samples with the models of a finished run.

The file has x [N, ...] and, if you like, y [N] (class numbers, or names), client [N] (names as in
clients.parquet) and split [N] (0 train, 1 test). A client of the run uses its own model.
A client without a model in the run, or a file without `client`, takes the model of lowest
loss on its own training samples (on all of them without split), so it needs y. Where clients of
the run mix all models, it finds its weights on them.
"""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_cfl.data.datasets.files import number_clients
from fedjax_cfl.data.datasets.pool import read_test_mask
from fedjax_cfl.data.datasets.readers import read_npz
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.runs.load import LoadedRun, SavedModels, load_run
from fedjax_cfl.runs.results import atomic_write


class Predictions(NamedTuple):
    """One entry for each sample."""

    predicted: np.ndarray  # [N] int32, the class
    model: np.ndarray  # [N] int32, the model that predicted it; of a mixture the heaviest one
    known: np.ndarray  # [N] bool, whether the client has a model in the run


def main(argv: list[str]) -> int:
    """Prints how many samples were predicted and how many were right; writes them with --out."""
    parser = argparse.ArgumentParser(
        prog="fedjax-cfl predict", description="Predict with the models of a finished run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("file", metavar="FILE.npz", help="x, and y, client, split if you like")
    parser.add_argument("--best", action="store_true", help="models of the best evaluation")
    parser.add_argument("--out", metavar="OUT.npz", help="write predicted, model, known [N]")
    given = parse_arguments(parser, argv)
    files = [Path(name) for name in (given.out, given.file) if name]
    if given.out and all(file.exists() for file in files) and os.path.samefile(*files):
        raise InputError(f"--out={given.out}: would replace the samples; choose another file")
    run, arrays = load_run(given.run_dir), read_npz(given.file, ("x",), ("y", "client", "split"))
    saved = run.best if given.best else run.final
    if saved is None:
        raise InputError(f"run_dir={given.run_dir}: no evaluation had an accuracy to be best of")
    read_as_training(given.file, arrays)
    try:
        found = predict_all(run, saved, arrays)
    except InputError as error:
        raise InputError(f"{given.file}: {error}") from None
    print("\n".join(describe_predictions(run, saved, arrays, found)))
    if given.out:
        write_predictions(given.out, found, run.class_names)
    return 0


def read_as_training(file: str, arrays: dict[str, np.ndarray]) -> None:
    """Replaces clients by their ids, and split by a mask of test samples, as training reads them.
    Raises InputError, which names the file, for what training would refuse.
    """
    size = np.shape(arrays["x"])[:1]
    if "client" in arrays:
        ids, number = number_clients(file, arrays["client"], *size or (1,))
        arrays["client"] = ids[number]
    if "split" in arrays:
        arrays["split"] = read_test_mask(file, arrays["split"], np.zeros(size))


def predict_all(run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray]) -> Predictions:
    """Predicts every sample with its client's model; labels in `arrays` become class numbers.
    Raises InputError for arrays that do not fit.
    """
    x = run.check_samples(arrays["x"])
    for name in ("y", "client", "split"):
        if name in arrays and arrays[name].shape != (len(x),):
            raise InputError(f"{name} has shape {arrays[name].shape}, expected ({len(x)},)")
    if "y" in arrays:
        arrays["y"] = run.check_labels(arrays["y"], len(x))
    clients = arrays.get("client", np.zeros(len(x), np.int32))
    met = list_met(run, saved) if "client" in arrays else {}
    predicted, model = np.zeros(len(x), np.int32), np.zeros(len(x), np.int32)
    known = np.zeros(len(x), bool)
    names, number = np.unique(clients, return_inverse=True)
    ends = np.cumsum(np.bincount(number))[:-1]
    for client, rows in zip(names, np.split(np.argsort(number, kind="stable"), ends), strict=True):
        here = met.get(str(client))
        known[rows] = here is not None
        used = choose_model(run, saved, arrays, rows) if here is None else here
        model[rows] = used if isinstance(used, int) else np.argmax(used)
        if not isinstance(used, int):
            predicted[rows] = run.predict_with(used, x[rows], saved)
    for used in np.unique(model) if saved.weights is None else ():
        rows = np.flatnonzero(model == used)
        predicted[rows] = run.predict_with(int(used), x[rows], saved)
    return Predictions(predicted, model, known)


def list_met(run: LoadedRun, saved: SavedModels) -> dict[str, int | np.ndarray]:
    """Returns the model of each client that has one, or its weights [M] of all models, by the
    client's name as text.
    """
    index = saved.model_index.tolist()
    used = index if saved.weights is None else list(saved.weights)
    each = zip(run.table["client"].tolist(), index, used, strict=True)
    return {str(name): mine for name, model, mine in each if model >= 0}


def choose_model(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], rows: np.ndarray
) -> int | np.ndarray:
    """Returns the model for a client that has none, or its weights [M] of all models, by its
    training samples among `rows`.
    """
    if "y" not in arrays:
        who = f"client {arrays['client'][rows[0]]}" if "client" in arrays else "a file without ids"
        raise InputError(f"{who} has no model in this run, and without y none can be chosen")
    if "split" in arrays:
        rows = rows[~arrays["split"][rows]]
        if not rows.size:
            raise InputError("split: a client that is new to the run has no training samples")
    find = run.find_model if saved.weights is None else run.find_weights
    return find(arrays["x"][rows], arrays["y"][rows], saved)


def describe_predictions(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], found: Predictions
) -> list[str]:
    """Returns the lines to print: one for clients with a model in the run, one for others."""
    scored: Any = np.ones(len(found.known), bool)
    if "split" in arrays:
        scored = arrays["split"]
    lines = [f"{run.summary['algorithm']}, models of round {saved.round}"]
    kinds = (("clients of the run", found.known), ("clients new to the run", ~found.known))
    for name, rows in kinds:
        if not rows.any():
            continue
        models = ", ".join(map(str, np.unique(found.model[rows])))
        by = "models" if saved.weights is None else "mixtures, the heaviest of each model"
        line = f"{name}: {rows.sum():,} samples, {by} {models}"
        rows = rows & scored
        if "y" in arrays and rows.any():
            right = np.mean(found.predicted[rows] == arrays["y"][rows])
            line += f", accuracy {right:.2%} on {rows.sum():,}"
            chosen_by = "" if "split" in arrays or found.known[rows].all() else ", which chose too"
            line += chosen_by
        lines.append(line)
    return lines


def write_predictions(path: str, found: Predictions, names: tuple[str, ...] | None) -> None:
    """Writes the predictions as arrays of an npz file; classes by name, if they have names."""
    arrays = found._asdict()
    if names is not None:
        numbers = range(len(names), 1 + found.predicted.max(initial=0))
        arrays["predicted"] = np.array([*names, *map(str, numbers)])[found.predicted]
    try:
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise InputError(f"--out={path}: cannot be written: {error.strerror}") from None
    print(f"written to {path}")
