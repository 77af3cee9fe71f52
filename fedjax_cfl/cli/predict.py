"""`fedjax-cfl predict RUN_DIR FILE`: predicts samples with the models of a finished run.

An .npz has x [N, ...] and, if you like, y [N] (class numbers, or names; the numbers that a run
regressed; or labels [N, T]), client [N] (names as in clients.parquet) and split [N] (0 train, 1
test); any other file, or folder, is read with the settings by which the run read its own, the
columns of a table by name. A client of the run uses its own model.
A client without a model in the run, or a file without `client`, takes the model of lowest
loss on its own training samples (on all of them without split), so it needs y, unless the method
places clients by their inputs alone. Where clients of the run mix all models, it finds its weights
on them.
"""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cfl.data import datasets
from fedjax_cfl.data.datasets.files import number_clients
from fedjax_cfl.data.datasets.pool import read_test_mask
from fedjax_cfl.data.datasets.readers import read_npz, shorten
from fedjax_cfl.data.datasets.table import read_new_samples
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import clean_name, to_frame
from fedjax_cfl.runs.load import LoadedRun, SavedModels, load_run
from fedjax_cfl.runs.place import can_place, place_clients
from fedjax_cfl.runs.results import atomic_write, write_columns
from fedjax_cfl.types import Pool

SOURCES = "fedjax_cfl.data.datasets."  # readers that the settings of a run may name
TABLES = ("csv", "jsonl", "parquet")
MOST_CLASSES = 20  # of a confusion matrix that is printed


class Predictions(NamedTuple):
    """One entry for each sample."""

    # [N] int32, the class, float32, the number, or [N, T] int32, 1 for the labels it has
    predicted: np.ndarray
    model: np.ndarray  # [N] int32, the model that predicted it; of a mixture the heaviest one
    known: np.ndarray  # [N] bool, whether the client has a model in the run
    probabilities: np.ndarray | None  # [N, C] float32, of classes or labels; None: of numbers


def main(argv: list[str]) -> int:
    """Prints how many samples were predicted and how well; writes them with --out."""
    parser = argparse.ArgumentParser(
        prog="fedjax-cfl predict", description="Predict with the models of a finished run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument(
        "file", metavar="FILE", help=".npz with x, and y, client, split; or as the run's own data"
    )
    parser.add_argument("--best", action="store_true", help="models of the best evaluation")
    parser.add_argument("--no-labels", action="store_true", help="a table without its label column")
    parser.add_argument(
        "--confusion", action="store_true", help="print who is taken for whom, model by model"
    )
    parser.add_argument(
        "--out",
        metavar="OUT",
        help="write a row for each sample to a .csv or .parquet: client, predicted, model, known"
        " and, of classes or labels, probabilities; to an .npz arrays [N] and [N, C]",
    )
    given = parse_arguments(parser, argv)
    files = [Path(name) for name in (given.out, given.file) if name]
    if given.out and all(file.exists() for file in files) and os.path.samefile(*files):
        raise InputError(f"--out={given.out}: would replace the samples; choose another file")
    if given.out and not given.out.lower().endswith((".csv", ".npz", ".parquet")):
        raise InputError(f"--out={given.out}: must end in .csv, .npz or .parquet")
    run = load_run(given.run_dir)
    if given.confusion and not run.num_classes:
        raise InputError("--confusion: counts classes, and the run had none")
    arrays = read_samples(run, given.file, labels=not given.no_labels)
    saved = run.best if given.best else run.final
    if saved is None:
        words = run.targets.score.words
        raise InputError(
            f"run_dir={given.run_dir}: no evaluation had a score ({words}) to be best of"
        )
    read_as_training(given.file, arrays)
    try:
        found = predict_all(run, saved, arrays, given.run_dir)
    except InputError as error:
        raise InputError(f"{given.file}: {error}") from None
    print("\n".join(describe_predictions(run, saved, arrays, found)))
    counted = "y" in arrays and run.num_classes
    confusion = count_confusions(run, saved, arrays, found) if counted else None
    if given.confusion:
        if confusion is None:
            raise InputError(f"{given.file}: has no labels y, which --confusion counts")
        print("\n".join(describe_confusions(confusion, run.class_names)))
    if given.out:
        write_predictions(given.out, found, confusion, run.class_names, arrays.get("client"))
    return 0


def read_samples(run: LoadedRun, file: str, labels: bool) -> dict[str, np.ndarray]:
    """Returns x and what else there is of y, client and split, of an .npz, or of a file that is
    read as the run read its own; False `labels`: a table has none. Raises InputError for what
    cannot be read so.
    """
    if file.lower().endswith(".npz"):
        found = read_npz(file, ("x",), ("y", "client", "split"))
        return found if labels else {name: found[name] for name in found if name != "y"}
    pool = read_as_run(run, file, labels)
    arrays = {"x": np.asarray(pool.x)}
    if labels:
        names = pool.class_names
        arrays["y"] = pool.y if names is None else np.array(names)[pool.y]
    if pool.client is not None:
        names = pool.client_names
        arrays["client"] = pool.client if names is None else np.array(names)[pool.client]
    if pool.test is not None:
        arrays["split"] = pool.test.astype(np.int32)
    return arrays


def read_as_run(run: LoadedRun, file: str, labels: bool) -> Pool:
    """Returns the pool of a file, read with the settings of the run's own data."""
    source = dict(run.settings["dataset"]["source"])
    target = str(source.pop("_target_", ""))
    name = target.removeprefix(SOURCES)
    if not target.startswith(SOURCES) or name not in datasets.__all__ or "path" not in source:
        raise InputError(f"{file}: expected an .npz, for the run read no file of a kind like this")
    if source.get("number_text"):
        raise InputError(
            f"{file}: number_text=true numbers the text of each file by itself; expected an .npz of"
            " numbers"
        )
    known = run.class_names
    if "num_classes" in source and (known is None or all(name.isdecimal() for name in known)):
        # a label that no sample of this file has is no gap
        source["num_classes"] = run.num_classes if known is None else 1 + max(map(int, known))
    if name in TABLES and run.columns is not None:
        return read_new_samples(name, source | {"path": file}, run.columns, labels)
    if not labels and name not in TABLES:
        raise InputError(f"{file}: --no-labels is for tables, and dataset={name} reads none")
    if name in TABLES:
        unread = [] if labels else ["y"]
        if source["x"] is not None:  # else they would be features
            unread += ["time", "concept"]
        source |= dict.fromkeys(unread)
    elif run.columns is not None and source.get("x", "") is None:
        source["x"] = list(run.columns)
    return getattr(datasets, name)(**source | {"path": file})


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


def predict_all(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], run_dir: str
) -> Predictions:
    """Predicts every sample with its client's model; labels in `arrays` become class numbers;
    `run_dir` is that of the run. Raises InputError for arrays that do not fit.
    """
    x = run.check_samples(arrays["x"])
    for name in ("y", "client", "split"):
        if name in arrays and arrays[name].shape[:1] != (len(x),):
            raise InputError(f"{name} has shape {arrays[name].shape}, expected ({len(x)},)")
    if "y" in arrays:
        arrays["y"] = run.check_labels(arrays["y"], len(x))
    clients = arrays.get("client", np.zeros(len(x), np.int32))
    met = list_met(run, saved) if "client" in arrays else {}
    model, known = np.zeros(len(x), np.int32), np.zeros(len(x), bool)
    scores = np.zeros((len(x), run.outputs), np.float32)
    alike = run.final.scaling is None
    scaled = run.scale(x) if alike else np.empty(x.shape, np.float32)
    names, number = np.unique(clients, return_inverse=True)
    ends = np.cumsum(np.bincount(number))[:-1]
    waiting = []  # clients that are placed by their inputs
    for client, rows in zip(names, np.split(np.argsort(number, kind="stable"), ends), strict=True):
        place, here = met.get(clean_name(client), (None, None))
        known[rows] = here is not None
        if not alike:
            scaled[rows] = run.scale(x[rows], place, x[list_training(arrays, rows)])
        if here is None and "y" not in arrays and can_place(run, saved):
            waiting.append(rows)
            continue
        used = choose_model(run, saved, arrays, rows) if here is None else here
        model[rows] = used if isinstance(used, int) else np.argmax(used)
        if not isinstance(used, int):
            scores[rows] = run.infer(used, scaled[rows], saved)
    if waiting:
        training = [list_training(arrays, rows) for rows in waiting]
        each = [own if own.size else rows for own, rows in zip(training, waiting, strict=True)]
        owner = np.repeat(np.arange(len(each)), [len(rows) for rows in each])
        groups = place_clients(run_dir, run, scaled[np.concatenate(each)], owner)
        for rows, group in zip(waiting, groups, strict=True):
            model[rows] = group
    for used in np.unique(model) if saved.weights is None else ():
        rows = np.flatnonzero(model == used)
        scores[rows] = run.infer(int(used), scaled[rows], saved)
    return Predictions(run.targets.guess(scores), model, known, run.targets.chances(scores))


def list_met(run: LoadedRun, saved: SavedModels) -> dict[str, tuple[int, int | np.ndarray | None]]:
    """Returns the row in the run's table, and the model, or the weights [M] of all models, None:
    it has none, of each client by its name as text.
    """
    index = saved.model_index.tolist()
    used = index if saved.weights is None else list(saved.weights)
    each = zip(run.table["client"].tolist(), index, used, strict=True)
    return {
        clean_name(name): (place, mine if model >= 0 else None)
        for place, (name, model, mine) in enumerate(each)
    }


def list_training(arrays: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Returns which of the samples `rows` of a client are for training: all without a split."""
    return rows[~arrays["split"][rows]] if "split" in arrays else rows


def choose_model(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], rows: np.ndarray
) -> int | np.ndarray:
    """Returns the model for a client that has none, or its weights [M] of all models, by its
    training samples among `rows`.
    """
    if "y" not in arrays:
        who = f"client {arrays['client'][rows[0]]}" if "client" in arrays else "a file without ids"
        raise InputError(f"{who} has no model in this run, and without y none can be chosen")
    rows = list_training(arrays, rows)
    if not rows.size:
        raise InputError("split: a client that is new to the run has no training samples")
    find = run.find_model if saved.weights is None else run.find_weights
    return find(arrays["x"][rows], arrays["y"][rows], saved)


def describe_predictions(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], found: Predictions
) -> list[str]:
    """Returns the lines to print: one for clients with a model in the run, one for others."""
    scored: Any = arrays.get("split", np.ones(len(found.known), bool))
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
            score, guess = run.targets.score, found.predicted[rows]
            guess = guess.astype(float) if guess.dtype.kind == "f" else guess
            held = np.ones(len(guess), bool)
            value = float(run.targets.rate(*run.targets.sums(guess, arrays["y"][rows], held)))
            line += f", {score.words} {score.format(value)} on {rows.sum():,}"
            line += "" if "split" in arrays or found.known[rows].all() else ", which chose too"
        lines.append(line)
    return lines


def count_confusions(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], found: Predictions
) -> np.ndarray:
    """Returns how many samples of class c, those for testing where there is a split, each model
    takes for class d, [M, C, C] int64; of a mixture the samples count for its heaviest model.
    """
    rows = np.flatnonzero(arrays.get("split", np.ones(len(found.known), bool)))
    models, classes = len(jax.tree.leaves(saved.models)[0]), run.num_classes
    counts = np.zeros((models, classes, classes), np.int64)
    np.add.at(counts, (found.model[rows], arrays["y"][rows], found.predicted[rows]), 1)
    return counts


def describe_confusions(counts: np.ndarray, names: tuple[str, ...] | None) -> list[str]:
    """Returns the matrix of each model that has samples, as lines: true classes down, predicted
    ones across; of more than `MOST_CLASSES` the most frequent confusions alone.
    """
    classes, lines = name_classes(names, counts.shape[1]), []
    for model in np.flatnonzero(counts.sum((1, 2))):
        mine = counts[model]
        lines.append(f"model {model}, {mine.sum():,} samples: true classes down, predicted across")
        if len(classes) > MOST_CLASSES:
            wrong = mine * (1 - np.eye(len(mine), dtype=int))
            most = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CLASSES]
            pairs = ((*divmod(int(place), len(mine)), wrong.flat[place]) for place in most)
            lines += [f"  {classes[c]} as {classes[d]}: {n}" for c, d, n in pairs if n]
            continue
        rows = [[name, *map(str, row)] for name, row in zip(classes, mine, strict=True)]
        table = np.array([["", *classes], *rows])
        wide = np.char.str_len(table).max(0)
        lines += ["  " + "  ".join(map(str.rjust, row, wide)) for row in table.tolist()]
    return lines


def name_classes(names: tuple[str, ...] | None, classes: int) -> list[str]:
    """Returns what classes are called; their numbers, where they have no names."""
    own = names or ()
    return [*(shorten(name)[1:-1] for name in own), *map(str, range(len(own), classes))]


def write_predictions(
    path: str,
    found: Predictions,
    confusion: np.ndarray | None,
    names: tuple[str, ...] | None,
    client: np.ndarray | None,
) -> None:
    """Writes the predictions as a table, or as arrays of an npz file.

    Args: `path` ends in what it is written as; `found` are the predictions of N samples;
    `confusion` [M, C, C] is written to an npz, None: labels are not known; `names` are those of
    classes, None: they have numbers; `client` [N] has each sample's, None: it is not known.
    """
    arrays: dict[str, Any] = {"client": client} | found._asdict()
    arrays = {name: value for name, value in arrays.items() if value is not None}
    if confusion is not None:
        arrays["confusion"] = confusion
    if names is not None and found.probabilities is not None:
        numbers = range(len(names), found.probabilities.shape[1])
        arrays["classes"] = np.array([*names, *map(str, numbers)])
        arrays["predicted"] = arrays["classes"][found.predicted]
    try:
        if path.lower().endswith(".csv"):
            write_columns(path, list_rows(arrays))
        elif path.lower().endswith(".parquet"):
            with atomic_write(path) as temporary:
                to_frame(list_rows(arrays)).to_parquet(temporary)
        else:
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, **arrays)
    except OSError as error:
        raise InputError(f"--out={path}: cannot be written: {error.strerror}") from None
    print(f"written to {path}")


def list_rows(arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Returns a row for each sample, with a column for each class or label."""
    columns = {}
    for name in ("client", "predicted", "model", "known", "probabilities"):
        values = arrays.get(name)
        if values is not None and values.ndim == 1:
            columns[name] = values.tolist()
        elif values is not None:
            classes = arrays["classes"] if "classes" in arrays else range(values.shape[1])
            columns |= dict(zip((f"{name} {c}" for c in classes), values.T.tolist(), strict=True))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
