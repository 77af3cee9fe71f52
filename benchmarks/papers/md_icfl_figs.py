"""MD-ICFL, Figs. 5 to 7: what the pseudo-samples of the groups are worth, and how the groups
came about.

From the last checkpoint of a finished run the samplers search again, with the paper's
settings. `figure.png`: the adjusted Rand index over rounds, and the distance of every
client, trained once more, from every group. `confidence.png` (Figs. 5 and 6): the mean
probabilities that new models give the pseudo-samples; a new model sees the images of one
true group and nothing of the run. `samples.png` (Fig. 7). K clients, m groups, C classes, M
pseudo-samples of a class.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedjax_cfl.algorithms.md_icfl.md_icfl import class_distances
from fedjax_cfl.algorithms.md_icfl.synthesis import back_search, generator
from fedjax_cfl.analysis.plot import make_palette, new_figure, save_figure, style_axes
from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.data.federated import gather, train_label_shares
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.results import read_metrics, series
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import FederatedData, Key, Params, Task
from papers.cells import Cell

SAMPLERS = {"back_search": back_search, "generator": generator}
NEW_MODELS, NEW_EPOCHS = 3, 3  # of each true group (the paper: five), over its training images
SHOWN = 1  # pseudo-samples of each class that samples.png shows
Found = dict[tuple[str, str], list[Path]]


class GroupPicture(NamedTuple):
    """What is drawn of one run."""

    samples: np.ndarray  # [m, C, M, ...]
    confidence: np.ndarray  # [m, C, C], mean probability of each class (last) for each label
    distance: np.ndarray  # [K, m], of each client from each group
    truth: np.ndarray  # [K] int, the true groups
    turned: np.ndarray  # [m] int, the true group of most members; -1: no client is there


def read_group_models(run_dir: Path, task: Task) -> tuple[Params, np.ndarray]:
    """Reads the group models [m, ...] and the groups of the clients [K] from the last
    checkpoint. Raises InputError if there is none.
    """
    folder = run_dir / "checkpoints"
    arrays = checkpoint.load_arrays(folder) if checkpoint.list_steps(folder) else {}
    like = jax.eval_shape(task.init, jax.random.key(0))
    names = ["[0].groups" + jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(like)]
    if any(name not in arrays for name in [*names, "[0].assignment"]):
        raise InputError(f"{run_dir}: no checkpoint with the models of groups, expected a run")
    leaves = [jnp.asarray(arrays[name]) for name in names]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), arrays["[0].assignment"]


def train_new_models(
    key: Key, task: Task, data: FederatedData, local: Local, groups: int
) -> Params:
    """Returns models [groups, NEW_MODELS, ...] trained on the images of one true group each.

    Args: `key` draws first models and batches; `local` gives step size and batch size; `groups`
    is the number of true groups.
    """
    owner, train = np.asarray(data.owner), np.asarray(data.train.order)
    of_group = [train[np.asarray(data.concept)[owner[train]] == g] for g in range(groups)]
    size = min(map(len, of_group))
    rows = jnp.asarray(np.stack([held[:size] for held in of_group]))
    steps = -(-NEW_EPOCHS * size // local.batch_size)  # rounded up: few images train as well

    def train_one(inputs: tuple[Key, jax.Array]) -> Params:
        key, held = inputs
        start, batches = jax.random.split(key)

        def step(number: jax.Array, params: Params) -> Params:
            draw = jax.random.fold_in(batches, number)
            x, y = gather(data, jax.random.choice(draw, held, (local.batch_size,)))
            gradient = jax.grad(lambda params: jnp.mean(task.loss(params, x, y)))(params)
            return jax.tree.map(lambda p, g: p - local.lr * g, params, gradient)

        return lax.fori_loop(0, steps, step, task.init(start))

    keys = jax.random.split(key, groups * NEW_MODELS)
    trained = jax.jit(lambda: lax.map(train_one, (keys, jnp.repeat(rows, NEW_MODELS, axis=0))))()
    return jax.tree.map(lambda leaf: leaf.reshape(groups, NEW_MODELS, *leaf.shape[1:]), trained)


def measure_clients(
    key: Key, task: Task, data: FederatedData, local: Local, models: Params, place: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """Trains all clients once and returns a function of the pseudo-samples [m, C, M, ...]: the
    federated model distances [K, m].

    Args: `key` is that of a round; `local` is how clients train; `models` [m, ...] are those of
    the groups; `place` [K] int32 is the group of each client.
    """
    cohort = make_cohort(jnp.arange(data.num_clients, dtype=jnp.int32), data, local.execution)
    train = over_clients(sgd(task, local), local.execution)
    upload = jax.jit(lambda: train(cohort, data, (key, models), full_work(place[cohort.ids])))()
    share = train_label_shares(data)[cohort.ids]
    measure = class_distances(task, local)

    @jax.jit
    def distances(samples: jax.Array) -> jax.Array:
        own = upload.start_group, upload.delta
        total = jnp.einsum("sc,smc->sm", share, measure(cohort, data, (models, samples), own))
        return jnp.zeros_like(total).at[cohort.ids].set(total)

    return distances


def picture_run(
    run_dir: Path, config: dict, task: Task, data: FederatedData, local: Local, new: Params
) -> GroupPicture:
    """Searches pseudo-samples for the groups of a finished run, and compares its clients and
    new models on them.

    Args: `config` are the settings of the run; `local` is how its clients train; `new` [groups,
    NEW_MODELS, ...] are those of `train_new_models`.
    """
    models, assignment = read_group_models(run_dir, task)
    keys = jax.random.split(jax.random.key(config["seed"]), 2)
    sampler = SAMPLERS[config["algorithm"]["sampling"]]()(task, local)
    samples = jax.jit(lambda: sampler.sample(keys[0], (), models, data)[0])()
    truth, m = np.asarray(data.concept), len(samples)
    known = [truth[assignment == j] for j in range(m)]
    turned = np.array([np.bincount(held).argmax() if held.size else -1 for held in known])

    def confidence(group: int, own: jax.Array) -> np.ndarray:
        flat = own.reshape(-1, *own.shape[2:])
        fresh = take_rows(new, group)
        each = jax.vmap(lambda model: jax.nn.softmax(task.predict(model, flat)))(fresh)
        return np.asarray(each.mean(0).reshape(*own.shape[:2], -1).mean(1))

    confidences = [confidence(max(g, 0), own) for g, own in zip(turned, samples, strict=True)]
    place = jnp.asarray(assignment, jnp.int32)
    distance = measure_clients(keys[1], task, data, local, models, place)(samples)
    return GroupPicture(
        np.asarray(samples), np.stack(confidences), np.asarray(distance), truth, turned
    )


def group_title(shown: GroupPicture, group: int) -> str:
    """Returns the name of a group: the rotation of most members."""
    turn = shown.turned[group]
    return f"group {group + 1}: " + ("empty" if turn < 0 else f"{90 * turn} degrees")


def draw_grid(axes: Axes, values: np.ndarray, most: float, x: str, y: str, title: str) -> Any:
    """Draws a matrix as an image and returns it.

    Args: `values` [rows, columns]; `most` is the upper end of the colour scale, which begins at
    0; `x` and `y` are the labels of the axes.
    """
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=most, aspect="auto")
    style_axes(axes, title, x, y)
    axes.grid(visible=False)
    return image


def draw_progress(table: dict, found: Found, shown: dict[str, GroupPicture], path: Path) -> None:
    """Draws the index over rounds, and a distance matrix for each run."""
    figure = new_figure(5.5 + 3.4 * len(shown), 4.8, table["title"])
    panels = figure.subplots(1, 1 + len(shown), width_ratios=[1.5, *[1] * len(shown)])
    for (column, colour), folders in zip(
        zip(shown, make_palette(len(shown)), strict=True), found.values(), strict=True
    ):
        for i, folder in enumerate(folders):
            rows = [row for row in read_metrics(folder) if row.get("ari") is not None]
            rounds, index = series(rows, "round"), series(rows, "ari")
            label = column if i == 0 else None
            panels[0].plot(rounds, index, color=colour, linewidth=1.6, alpha=0.85, label=label)
    style_axes(panels[0], "Groups against rotations", "round", "adjusted Rand index")
    panels[0].set_ylim(-0.1, 1.05)
    panels[0].legend(frameon=False, fontsize=10, loc="lower right")
    most = max(float(each.distance.max()) for each in shown.values())
    image: Any = None
    for axes, (column, each) in zip(panels[1:], shown.items(), strict=True):
        rank = np.argsort(each.truth, kind="stable")
        image = draw_grid(axes, each.distance[rank], most, "group", "", column)
        edges = np.flatnonzero(np.diff(each.truth[rank])) + 0.5
        for edge in edges:
            axes.axhline(edge, color="white", linewidth=1.2)
        centers = [np.mean(np.flatnonzero(each.truth[rank] == g)) for g in np.unique(each.truth)]
        turns = [f"{90 * g} deg" for g in np.unique(each.truth)]
        axes.set_yticks(centers, turns, rotation=90, va="center")
        axes.set_xticks(range(len(each.turned)), range(1, len(each.turned) + 1))
    panels[1].set_ylabel("clients by rotation")
    figure.colorbar(image, ax=panels[-1], label="model distance")
    save_figure(figure, path)


def draw_confidence(shown: dict[str, GroupPicture], path: Path) -> None:
    """Draws Figs. 5 and 6: a line of matrices for each run, one for each group."""
    m = max(len(each.turned) for each in shown.values())
    title = "Probabilities that new models give pseudo-samples (MD-ICFL, Figs. 5 and 6)"
    figure = new_figure(1.2 + 2.7 * m, 0.9 + 2.9 * len(shown), title)
    grid = figure.subplots(len(shown), m, squeeze=False)
    image: Any = None
    for line, (column, each) in zip(grid, shown.items(), strict=True):
        for j, axes in enumerate(line):
            label = f"{column}\ntheir label" if j == 0 else ""
            name = group_title(each, j)
            image = draw_grid(axes, each.confidence[j], 1.0, "class", label, name)
            classes = range(0, each.confidence.shape[1], 3)
            axes.set_xticks(classes, classes)
            axes.set_yticks(classes, classes)
    figure.colorbar(image, ax=grid, label="mean probability", shrink=0.7)
    save_figure(figure, path)


def draw_samples(shown: dict[str, GroupPicture], path: Path) -> None:
    """Draws Fig. 7: pseudo-samples of every group and class, in grey from -1 to 1."""
    first = next(iter(shown.values())).samples
    figure = new_figure(
        1.4 + 0.75 * first.shape[1] * SHOWN,
        0.6 + 0.78 * sum(len(each.samples) for each in shown.values()),
        "Pseudo-samples of every group and class (MD-ICFL, Fig. 7)",
    )
    for part, (column, each) in zip(_split(figure, len(shown)), shown.items(), strict=True):
        grid = part.subplots(*each.samples.shape[:2], squeeze=False)
        for j, line in enumerate(grid):
            for k, axes in enumerate(line):
                axes.imshow(each.samples[j, k, 0].squeeze(), cmap="gray", vmin=-1, vmax=1)
                axes.set_xticks([])
                axes.set_yticks([])
                if j == 0:
                    axes.set_title(f"{k}", fontsize=10)
            name = group_title(each, j).partition(": ")[2]
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        part.suptitle(column, fontsize=11)
    save_figure(figure, path)


def _split(figure: Figure, parts: int) -> list[Any]:
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)  # that of `new_figure`
    layout.set(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    return list(figure.subfigures(parts, 1, squeeze=False)[:, 0])


def draw_figures(
    build: Callable[[list[str]], tuple], todo: list[Cell], table: dict, found: Found, path: Path
) -> None:
    """Draws the three figures, of the first seed of every finished cell; the index of all
    seeds.

    Args: `build(overrides)` -> (config, task, data, local) as a run would have them; `todo` are
    the cells that may be drawn; `found` are the folders of finished cells, by (row, column);
    `path` is that of figure.png, the others are written beside it.
    """
    shown: dict[str, GroupPicture] = {}
    cells = {(cell.row, cell.column, cell.folder): cell for cell in todo}
    drawn: Found = {}
    new = None
    for (row, column), folders in found.items():
        cell = cells.get((row, column, folders[0]))
        if cell is None:
            continue
        config, task, data, local = build(cell.overrides)
        if new is None:  # the same images for all cells of a row
            groups = int(np.asarray(data.concept).max()) + 1
            new = train_new_models(jax.random.key(1), task, data, local, groups)
        shown[column] = picture_run(folders[0], config, task, data, local, new)
        drawn[row, column] = folders
    if shown:
        draw_progress(table, drawn, shown, path)
        draw_confidence(shown, path.with_name("confidence.png"))
        draw_samples(shown, path.with_name("samples.png"))
