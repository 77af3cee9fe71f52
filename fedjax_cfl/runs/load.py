"""A finished run, read back: settings, rows, clients and models that predict.

Its models are in two files, final.npz (the last round) and best.npz (the best evaluation), see
`saved_models`.

Only the package's own models are built from a run's settings. Your own module is an
argument, so that reading a directory imports nothing that it names.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl import models
from fedjax_cfl.client.mixture import explain_samples, mix_predictions
from fedjax_cfl.data.datasets.pool import check_pool, read_features, to_array, to_float32
from fedjax_cfl.data.scaling import Scaling
from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.formatting import clean_name, describe_settings, name_columns, to_frame
from fedjax_cfl.models import as_task, multilabel, regression
from fedjax_cfl.runs.assignments import Assignments, read_assignments
from fedjax_cfl.runs.callbacks import MIXTURE
from fedjax_cfl.runs.regular_files import check_run, refuse_damage
from fedjax_cfl.runs.results import read_clients, read_metrics, read_settings, read_summary
from fedjax_cfl.runs.saved_models import BEST_FILE, FINAL_FILE, load_arrays, nest_arrays
from fedjax_cfl.scores import describe_rows, pick_columns
from fedjax_cfl.tasks import Targets, count_outputs, kind_of
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Params, Pool, Task
from fedjax_cfl.validation import checked

if TYPE_CHECKING:
    from pandas import DataFrame

BLOCK = 256  # samples per forward pass
OWN_MODELS = "fedjax_cfl.models."


class SavedModels(NamedTuple):
    """The models of one round."""

    round: int
    models: Params  # [M, ...], NumPy
    model_index: np.ndarray  # [K] int32 into models, -1: the client has none
    # [K, M] and [M, C], where clients mix all models, see `ServedModels`; None: they use one
    weights: np.ndarray | None = None
    label_shares: np.ndarray | None = None
    scaling: Scaling | None = None  # of the run's samples, with its last models; None: none

    def find_used(self, place: int | None) -> int | np.ndarray | None:
        """Returns the model of the client in row `place` of the run's table, or its weights [M] of
        all models; None: it has none, or is not there.
        """
        if place is None or self.model_index[place] < 0:
            return None
        return int(self.model_index[place]) if self.weights is None else self.weights[place]


class LoadedRun(NamedTuple):
    """What `load_run` returns. Clients go by their name, as `table["client"]` has it. Samples x
    are as they were before the run; where it standardised them, methods do so, too.
    """

    settings: dict[str, Any]  # every setting of the run, nested as in conf/
    summary: dict[str, Any]  # summary.json
    rows: list[dict[str, Any]]  # metrics.jsonl, a row per evaluation
    table: dict[str, np.ndarray]  # clients.parquet, a column [K] each
    assignments: Assignments | None  # groups at every evaluation, None where none were kept
    final: SavedModels
    best: SavedModels | None  # None where no evaluation had an accuracy
    task: Task  # of the model, without its L2 penalty
    sample_shape: tuple[int, ...]
    num_classes: int  # 0: y were numbers that the run regressed, or labels
    class_names: tuple[str, ...] | None = None  # of class 0, 1, ..., where labels were text
    outputs: int = 1  # of the models: C classes, 1 number, or T labels
    columns: tuple[str, ...] | None = None  # of features [F], None: they have no names
    pixels: bool | None = None  # samples were uint8, read as x / 255; None: an old run does not say

    def frame(self) -> "DataFrame":
        """Returns the rows as a pandas.DataFrame: a row per test."""
        return to_frame(self.rows)

    def __repr__(self) -> str:
        """Shows the last test, and what ran."""
        names = ("algorithm", "dataset", "model", "seed")
        shown = describe_settings({name: self.summary.get(name) for name in names})
        return f"<{describe_rows(self.rows)}{shown}>"

    def _repr_html_(self) -> str:
        """Shows the last five tests in a notebook."""
        return to_frame(map(pick_columns, self.rows[-5:])).to_html(index=False)

    def find_client(self, client: str | int) -> int:
        """Returns the row of a client in `table`. Raises InputError for a name that the
        run does not have.
        """
        names = list(map(clean_name, self.table["client"].tolist()))
        if (wanted := clean_name(client)) not in names:
            nearest = suggest_nearest(wanted, names)
            raise InputError(f"client={client}: the run has no client of this name{nearest}")
        return names.index(wanted)

    def predict(self, client: str | int, x: Any, saved: SavedModels | None = None) -> np.ndarray:
        """Returns the classes [B] that a client's model, or its mixture of models, gives samples
        x [B, ...]: their names where they have some, else int32; of a regression the numbers [B]
        float32, of labels which of them [B, T] int32, 0 or 1.

        `saved` is `final` unless you give `best`. Raises InputError for a client without
        a model; `find_model`, of mixtures `find_weights`, finds one for it.
        """
        return self._name(self.task.targets.guess(self._score(client, x, saved)))

    def predict_proba(
        self, client: str | int, x: Any, saved: SavedModels | None = None
    ) -> np.ndarray:
        """Returns the probabilities [B, C] float32 of the classes, where `predict` returns the
        likeliest one, or of each label [B, T]. Raises InputError for a regression.
        """
        found = self.task.targets.chances(self._score(client, x, saved))
        if found is None:
            raise InputError(
                "predict_proba: the run regressed numbers, which have no probabilities"
            )
        return found

    def _score(self, client: str | int, x: Any, saved: SavedModels | None) -> np.ndarray:
        saved = saved or self.final
        place = self.find_client(client)
        used = saved.find_used(place)
        if used is None:
            find = "find_model" if saved.weights is None else "find_weights"
            raise InputError(
                f"client={client}: never took part and has no model; {find}(x, y)"
                " chooses one by its samples"
            )
        return self.infer(used, self.scale(x, place), saved)

    def predict_with(
        self, model: int | np.ndarray, x: Any, saved: SavedModels | None = None, like: Any = None
    ) -> np.ndarray:
        """Returns the classes [B], numbers [B] or labels [B, T], see `predict`, that model
        number `model`, or the mixture of all models with the weights `model` [M], gives samples x
        [B, ...]: the mean of their probabilities.

        `like` [n, ...], the training samples of their client, is for runs that standardised each
        client by its own, None: x itself.
        """
        scaled = self.scale(x, like=x if like is None else like)
        return self._name(self.task.targets.guess(self.infer(model, scaled, saved or self.final)))

    def _name(self, guess: np.ndarray) -> np.ndarray:
        return guess if self.class_names is None else np.array(self.list_classes())[guess]

    def list_classes(self) -> list[str]:
        """Returns the names of the C classes; the number of one that has none."""
        names = self.class_names or ()
        return [*names, *map(str, range(len(names), self.num_classes))]

    def scale(self, x: Any, place: int | None = None, like: Any = None) -> np.ndarray:
        """Returns samples x [B, ...] as the models take them: standardised as those of the client
        in row `place` of `table`, or of one whose training samples are `like` [n, ...].
        """
        samples = self.check_samples(x)
        scaling = self.final.scaling
        if scaling is None:
            return to_float32(samples)
        if place is not None:
            return scaling.apply(samples, place)
        training = samples[:0] if like is None or not len(like) else self.check_samples(like)
        return scaling.fit(training).apply(samples)

    def infer(self, model: int | np.ndarray, samples: np.ndarray, saved: SavedModels) -> np.ndarray:
        """Returns the outputs [B, C] float32 that a model gives samples [B, ...] that `scale` has
        returned, of a mixture the logarithms of probabilities; `model` is as in `predict_with`.
        """
        total = jax.tree.leaves(saved.models)[0].shape[0]
        if not np.ndim(model):
            if not 0 <= model < total:
                raise InputError(f"model={model}: between 0 and {total - 1} is allowed")
            return map_blocks(_predict, self.task, (take_rows(saved.models, model), None), samples)
        weights = np.asarray(model, np.float32)
        if weights.shape != (total,):
            raise InputError(
                f"model has shape {weights.shape}, expected weights of shape ({total},)"
            )
        if not (weights >= 0).all() or not np.isclose(weights.sum(), 1, atol=1e-3):
            raise InputError("model: weights must be >= 0 and have the sum 1")
        return map_blocks(_predict, self.task, (saved.models, weights), samples)

    def find_weights(self, x: Any, y: Any, saved: SavedModels | None = None) -> np.ndarray:
        """Returns the weights [M] float32 with which a client that took no part in the run mixes
        its models, by samples x [B, ...] with labels y [B]: one E-step from equal weights, see
        `client.mixture`.

        Raises InputError for a run whose clients use one model each.
        """
        saved, samples = saved or self.final, self.scale(x, like=x)
        if saved.weights is None:
            raise InputError("clients of this run use one model each; find_model(x, y) chooses one")
        labels, given = self.check_labels(y, len(samples)), (saved.models, saved.label_shares)
        parts = map_blocks(_explain, self.task, given, samples, labels)
        total = parts.sum(0, dtype=float)
        return (total / total.sum()).astype(np.float32)

    def find_model(self, x: Any, y: Any, saved: SavedModels | None = None) -> int:
        """Returns the number of the model of lowest mean loss on samples x [B, ...] with labels,
        or numbers, y [B]: how a client joins that took no part in the run (as in IFCA).

        Only models that serve a client are tried. Raises InputError for labels that the
        run does not have, and for a run whose clients mix all models.
        """
        saved, samples = saved or self.final, self.scale(x, like=x)
        if saved.weights is not None:
            raise InputError("clients of this run mix all models; find_weights(x, y) says how")
        labels = self.check_labels(y, len(samples))
        used = np.unique(saved.model_index[saved.model_index >= 0])
        if not used.size:
            raise InputError("no client of the run has a model, and none can be chosen")
        models = take_rows(saved.models, used)
        losses = map_blocks(_lose, self.task, models, samples, labels)
        total = losses.sum(0, dtype=float)
        return int(used[np.argmin(np.where(np.isfinite(total), total, np.inf))])

    def check_samples(self, x: Any) -> np.ndarray:
        """Returns samples as `Pool` has them.

        The columns of a frame are taken by name where those of the run have names.
        """
        there = name_columns(x)
        if self.columns is not None and there is not None:
            x = take_columns(x, there, self.columns)
        x = to_array("x", x)
        if x.dtype.kind not in "buif" or x.shape[1:] != self.sample_shape or not len(x):
            raise InputError(
                f"x has shape {x.shape} and dtype {x.dtype}, expected numbers of shape"
                f" {('B', *self.sample_shape)}, B >= 1".replace("'", "")
            )
        if self.pixels:
            return read_pixels(x)
        x = x.astype(np.float32) if x.dtype == np.uint8 and self.pixels is False else x
        x = read_features(x)
        if not np.isfinite(to_float32(x)).all():
            raise InputError("x is NaN or infinite somewhere, expected finite values")
        return x

    def check_labels(self, y: Any, samples: int) -> np.ndarray:
        """Returns labels [B] int32, of class numbers or, where labels were text, of names; of a
        regression numbers [B] float32, where samples have several labels these [B, T] float32.
        """
        y, names = to_array("y", y), self.class_names
        numbers = names is not None and all(map(str.isdecimal, names))
        # numbers with gaps name their classes as text does
        if y.dtype.kind in "SU" or (numbers and y.dtype.kind in "iuf"):
            y = np.array(list(map(clean_name, y.ravel().tolist()))).reshape(y.shape)
        if y.dtype.kind == "U" and names is not None:
            if unknown := {*y.ravel().tolist()}.difference(names):
                raise InputError(f"y={min(unknown)}: the classes of the run are {', '.join(names)}")
            y = np.vectorize(names.index, otypes=[np.int32])(y)
        stand_in = np.zeros((samples, 1), np.uint8)  # of samples that are checked already
        pool = check_pool(Pool(stand_in, y, self.num_classes), "samples")
        if kind_of(pool).name != self.task.targets.name or count_outputs(pool) != self.outputs:
            raise InputError(
                f"y are {kind_of(pool).describe(pool)}; models of this run have {self.outputs}"
                f" outputs and need {self.task.targets.needs}"
            )
        return pool.y


def take_columns(frame: Any, there: dict[str, Any], columns: tuple[str, ...]) -> np.ndarray:
    """Returns the columns of a frame, see `name_columns`, in the order of those of a run. Raises
    InputError for a frame that lacks one.
    """
    for name in columns:
        if name not in there:
            nearest = suggest_nearest(name, set(there) - set(columns))
            raise InputError(f"x has no column {name}, which the run was trained on{nearest}")
    return np.stack([np.asarray(frame[there[name]]) for name in columns], axis=1)


def read_pixels(x: np.ndarray) -> np.ndarray:
    """Returns pixels [B, ...] of any type as uint8, or, where none is above 1, as float32 that were
    divided by 255 already. Raises InputError for other numbers.
    """
    if x.dtype == np.uint8:
        return x
    low, high = x.min(), x.max()
    if x.dtype.kind == "f" and low >= 0 and high <= 1:
        return x.astype(np.float32)
    if not (low >= 0 and high <= 255 and (x == np.floor(x)).all()):  # NaN fails, too
        raise InputError(
            f"x is {low} .. {high}, and the run was trained on uint8, read as x / 255: give whole"
            " numbers from 0 to 255, or x / 255"
        )
    return x.astype(np.uint8)


@checked()
def load_run(
    run_dir: str | Path, module: nn.Module | None = None, targets: Targets | None = None
) -> LoadedRun:
    """Reads a finished run.

    `module` is needed only where the run trained a module of your own, `targets` where it had a
    loss of your own. Raises InputError for a directory without a finished run, damaged files, and
    models or a loss that do not fit.
    """
    run_dir = Path(run_dir).expanduser()
    rows, summary = read_metrics(run_dir), read_summary(run_dir)
    if summary is None or not rows or not (run_dir / FINAL_FILE).exists():
        raise InputError(
            f"run_dir={run_dir}: the run has not finished and has no final models; the command"
            " that began it goes on with it"
        )
    run_id, settings = summary.get("run_id"), read_settings(run_dir)
    final, facts = read_models(run_dir / FINAL_FILE, run_id)
    best = read_models(run_dir / BEST_FILE, run_id)[0] if (run_dir / BEST_FILE).exists() else None
    shape, classes = tuple(facts["sample_shape"]), facts["num_classes"]
    names, columns = (facts.get(name) and tuple(facts[name]) for name in ("class_names", "columns"))
    targets = find_targets(run_dir, settings, classes, targets)
    outputs = facts.get("labels") or max(classes, 1)
    model: Any = module
    if model is None:
        make = build_value(settings["model"]["module"])
        try:
            model = make(num_classes=outputs)
        except (TypeError, ValueError) as error:
            raise InputError(f"model.module: {error}") from None
    task = as_task(model, shape, classes, 0, targets)
    expected = jax.eval_shape(task.init, jax.random.key(0))
    expected = jax.tree.map(lambda leaf: leaf.shape, expected)
    if expected != jax.tree.map(lambda leaf: leaf.shape[1:], final.models):
        raise InputError(f"run_dir={run_dir}: its models have other parameters than this module")
    if (clients := read_clients(run_dir, run_id)) is None:
        raise InputError(f"{run_dir}/clients.parquet: cannot be read: No such file or directory")
    about = settings, summary, rows, clients, read_assignments(run_dir, run_id)
    more = task, shape, classes, names, outputs, columns, facts.get("pixels")
    return LoadedRun(*about, final, best, *more)


def find_targets(
    run_dir: Path, settings: dict[str, Any], classes: int, given: Targets | None
) -> Targets | None:
    """Returns what y were in a run, None: classes. Raises InputError where they were other than
    those that are `given`, and where none are and the loss was the caller's own.
    """
    if classes:
        return None
    node = dict(settings.get("task") or {})
    kinds = {f"{OWN_MODELS}{make.__name__}": make for make in (regression, multilabel)}
    make = kinds.get(node.pop("_target_", None))
    trained = given if make is None else make(**node)
    if trained is None:
        raise InputError(
            f"run_dir={run_dir}: the run had a loss of your own, which no file holds; give it, as"
            " in load_run(run_dir, targets=cfl.models.regression(loss))"
        )
    if given is not None and given.settings != trained.settings:
        used = " ".join(f"{name}={value}" for name, value in trained.settings)
        raise InputError(f"run_dir={run_dir}: targets are not those of the run, which had {used}")
    return trained


def read_models(path: Path, run_id: str | None) -> tuple[SavedModels, dict[str, Any]]:
    """Returns the models of a file and its facts. Raises InputError if it is damaged, or of another
    run than `run_id`.
    """
    with refuse_damage(path):
        arrays, facts = load_arrays(path)
        check_run(facts.get("run_id"), run_id)
        tree = nest_arrays(arrays)
        weights, label_shares = (tree.get(name) for name in MIXTURE)
        scaling = tree.get("scaling") and Scaling(**tree["scaling"])
        common = facts["round"], tree["models"], tree["index"]
    return SavedModels(*common, weights, label_shares, scaling), facts


def build_value(node: Any) -> Any:
    """Returns a value of the settings, each `_target_` in it, a model of the package, as a partial
    function. Raises InputError for any other: give it to `load_run` as `module`.
    """
    if not isinstance(node, dict):
        return node
    target = str(node.get("_target_"))
    function: Any = getattr(models, target.rpartition(".")[2], None)
    is_model = isinstance(function, type) and issubclass(function, nn.Module)
    if not target.startswith(OWN_MODELS) or not is_model:
        raise InputError(
            f"model.module._target_={target}: is no model of the package; give it as"
            " load_run(run_dir, module=...)"
        )
    own = {str(key): value for key, value in node.items()}
    values = {key: build_value(value) for key, value in own.items() if not key.startswith("_")}
    return functools.partial(function, **values)


# blocks of samples, each padded to one size, for which programs are compiled once


def map_blocks(function: Any, task: Task, models: Any, *arrays: np.ndarray) -> np.ndarray:
    """Returns function(task, models, *blocks, owner) of the samples of `arrays` [N, ...], block by
    block, without the rows of the padding, whose owner is -1.
    """
    found, compiled = [], jax.jit(function, static_argnums=0)
    for start in range(0, len(arrays[0]), BLOCK):
        blocks = [array[start : start + BLOCK] for array in arrays]
        count = len(blocks[0])
        full = [np.pad(x, [(0, BLOCK - count)] + [(0, 0)] * (x.ndim - 1)) for x in blocks]
        owner = np.where(np.arange(BLOCK) < count, 0, -1)
        found.append(np.asarray(compiled(task, models, *full, owner))[:count])
    return np.concatenate(found)


def _predict(task: Task, mixture: Any, x: jax.Array, owner: jax.Array) -> jax.Array:
    """Returns the outputs [BLOCK, C] of one model or, with weights, of all of them."""
    models, weights = mixture
    if weights is None:
        return task.predict(models, x, owner)
    return mix_predictions(task, models, jnp.broadcast_to(weights, (BLOCK, weights.size)), x, owner)


def _explain(task: Task, given: Any, x: jax.Array, y: jax.Array, owner: jax.Array) -> jax.Array:
    """Returns the parts [BLOCK, M] of the models in each sample, from equal weights."""
    models, label_shares = given
    total = jax.tree.leaves(models)[0].shape[0]
    equal = jnp.full(total, 1 / total)
    return explain_samples(task, models, label_shares, equal, x, y, owner).T


def _lose(task: Task, models: Params, x: jax.Array, y: jax.Array, owner: jax.Array) -> jax.Array:
    """Returns the loss [BLOCK, M] of each model."""
    return lax.map(lambda one: task.targets.loss_value(task.predict(one, x, owner), y), models).T
