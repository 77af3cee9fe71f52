"""Testing: every client's test samples on the model that client is served, in one pass
over the samples.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.client.mixture import mix_predictions, mixture_loss
from fedjax_cfl.clustering.distances import l1
from fedjax_cfl.clustering.metric_kmeans import mean_client_distance
from fedjax_cfl.data.federated import check_classes, gather, train_label_shares
from fedjax_cfl.sharding import over_devices, take_models
from fedjax_cfl.tasks import ClientTable
from fedjax_cfl.tasks.sums import bincount
from fedjax_cfl.tasks.targets import Predictions, Targets
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Params, ServedModels, State, Task

EVAL_BLOCK = 128  # test samples per forward pass


def count_models(models: Params) -> int:
    """Returns how many models [m, ...] there are."""
    return jax.tree.leaves(models)[0].shape[0]


class Totals(NamedTuple):
    """What is counted over the test samples of all clients."""

    classes: jax.Array  # [2, C] int32, see `tasks.classification.measure`; without classes C = 0
    # what `Targets.sums` says of the mean of the models: a sum [], and by what it is divided [],
    # 0: it was not tested
    auxiliary_sum: jax.Array
    auxiliary_number: jax.Array
    nonfinite_models: jax.Array  # [] int32, clients tested on a model that is not finite
    distance: jax.Array  # [] float32, the mean client distance, NaN where it is not measured


class Evaluation(NamedTuple):
    """What one evaluation measures."""

    clients: ClientTable  # [K]
    totals: Totals


class Tested(NamedTuple):
    """An evaluation of a run, or of several, on the host or not yet."""

    index: Any  # [K] int32, the model that each client is served, -1: none
    evaluation: Evaluation
    concept: Any  # [K] int32, the true groups, -1 where unknown
    train_size: Any  # [K] int32, training samples
    validation: Evaluation | None = None  # of the samples to choose a round by


class Blocks(NamedTuple):
    """Test samples sorted by model and cut into blocks that belong to one model each."""

    sort: jax.Array  # [N_test] int32, places in `data.test.order`
    first: jax.Array  # [m] int32, where each model's samples begin in `sort`
    size: jax.Array  # [m] int32, how many they are
    until: jax.Array  # [m] int32, number of the first block of the next model


def cut_blocks(index: jax.Array, num_models: int) -> Blocks:
    """Returns the blocks of test samples with models `index` [N_test], -1 for none."""
    key = jnp.where(index >= 0, index, num_models)
    count = jnp.bincount(key, length=num_models + 1)[:num_models]
    sort = jnp.argsort(key, stable=True).astype(jnp.int32)
    return Blocks(sort, jnp.cumsum(count) - count, count, jnp.cumsum(-(-count // EVAL_BLOCK)))


def find_model(blocks: Blocks, number: jax.Array) -> jax.Array:
    """Returns the model that a block belongs to."""
    model = jnp.searchsorted(blocks.until, number, side="right", method="compare_all")
    return jnp.minimum(model, blocks.size.size - 1)


def predict_block(
    task: Task,
    model: Params,
    data: FederatedData,
    blocks: Blocks,
    number: jax.Array,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three arrays [EVAL_BLOCK] for one block of test samples: place in
    `data.test.order` (N_test: no sample), predicted class, number or labels [.., T], loss.

    Args: `model` [...] is the one that the block belongs to, see `find_model`; `blocks` are
    those of all test samples; `number` [] is the block's; with `weights` [K, M] `model` [M, ...]
    are all models, which each client mixes by its own.
    """
    sort, first, count, until = blocks
    total, g = sort.size, find_model(blocks, number)
    begin = (number - (until[g] - -(-count[g] // EVAL_BLOCK))) * EVAL_BLOCK
    place = begin + jnp.arange(EVAL_BLOCK)
    slot = jnp.where((place < count[g]) & (number < until[-1]), first[g] + place, total)
    test = sort[jnp.minimum(slot, total - 1)]
    rows = data.test.order[test]
    x, y = gather(data, rows)
    owner = jnp.where(slot < total, data.owner[rows], -1)
    if weights is None:
        found = task.predict(model, x, owner)
        loss = task.targets.loss_value(found, y)
    else:
        of_owner = weights[jnp.maximum(owner, 0)]
        found = mix_predictions(task, model, of_owner, x, owner)
        loss = mixture_loss(found, y)
    return jnp.where(slot < total, test, total), task.targets.guess(found), loss


def predict_test_samples(
    task: Task, mesh: Mesh, served: ServedModels, data: FederatedData
) -> tuple[jax.Array, jax.Array]:
    """Returns (predicted class, number or labels [.., T], loss) [N_test] of each test sample, in
    the order of `data.test.order`.

    m models cost one pass over the samples and not m, unless clients mix them. Samples of clients
    without a model get -1. Where each client has a model of its own, devices get those of
    their blocks alone.
    """
    models, index, weights, _ = served
    if weights is not None:  # all of them are the one model of every client
        models = jax.tree.map(lambda leaf: leaf[None], models)
        index = jnp.where(index >= 0, 0, -1)
    num_models, total = count_models(models), data.test.order.size
    owner = data.owner[data.test.order]
    blocks = cut_blocks(jnp.where(owner >= 0, index[owner], -1), num_models)
    # static bound of blocks per device
    length = -(-(total // EVAL_BLOCK + num_models) // mesh.size)

    # devices take them in turn
    numbers = jnp.arange(length * mesh.size).reshape(length, mesh.size).T.reshape(-1)
    split = mesh.size > 1 and num_models == index.size and weights is None
    if split:  # [length of all devices, ...]
        models = take_models(models, jax.vmap(find_model, (None, 0))(blocks, numbers), mesh)

    @jax.jit  # traced once for its shapes and for the loop
    def one_block(shared, models, number, row):
        data, blocks, weights = shared
        row = row if split else find_model(blocks, number)
        model = take_rows(models, row)
        return predict_block(task, model, data, blocks, number, weights)

    def device_blocks(shared, own):
        (all_models, *shared), (numbers, models) = shared, own
        models = models if split else all_models
        done = jnp.sum(numbers < shared[1].until[-1])
        shapes = jax.eval_shape(one_block, shared, models, numbers[0], 0)
        out = jax.tree.map(lambda s: jnp.full((length, *s.shape), total, s.dtype), shapes)

        def body(b, out):
            found = one_block(shared, models, numbers[b], b)
            return jax.tree.map(lambda whole, part: whole.at[b].set(part), out, found)

        return lax.fori_loop(0, done, body, out)

    all_models, own = ((), models) if split else (models, ())
    where, guess, loss = over_devices(device_blocks, mesh)(
        (all_models, data, blocks, weights), (numbers, own)
    )
    empty = jnp.full((total, *guess.shape[where.ndim :]), -1, guess.dtype)
    guessed = empty.at[where].set(guess, mode="drop")
    return guessed, jnp.zeros(total).at[where].set(loss, mode="drop")


def evaluate_clients(
    task: Task, mesh: Mesh, served: ServedModels, data: FederatedData
) -> tuple[ClientTable, jax.Array]:
    """Returns what every client measures [K] on the model it is served, and the
    classes' counts [2, C] over all of them.

    Clients without a model, or without test samples in these data, measure nothing.
    """
    guess, loss = predict_test_samples(task, mesh, served, data)
    owner, y = data.owner[data.test.order], data.y[data.test.order]
    owner = jnp.where(served.model_index[jnp.maximum(owner, 0)] >= 0, owner, -1)
    seen = Predictions(guess, loss, y, owner)
    return task.targets.measure(seen, data.num_clients, data.num_classes)


def evaluate_auxiliary(
    task: Task, mesh: Mesh, served: ServedModels, data: FederatedData
) -> tuple[jax.Array, jax.Array]:
    """Returns the two counts of `Totals` on the union of all test sets, by the plain mean of the
    models that serve any client: of all in a mixture.
    """
    count = count_models(served.models)
    used = jnp.any(served.model_index[:, None] == jnp.arange(count), axis=0).astype(jnp.float32)
    used = used if served.weights is None else jnp.ones(count)
    weight = used / jnp.maximum(used.sum(), 1.0)
    mean = jax.tree.map(lambda leaf: jnp.tensordot(weight, leaf, axes=1)[None], served.models)
    guess, _ = predict_test_samples(
        task, mesh, ServedModels(mean, jnp.zeros(data.num_clients, jnp.int32)), data
    )
    held = data.owner[data.test.order] >= 0
    return task.targets.sums(guess, data.y[data.test.order], held)


def evaluate_distance(served: ServedModels, data: FederatedData) -> jax.Array:
    """Returns the mean [] L1 distance of the training label shares of two clients that are
    served the same model, see `mean_client_distance`; clients without one do not count.
    """
    check_classes(data, "eval_distance=true", "use eval_distance=false")
    index = served.model_index
    valid = (index >= 0) & (data.train.size > 0)
    count = count_models(served.models)
    return mean_client_distance(train_label_shares(data), jnp.maximum(index, 0), count, valid, l1)


def each_its_own(models: Params, index: jax.Array) -> ServedModels:
    """Returns the `models` [K, ...] as those of the clients 0, 1, ...; a client whose `index` [K]
    is -1 has none.
    """
    return ServedModels(models, jnp.where(index >= 0, jnp.arange(index.size), -1))


def take_served(served: ServedModels, clients: jax.Array) -> ServedModels:
    """Returns what the `clients` [n] of all are served; one beyond the last has no model."""
    weights = served.weights
    if weights is not None:
        weights = weights.at[clients].get(mode="fill", fill_value=0)
    index = served.model_index.at[clients].get(mode="fill", fill_value=-1)
    return served._replace(model_index=index, weights=weights)


def used_models(
    algorithm: Algorithm, state: State, data: FederatedData, clients: jax.Array | None = None
) -> ServedModels:
    """Returns the models that clients use: their groups', or, under a personal method, their own,
    for which some methods train on the clients' `data`. Who is in which group is what
    `algorithm.serve` says.

    `clients` [n] are those that are wanted, None: all; one beyond the last has no model.
    """
    served = algorithm.serve(state)
    if clients is not None:
        served = take_served(served, clients)
    if algorithm.personal_models is None:
        return served
    last = state.assignment.size - 1
    wanted = clients if clients is None else jnp.minimum(clients, last)
    return each_its_own(algorithm.personal_models(state, data, wanted), served.model_index)


def evaluate_all(
    algorithm: Algorithm,
    task: Task,
    mesh: Mesh,
    state: State,
    data: FederatedData,
    with_auxiliary: bool,
) -> tuple[dict, ClientTable]:
    """Returns one evaluation's metrics, see `finalize`, and the table of clients, of a state.

    Args: the devices of `mesh` share the test samples; `data` are those of all clients;
    `with_auxiliary`: also test the mean of the models, where there are several.
    """
    found = evaluate_block(algorithm, task, mesh, state, data, with_auxiliary)
    served = algorithm.serve(state)
    tested = Tested(served.model_index, found, data.concept, data.train.size)
    return finalize(task.targets, tested, count_models(served.models)), found.clients


def evaluate_block(
    algorithm: Algorithm,
    task: Task,
    mesh: Mesh,
    state: State,
    data: FederatedData,
    with_auxiliary: bool,
    first: Any = None,
    with_distance: bool = False,
) -> Evaluation:
    """Returns what the clients of `data` measure: all clients, or those from number `first` on.

    Args: `with_auxiliary`: also test the mean of the models, where there are several;
    `with_distance`: also measure the mean client distance, see `evaluate_distance`.
    """
    clients = None if first is None else first + jnp.arange(data.num_clients)
    served, used = algorithm.serve(state), used_models(algorithm, state, data, clients)
    table, counts = evaluate_clients(task, mesh, used, data)
    total, number = count_nothing(task.targets, data)
    if count_models(served.models) > 1 and with_auxiliary:  # of one, the mean says nothing new
        total, number = evaluate_auxiliary(task, mesh, served, data)
    finite, index = is_finite(used.models), used.model_index
    finite = finite[jnp.maximum(index, 0)] if used.weights is None else finite.all()
    bad = ~finite & (index >= 0) & (data.test.size > 0)
    distance = evaluate_distance(served, data) if with_distance else jnp.float32(jnp.nan)
    return Evaluation(table, Totals(counts, total, number, bad.sum(dtype=jnp.int32), distance))


def count_nothing(targets: Targets, data: FederatedData) -> tuple[jax.Array, jax.Array]:
    """Returns what `Targets.sums` says of no sample."""
    y = jnp.zeros((0, *data.y.shape[1:]), data.y.dtype)
    return targets.sums(y, y, jnp.zeros(0, bool))


def is_finite(models: Params) -> jax.Array:
    """Returns for each of the models [M, ...] whether all of its numbers are finite."""
    finite = [
        jnp.isfinite(leaf).all(tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(models)
    ]
    return jnp.stack(finite).all(0)


def empty(targets: Targets, data: FederatedData) -> Evaluation:
    """Returns the evaluation of all clients before any of them has been tested."""
    y = jnp.zeros((0, *data.y.shape[1:]), data.y.dtype)
    none = Predictions(y, jnp.zeros(0), y, jnp.zeros(0, jnp.int32))
    table, counts = jax.eval_shape(
        lambda: targets.measure(none, data.num_clients, data.num_classes)
    )

    def unknown(part: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(part.shape, jnp.nan if part.dtype.kind == "f" else 0, part.dtype)

    total, number = count_nothing(targets, data)
    totals = Totals(unknown(counts), total, number, jnp.zeros((), jnp.int32), jnp.zeros(()))
    return Evaluation(jax.tree.map(unknown, table), totals)


def merge(found: Evaluation, more: Evaluation, first: Any) -> Evaluation:
    """Enters an `evaluate_block` of the clients from number `first` on into that of all."""
    table, part = found.clients, more.clients
    # a part may have fewer clients than room
    ids = jnp.where(part.samples > 0, first + jnp.arange(part.samples.size), table.samples.size)
    return Evaluation(
        jax.tree.map(lambda all, some: all.at[ids].set(some, mode="drop"), table, part),
        jax.tree.map(jnp.add, found.totals, more.totals),
    )


def finalize(targets: Targets, tested: Tested, num_models: int, num_concepts: int = 0) -> dict:
    """Returns one evaluation's metrics from the results of all its parts: a dict
    of JAX's or of NumPy's arrays.

    Without an auxiliary model its accuracy is NaN. All scores are NaN if a client was
    tested on a model that is not finite, or if no client's loss is finite: such a model
    does not predict. Groups with other models keep their own. With `num_concepts`, how many true
    groups there are, scores are also those of the clients of each. `groupless_clients` are those of
    which nothing is known to choose a model by, see `engine.unassign_empty_clients`; others without
    a model have not taken part yet.
    """
    index, (clients, totals), concept, train_size, _ = tested
    xp, has_model = index.__array_namespace__(), index >= 0
    row, score = targets.summarize(clients, totals.classes), targets.score
    row["test_loss"] = row.pop("loss")
    numbers = xp.where(has_model, index, num_models)
    row["group_sizes"] = bincount(numbers, num_models + 1)[:num_models]
    row["groups"] = (row["group_sizes"] > 0).sum()
    scores = targets.by_group(clients, index, num_models)
    row["group_loss"] = scores.pop("loss")
    row |= {f"group_{name}": values for name, values in scores.items()}
    if num_concepts:
        scores = targets.by_group(clients, concept, num_concepts)
        row |= {f"concept_{name}": scores[name] for name in scores if name != "loss"}
    row["ari"] = ari(index, concept, has_model)
    row["mean_client_distance"] = totals.distance
    row["evaluated_clients"] = has_model.sum()
    row["groupless_clients"] = (~has_model & (train_size == 0)).sum()
    mean_model = totals.auxiliary_sum, totals.auxiliary_number
    row[f"auxiliary_{score.name}"] = targets.rate(*mean_model)
    scored = (clients.samples > 0).sum()
    bad = xp.where(xp.isfinite(clients.loss).any(), totals.nonfinite_models, scored)
    for name in row:
        alone = name.startswith(("group_", "concept_"))
        if name.endswith((*score.measured, "f1")) and not alone:
            row[name] = xp.where(bad > 0, xp.nan, row[name])
    return row | {"nonfinite_model_clients": bad}


def _count_pairs(start, valid):
    """Returns the pairs within runs as two exact integers (high, low) of the value
    high * 2^21 + low, low < 2^21.

    `start` [K] bool marks where a run begins, `valid` [K] the places that count, each
    run's first. A run of n gives 0 + 1 + .. + (n - 1): the sum of the ranks in it,
    added up by digits of 7 bits, so that int32 holds it up to K = 2^24.
    """
    xp = start.__array_namespace__()
    place = xp.arange(start.size)
    cummax = np.maximum.accumulate if xp is np else jax.lax.cummax
    rank = xp.where(valid, place - cummax(xp.where(start, place, 0)), 0)
    digits = [((rank >> shift) & 127).sum() for shift in (0, 7, 14, 21)]
    for low in range(3):
        digits[low + 1] = digits[low + 1] + (digits[low] >> 7)
    return digits[3], sum((digits[low] & 127) << 7 * low for low in range(3))


def ari(a: Any, b: Any, valid: Any) -> Any:
    """Returns the adjusted Rand index [] of labels `a [K]` and `b [K]` over the clients
    `valid [K] bool`; K <= 2^24.

    It is 1 if both partitions are trivial and equal, and NaN without valid clients. Negative
    labels are not valid. Pairs are counted exactly, without a table of all pairs of labels.
    The index is 2 (tp tn - fp fn) / ((tp + fn) (fn + tn) + (tp + fp) (fp + tn)) (Hubert and
    Arabie 1985). Its denominator has no cancellation and is no smaller than either product
    of the numerator, so that the index is right to float32 rounding.
    """
    xp, valid = a.__array_namespace__(), valid & (a >= 0) & (b >= 0)
    a, b = (xp.where(valid, labels, np.iinfo(np.int32).max) for labels in (a, b))  # sorted last
    counted = xp.arange(a.size) < valid.sum()
    by_a, by_b = xp.lexsort((b, a)), xp.sort(b)

    def changes(labels):
        return xp.concatenate([xp.ones(1, bool), labels[1:] != labels[:-1]])

    new_a, new_both = changes(a[by_a]), changes(a[by_a]) | changes(b[by_a])
    runs = new_both, new_a, changes(by_b), xp.arange(a.size) == 0
    in_both, in_a, in_b, total = (xp.stack(_count_pairs(start, counted)) for start in runs)
    counts = in_both, in_a - in_both, in_b - in_both, total - in_a - in_b + in_both, total
    *counts, total = (high * 2.0**21 + low for high, low in counts)
    tp, fp, fn, tn = (n / total.clip(1) for n in counts)
    scale = (tp + fn) * (fn + tn) + (tp + fp) * (fp + tn)
    index = xp.where(scale > 0, 2 * (tp * tn - fp * fn) / xp.where(scale > 0, scale, 1), 1.0)
    return xp.where(valid.any(), index, xp.nan)
