"""`fedjax-cfl predict RUN_DIR FILE`: predicts samples with the models of a finished run.

An .npz has x [N, ...] and, if you like, y [N] (class numbers, or names; the numbers that a run
regressed; or labels [N, T]), client [N] (names as in clients.parquet) and split [N] (0 train, 1
test); any other file, or folder, is read with the settings by which the run read its own, the
columns of a table by name; others are not read. A client of the run uses its own model.
A client without a model in the run, or a file without `client`, takes the model of lowest
loss on its own training samples (on all of them without split), so it needs y, unless the method
places clients by their inputs alone. Where clients of the run mix all models, it finds its weights
on them. Rows without a value, and those of a client that no model can be found for, are left out:
the others are predicted and written, a line says which are not, and the exit status is 1.
"""

import argparse
import inspect
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cfl.cli.outputs import print_error
from fedjax_cfl.data import datasets
from fedjax_cfl.data.datasets.files import number_clients
from fedjax_cfl.data.datasets.pool import read_test_mask
from fedjax_cfl.data.datasets.readers import list_names, read_npz, shorten
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


def make_parser() -> argparse.ArgumentParser:
    """Returns what reads the arguments."""
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
    return parser


def main(argv: list[str]) -> int:
    """Prints how many samples were predicted and how well; writes them with --out."""
    given = parse_arguments(make_parser(), argv)
    files = [Path(name) for name in (given.out, given.file) if name]
    if given.out and all(file.exists() for file in files) and os.path.samefile(*files):
        raise InputError(f"--out={given.out}: would replace the samples; choose another file")
    if given.out and not given.out.lower().endswith((".csv", ".npz", ".parquet")):
        raise InputError(f"--out={given.out}: must end in .csv, .npz or .parquet")
    run = load_run(given.run_dir)
    if given.confusion and not run.num_classes:
        raise InputError("--confusion: counts classes, and the run had none")
    saved = run.best if given.best else run.final
    if saved is None:
        words = run.targets.score.words
        raise InputError(
            f"run_dir={given.run_dir}: no evaluation had a score ({words}) to be best of"
        )
    arrays, total = read_samples(run, given.file, labels=not given.no_labels)
    missing = np.setdiff1d(np.arange(total), arrays["row"])
    try:
        found, unknown = predict_all(run, saved, arrays, given.run_dir)
    except InputError as error:
        raise InputError(f"{given.file}: {error}") from None
    left = describe_left_out(missing, total, unknown)
    if not len(arrays["row"]):
        raise InputError(f"{given.file}: {left}")
    print("\n".join(describe_predictions(run, saved, arrays, found)))
    counted = "y" in arrays and run.num_classes
    confusion = count_confusions(run, saved, arrays, found) if counted else None
    if given.confusion:
        if confusion is None:
            raise InputError(f"{given.file}: has no labels y, which --confusion counts")
        print("\n".join(describe_confusions(confusion, run.list_classes())))
    if given.out:
        columns = {name: arrays[name] for name in ("row", "client") if name in arrays}
        if not left:
            del columns["row"]  # that of each sample in the file
        write_predictions(given.out, run, found, confusion, columns)
    if left:
        print_error(f"{given.file}: {left}")
    return int(bool(left))


def describe_left_out(missing: np.ndarray, total: int, unknown: dict[str, np.ndarray]) -> str:
    """Returns which rows are not predicted, and why; nothing where all are.

    Args: `missing` are those without a value, of `total`; `unknown` has those of each client that
    has no model.
    """
    reasons = []
    if missing.size:
        shown = list_names(list(map(str, missing.tolist())))
        reasons.append(f"a value is missing in row {shown} (the first is 0)")
    if unknown:
        who = list_names(list(filter(None, unknown))) or "of a file without client"
        reasons.append(
            f"client {who} has no model in this run, and without y of training samples none can be"
            " chosen"
        )
    count = missing.size + sum(map(len, unknown.values()))
    return f"{count:,} of {total:,} rows are not predicted: {'; '.join(reasons)}" if count else ""


def read_samples(run: LoadedRun, file: str, labels: bool) -> tuple[dict[str, np.ndarray], int]:
    """Returns x, what else there is of y, client and split, and the row of each sample that lacks
    no value, and how many rows there are; of an .npz, or of a file that is read as the run read
    its own; False `labels`: it has none. Raises InputError for what cannot be read so.
    """
    if file.lower().endswith(".npz"):
        names = ("y", "client", "split") if labels else ("client", "split")
        arrays = read_npz(file, ("x",), names)
        total = len(arrays["x"]) if arrays["x"].ndim else 1
        for name in set(names) & set(arrays):
            if arrays[name].shape[:1] != (total,):
                raise InputError(
                    f"{file}: {name} has shape {arrays[name].shape}, expected ({total},)"
                )
        if "client" in arrays:
            ids, number = number_clients(file, arrays["client"], total)
            arrays["client"] = ids[number]
        if "split" in arrays:
            arrays["split"] = read_test_mask(file, arrays["split"], np.zeros(total))
        rows = list_whole(arrays["x"])
        return {name: array[rows] for name, array in arrays.items()} | {"row": rows}, total
    pool, rows, total = read_as_run(run, file, labels)
    arrays = {"x": np.asarray(pool.x), "row": rows}
    y = pool.y if labels else None
    named = {"y": (y, pool.class_names), "client": (pool.client, pool.client_names)}
    for name, (values, names) in (named | {"split": (pool.test, None)}).items():
        if values is not None:
            arrays[name] = values if names is None else np.array(names)[values]
    return arrays, total


def list_whole(x: np.ndarray) -> np.ndarray:
    """Returns which samples x [N, ...] lack no value."""
    if x.dtype.kind != "f" or not x.ndim:
        return np.arange(len(x) if x.ndim else 1)
    return np.flatnonzero(~np.isnan(x.reshape(len(x), -1)).any(1))


def read_as_run(run: LoadedRun, file: str, labels: bool) -> tuple[Pool, np.ndarray, int]:
    """Returns the pool of a file, read with the settings of the run's own data, the row of each
    sample, and how many rows there are.
    """
    source = dict(run.settings["dataset"]["source"])
    target = str(source.pop("_target_", ""))
    name = target.removeprefix(SOURCES)
    if not target.startswith(SOURCES) or name not in datasets.__all__ or "path" not in source:
        raise InputError(f"{file}: expected an .npz, for the run read no file of a kind like this")
    read = getattr(datasets, name)
    try:
        bound = inspect.signature(read).bind(**source)
    except TypeError as error:
        raise InputError(
            f"dataset.source._target_={target}: {error}; correct the run's .hydra/config.yaml"
        ) from None
    bound.apply_defaults()
    source = bound.arguments | {"path": file}
    if source.get("number_text"):
        raise InputError(
            f"{file}: number_text=true numbers the text of each file by itself; expected an .npz of"
            " numbers"
        )
    classes = run.class_names
    if "num_classes" in source and (classes is None or all(map(str.isdecimal, classes))):
        # a label that no sample of this file has is no gap
        source["num_classes"] = run.num_classes if classes is None else 1 + max(map(int, classes))
    if name in TABLES:
        if run.columns is not None:
            return read_new_samples(name, source, run.columns, labels)
        unread = [] if labels else ["y"]
        if source["x"] is not None:  # else they would be features
            unread += ["time", "concept"]
        source |= dict.fromkeys(unread)
    elif not labels:
        raise InputError(f"{file}: --no-labels is for tables, and dataset={name} reads none")
    elif run.columns is not None and source.get("x", "") is None:
        source["x"] = list(run.columns)
    pool = read(**source)
    return pool, np.arange(len(pool.x)), len(pool.x)


def predict_all(
    run: LoadedRun, saved: SavedModels, arrays: dict[str, np.ndarray], run_dir: str
) -> tuple[Predictions, dict[str, np.ndarray]]:
    """Predicts every sample with its client's model. Returns what is predicted, and the rows of
    each client that no model is found for, by its name; of `arrays` these samples are taken away,
    and labels become class numbers. `run_dir` is that of the run. Raises InputError for arrays
    that do not fit.
    """
    x = run.check_samples(arrays["x"]) if len(arrays["x"]) else arrays["x"]
    if "y" in arrays and len(x):
        arrays["y"] = run.check_labels(arrays["y"], len(x))
    clients = arrays.get("client", np.zeros(len(x), np.int32))
    met = list_met(run, saved) if "client" in arrays else {}
    model, known = np.zeros(len(x), np.int32), np.zeros(len(x), bool)
    scores = np.zeros((len(x), run.outputs), np.float32)
    alike = run.final.scaling is None
    scaled = run.scale(x) if alike and len(x) else np.empty(x.shape, np.float32)
    names, number = np.unique(clients, return_inverse=True)
    ends = np.cumsum(np.bincount(number))[:-1]
    waiting, unknown = [], {}  # clients that are placed by their inputs, and those without a model
    for client, rows in zip(names, np.split(np.argsort(number, kind="stable"), ends), strict=True):
        place, used = met.get(clean_name(client), (None, None))
        known[rows] = used is not None
        if not alike:
            scaled[rows] = run.scale(x[rows], place, x[list_training(arrays, rows)])
        if used is None and "y" not in arrays and can_place(run, saved):
            waiting.append(rows)
            continue
        used = choose_model(run, saved, arrays, rows) if used is None else used
        if used is None:
            unknown[str(client) if "client" in arrays else ""] = rows
            continue
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
    kept = np.setdiff1d(np.arange(len(x)), np.concatenate([[], *unknown.values()])).astype(int)
    for used in np.unique(model[kept]) if saved.weights is None else ():
        rows = kept[model[kept] == used]
        scores[rows] = run.infer(int(used), scaled[rows], saved)
    arrays |= {name: array[kept] for name, array in arrays.items()}
    scores = scores[kept]
    guess, chances = run.targets.guess(scores), run.targets.chances(scores)
    return Predictions(guess, model[kept], known[kept], chances), unknown


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
) -> int | np.ndarray | None:
    """Returns the model for a client that has none, or its weights [M] of all models, by its
    training samples among `rows`; None: they have no labels, or there are none.
    """
    rows = list_training(arrays, rows)
    if "y" not in arrays or not rows.size:
        return None
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


def describe_confusions(counts: np.ndarray, names: list[str]) -> list[str]:
    """Returns the matrix of each model that has samples, as lines: true classes down, predicted
    ones across; of more than `MOST_CLASSES` the most frequent confusions alone.
    """
    classes, lines = [shorten(name)[1:-1] for name in names], []
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


def write_predictions(
    path: str,
    run: LoadedRun,
    found: Predictions,
    confusion: np.ndarray | None,
    columns: dict[str, np.ndarray],
) -> None:
    """Writes the predictions as a table, or as arrays of an npz file.

    Args: `path` ends in what it is written as; `found` are the predictions of N samples;
    `confusion` [M, C, C] is written to an npz, None: labels are not known; `columns` [N] come
    before them.
    """
    arrays: dict[str, Any] = columns | {k: v for k, v in found._asdict().items() if v is not None}
    if run.class_names is not None:
        arrays["classes"] = np.array(run.list_classes())
        arrays["predicted"] = arrays["classes"][found.predicted]
    try:
        if path.lower().endswith(".npz"):
            arrays |= {} if confusion is None else {"confusion": confusion}
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, **arrays)
        elif path.lower().endswith(".csv"):
            table = list_columns(arrays)
            rows = zip(*table.values(), strict=True)
            write_columns(path, [dict(zip(table, row, strict=True)) for row in rows])
        else:
            with atomic_write(path) as temporary:
                to_frame(list_columns(arrays)).to_parquet(temporary)
    except OSError as error:
        raise InputError(f"--out={path}: cannot be written: {error.strerror}") from None
    print(f"written to {path}")


def list_columns(arrays: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    """Returns the columns of a table, with one for each class or label."""
    columns = {}
    for name, values in arrays.items():
        if name == "classes":
            continue
        if values.ndim == 1:
            columns[name] = values.tolist()
        else:
            classes = arrays["classes"] if "classes" in arrays else range(values.shape[1])
            columns |= dict(zip((f"{name} {c}" for c in classes), values.T.tolist(), strict=True))
    return columns
