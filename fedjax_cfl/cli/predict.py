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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.algorithms.flux import Descriptions, describe_clients, nearest_center
from fedjax_cfl.cli.outputs import print_error
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local
from fedjax_cfl.data import datasets
from fedjax_cfl.data.datasets.files import number_clients
from fedjax_cfl.data.datasets.pool import read_test_mask
from fedjax_cfl.data.datasets.readers import list_names, read_npz, shorten
from fedjax_cfl.data.datasets.table import read_new_samples
from fedjax_cfl.data.federated import federate
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import clean_name, to_frame
from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.callbacks import CHECKPOINTS
from fedjax_cfl.runs.load import LoadedRun, SavedModels, load_run
from fedjax_cfl.runs.regular_files import explain
from fedjax_cfl.runs.results import atomic_write, write_columns
from fedjax_cfl.runs.saved_models import nest_arrays
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.types import Partition, Pool

if TYPE_CHECKING:
    from pandas import DataFrame

SOURCES = "fedjax_cfl.data.datasets."  # readers that the settings of a run may name
FLUX = "fedjax_cfl.algorithms.flux"
MEMORY = "[0].memory."  # how leaves of a checkpoint begin that are the method's own
TABLES = ("csv", "jsonl", "parquet")
MOST_CLASSES = 20  # of a confusion matrix that is printed


class Samples(NamedTuple):
    """The samples of a file that lack no value."""

    x: np.ndarray  # [N, ...]
    row: np.ndarray  # [N], in the file, the first is 0
    y: np.ndarray | None = None  # [N], or labels [N, T]
    client: np.ndarray | None = None  # [N], names
    split: np.ndarray | None = None  # [N] bool, True: for testing

    def take(self, rows: np.ndarray) -> "Samples":
        """Returns some of the samples."""
        arrays = {name: array for name, array in self._asdict().items() if array is not None}
        return Samples(**{name: array[rows] for name, array in arrays.items()})


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
        words = run.task.targets.score.words
        raise InputError(
            f"run_dir={given.run_dir}: no evaluation had a score ({words}) to be best of"
        )
    samples, total = read_samples(run, given.file, labels=not given.no_labels)
    missing = np.setdiff1d(np.arange(total), samples.row)
    try:
        samples, found, unknown = predict_all(run, saved, samples, given.run_dir)
    except InputError as error:
        raise InputError(f"{given.file}: {error}") from None
    left = describe_left_out(missing, total, unknown)
    if not len(samples.row):
        raise InputError(f"{given.file}: {left}")
    print("\n".join(describe_predictions(run, saved, samples, found)))
    counted = samples.y is not None and run.num_classes
    confusion = count_confusions(run, saved, samples, found) if counted else None
    if given.confusion:
        if confusion is None:
            raise InputError(f"{given.file}: has no labels y, which --confusion counts")
        print("\n".join(describe_confusions(confusion, run.list_classes())))
    if given.out:
        columns = {"row": samples.row} if left else {}
        columns |= {} if samples.client is None else {"client": samples.client}
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


# reading


def read_samples(run: LoadedRun, file: str, labels: bool) -> tuple[Samples, int]:
    """Returns the samples of an .npz, or of a file that is read as the run read its own, and how
    many rows it has; False `labels`: it has none. Raises InputError for what cannot be read so.
    """
    if not file.lower().endswith(".npz"):
        pool, rows, total = read_as_run(run, file, labels)
        y, client = pool.y if labels else None, pool.client
        if y is not None and pool.class_names is not None:
            y = np.array(pool.class_names)[y]
        if client is not None and pool.client_names is not None:
            client = np.array(pool.client_names)[client]
        return Samples(np.asarray(pool.x), rows, y, client, pool.test), total
    names = ("y", "client", "split") if labels else ("client", "split")
    arrays = read_npz(file, ("x",), names)
    x = np.atleast_1d(arrays["x"])
    total = len(x)
    for name in set(names) & set(arrays):
        if arrays[name].shape[:1] != (total,):
            raise InputError(f"{file}: {name} has shape {arrays[name].shape}, expected ({total},)")
    if "client" in arrays:
        ids, number = number_clients(file, arrays["client"], total)
        arrays["client"] = ids[number]
    if "split" in arrays:
        arrays["split"] = read_test_mask(file, arrays["split"], np.zeros(total))
    whole = ~np.isnan(x.reshape(total, -1)).any(1) if x.dtype.kind == "f" else np.ones(total, bool)
    arrays |= {"x": x, "row": np.arange(total)}
    return Samples(**arrays).take(np.flatnonzero(whole)), total


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


# predicting


def predict_all(
    run: LoadedRun, saved: SavedModels, samples: Samples, run_dir: str
) -> tuple[Samples, Predictions, dict[str, np.ndarray]]:
    """Predicts every sample with its client's model. Returns the samples that have one, with class
    numbers for labels, what is predicted of them, and the rows of each client that no model is
    found for, by its name. `run_dir` is that of the run. Raises InputError for samples that do not
    fit.
    """
    count = len(samples.row)
    if count:
        x, y = run.check_samples(samples.x), samples.y
        samples = samples._replace(x=x, y=None if y is None else run.check_labels(y, count))
    clients = np.zeros(count, np.int32) if samples.client is None else samples.client
    places = {clean_name(name): k for k, name in enumerate(run.table["client"].tolist())}
    model, known = np.zeros(count, np.int32), np.zeros(count, bool)
    alike = run.final.scaling is None
    scaled = run.scale(samples.x) if alike and count else np.empty(samples.x.shape, np.float32)
    # models and mixtures with those who use them, clients to be placed by inputs, and the others
    used, waiting, unknown = {}, [], {}
    names, number = np.unique(clients, return_inverse=True)
    ends = np.cumsum(np.bincount(number))[:-1]
    for client, rows in zip(names, np.split(np.argsort(number, kind="stable"), ends), strict=True):
        training = rows if samples.split is None else rows[~samples.split[rows]]
        place = None if samples.client is None else places.get(clean_name(client))
        predictor = saved.find_used(place)
        known[rows] = predictor is not None
        if not alike:
            scaled[rows] = run.scale(samples.x[rows], place, samples.x[training])
        if predictor is None and samples.y is None and can_place(run, saved):
            waiting.append((rows, training if training.size else rows))
            continue
        if predictor is None and samples.y is not None and training.size:
            find = run.find_model if saved.weights is None else run.find_weights
            predictor = find(samples.x[training], samples.y[training], saved)
        if predictor is None:
            unknown[str(client) if samples.client is not None else ""] = rows
        elif isinstance(predictor, int):
            used.setdefault(predictor, (predictor, []))[1].append(rows)
        else:
            used[str(client)] = predictor, [rows]
    if waiting:
        inputs = scaled[np.concatenate([rows for _, rows in waiting])]
        owner = np.repeat(np.arange(len(waiting)), [len(rows) for _, rows in waiting])
        groups = place_clients(run_dir, run, inputs, owner).tolist()
        for (rows, _), group in zip(waiting, groups, strict=True):
            used.setdefault(group, (group, []))[1].append(rows)
    scores = np.zeros((count, run.outputs), np.float32)
    for predictor, parts in used.values():
        rows = np.concatenate(parts)
        scores[rows] = run.infer(predictor, scaled[rows], saved)
        model[rows] = predictor if isinstance(predictor, int) else np.argmax(predictor)
    kept = np.setdiff1d(np.arange(count), np.concatenate([[], *unknown.values()])).astype(int)
    guess, chances = (f(scores[kept]) for f in (run.task.targets.guess, run.task.targets.chances))
    return samples.take(kept), Predictions(guess, model[kept], known[kept], chances), unknown


# clients without labels, of FLUX


def can_place(run: LoadedRun, saved: SavedModels) -> bool:
    """Returns whether the method of a run places clients without labels, by a description of their
    inputs, and its `saved` models are those of the groups that it has found.
    """
    own = run.settings["algorithm"]
    by_inputs = own["_target_"] == FLUX and own["newcomers"] == "inputs"
    return by_inputs and not run.settings["personal"] and saved.round > own["warm_up"]


def place_clients(run_dir: str, run: LoadedRun, x: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Returns the groups [U] of new clients, whose descriptions are nearest to theirs in the last
    checkpoint of `run_dir`, by their samples x [N, ...], as `run.scale` returns them; `owner` [N]
    is the client of each, from 0 on.

    Raises InputError where the checkpoint is not there or damaged.
    """
    folder = Path(run_dir).expanduser() / CHECKPOINTS
    try:
        stored = checkpoint.load_arrays(folder)
        parts = {name.removeprefix(MEMORY): jnp.asarray(v) for name, v in stored.items()}
        extractor = nest_arrays({n: parts[n] for n in parts if n.startswith("extractor")})
        memory = Descriptions(extractor, *(parts[name] for name in ("low", "high", "centers")))
        expected = jax.eval_shape(run.task.init, jax.random.key(0))
        shapes = jax.tree.map(lambda leaf: (1, *leaf.shape), expected)
        if shapes != jax.tree.map(lambda leaf: leaf.shape, memory.extractor):
            raise ValueError("it has another model")
        active = parts["[0].active"]
    except Exception as error:  # whatever damage does to a reader
        raise InputError(
            f"{folder}: the last checkpoint, by which clients without labels are placed, cannot be"
            f" read: {explain(error)}; give y"
        ) from None
    pool = Pool(x, np.zeros(len(owner), np.int32), run.num_classes)  # all for training, of class 0
    holdings = Partition(np.arange(len(owner)), owner, np.zeros(len(owner), bool))
    local = Local(0.1, 1, 1, execution=make_execution(make_mesh(1)))
    describe = describe_clients(run.task, local, run.settings["algorithm"]["latent"])
    everyone = jnp.ones(int(owner.max()) + 1, bool)
    described = describe(memory.extractor, federate(pool, holdings), everyone)
    return np.asarray(nearest_center(memory, described[:, :2], active))


# what is said of them


def describe_predictions(
    run: LoadedRun, saved: SavedModels, samples: Samples, found: Predictions
) -> list[str]:
    """Returns the lines to print: one for clients with a model in the run, one for others."""
    scored = np.ones(len(found.known), bool) if samples.split is None else samples.split
    lines = [f"{run.summary['algorithm']}, models of round {saved.round}"]
    kinds = (("clients of the run", found.known), ("clients new to the run", ~found.known))
    for name, rows in kinds:
        if not rows.any():
            continue
        models = ", ".join(map(str, np.unique(found.model[rows])))
        by = "models" if saved.weights is None else "mixtures, the heaviest of each model"
        line = f"{name}: {rows.sum():,} samples, {by} {models}"
        rows = rows & scored
        if samples.y is not None and rows.any():
            score, guess = run.task.targets.score, found.predicted[rows]
            guess = guess.astype(float) if guess.dtype.kind == "f" else guess
            sums = run.task.targets.sums(guess, samples.y[rows], np.ones(len(guess), bool))
            value = float(run.task.targets.rate(*sums))
            line += f", {score.words} {score.format(value)} on {rows.sum():,}"
            chose = samples.split is None and not found.known[rows].all()
            line += ", which chose too" if chose else ""
        lines.append(line)
    return lines


def count_confusions(
    run: LoadedRun, saved: SavedModels, samples: Samples, found: Predictions
) -> np.ndarray:
    """Returns how many samples of class c, those for testing where there is a split, each model
    takes for class d, [M, C, C] int64; of a mixture the samples count for its heaviest model.
    """
    assert samples.y is not None
    rows = slice(None) if samples.split is None else samples.split
    models, classes = len(jax.tree.leaves(saved.models)[0]), run.num_classes
    counts = np.zeros((models, classes, classes), np.int64)
    np.add.at(counts, (found.model[rows], samples.y[rows], found.predicted[rows]), 1)
    return counts


def describe_confusions(counts: np.ndarray, names: list[str]) -> list[str]:
    """Returns the matrix of each model that has samples, as lines: true classes down, predicted
    ones across; of more than `MOST_CLASSES` the most frequent confusions alone.
    """
    import pandas  # only now: few ask for it

    classes, lines = [shorten(name)[1:-1] for name in names], []
    for model in np.flatnonzero(counts.sum((1, 2))):
        mine = counts[model]
        lines.append(f"model {model}, {mine.sum():,} samples: true classes down, predicted across")
        if len(classes) > MOST_CLASSES:
            wrong = mine * (1 - np.eye(len(mine), dtype=int))
            most = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CLASSES]
            pairs = ((*divmod(int(place), len(mine)), wrong.flat[place]) for place in most)
            lines += [f"  {classes[c]} as {classes[d]}: {n}" for c, d, n in pairs if n]
        else:
            table = pandas.DataFrame(mine, classes, classes).to_string()
            lines += [f"  {line}" for line in table.splitlines()]
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
    classes = None if run.class_names is None else np.array(run.list_classes())
    if classes is not None:
        arrays["predicted"] = classes[found.predicted]
    try:
        if path.lower().endswith(".npz"):
            arrays |= {"classes": classes, "confusion": confusion}
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, **{k: v for k, v in arrays.items() if v is not None})
        elif path.lower().endswith(".csv"):
            rows: Any = split_columns(arrays, classes).to_dict("records")
            write_columns(path, rows)
        else:
            with atomic_write(path) as temporary:
                split_columns(arrays, classes).to_parquet(temporary)
    except OSError as error:
        raise InputError(f"--out={path}: cannot be written: {error.strerror}") from None
    print(f"written to {path}")


def split_columns(arrays: dict[str, np.ndarray], classes: np.ndarray | None) -> "DataFrame":
    """Returns arrays [N], and [N, C] with a column for each class or label, as a table."""
    columns = {}
    for name, values in arrays.items():
        if values.ndim == 1:
            columns[name] = values.tolist()
        else:
            each = range(values.shape[1]) if classes is None else classes
            columns |= dict(zip((f"{name} {c}" for c in each), values.T.tolist(), strict=True))
    return to_frame(columns)
