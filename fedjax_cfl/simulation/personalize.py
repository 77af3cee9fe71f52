"""What personalised federated learning also reports: clients that train on from their
group's model, and clients that took no part in the run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.mixture import mean_responsibility, share_samples
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import TRAIN, derive_key
from fedjax_cfl.simulation.evaluate import ClientTable, evaluate_clients, used_models
from fedjax_cfl.system.select import drawn_ahead
from fedjax_cfl.tree import take_rows, where_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, Selection, ServedModels, State, Task

# clients that train on


def finetune_clients(
    task: Task,
    local: Local,
    epochs: int,
    served: ServedModels,
    data: FederatedData,
    key: Key,
    at_once: int,
    lr_scale: ArrayLike = 1.0,
) -> ClientTable:
    """Returns what every client measures [K] on its own test samples once it has trained the
    model that it is served on its own training samples. Clients without a model measure
    nothing.

    Args: `local` is how they train, without schedule; `epochs` is for how
    long; `served` says which model each has; `key` is that of the round whose batches they
    take; `at_once` clients are trained together, so that no more models are in memory;
    `lr_scale` [] is the factor of their step size. Raises InputError for mixtures.
    """
    refuse_mixture("evaluate.finetune", served)
    local = local.replace(epochs=epochs, steps=None, schedule=None)
    train, mesh = over_clients(sgd(task, local), local.execution), local.execution.mesh

    @jax.jit
    def score(ids, served, data, key):
        cohort = make_cohort(ids, data, local.execution)
        real = cohort.ids < data.num_clients
        group = cohort.take(served.model_index)
        own = jnp.maximum(group, 0)
        upload = train(cohort, data, (key, served.models), full_work(own, lr_scale))
        tuned = jax.tree.map(lambda all, delta: all[own] + delta, served.models, upload.delta)
        client = jnp.where(real & (group >= 0), cohort.ids, data.num_clients)
        slot = jnp.full(data.num_clients, -1).at[client].set(jnp.arange(client.size), mode="drop")
        return evaluate_clients(task, mesh, ServedModels(tuned, slot), data)[0]

    found: ClientTable | None = None
    for ids in split_clients(np.arange(data.num_clients), at_once, data.num_clients):
        part = jax.device_get(score(ids, served, data, key))
        found = (
            part
            if found is None
            else jax.tree.map(
                # transposed, since of labels there are also [K, T]
                lambda old, new, there=part.samples > 0: np.where(there, new.T, old.T).T,
                found,
                part,
            )
        )
    assert found is not None
    return found


def refuse_mixture(setting: str, served: ServedModels) -> None:
    """Raises InputError for what trains on from a client's one model, where clients mix several;
    `served` has arrays or their shapes.
    """
    if served.weights is not None:
        raise InputError(
            f"{setting}: clients of this method predict by mixtures of all models, and have no one"
            " model to train on from; use 0"
        )


def split_clients(ids: np.ndarray, at_once: int, num_clients: int) -> np.ndarray:
    """Returns clients in rows of `at_once` int32, the last filled up with K."""
    rows = -(-ids.size // at_once)
    filled = np.full(rows * at_once, num_clients, np.int32)
    filled[: ids.size] = ids
    return filled.reshape(rows, at_once)


# clients that took no part in the run


class NewClients(NamedTuple):
    """Clients that were held out, as the method takes them in after the run."""

    groups: np.ndarray  # [H] int32, the model that each was assigned, -1: none
    metrics: ClientTable  # [H]
    served: ServedModels  # of the whole population, the clients of the run have none


def hold_out_clients(
    data: FederatedData, share: float, seed: int, validation: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the clients [K - H - V] that take part, and those [H] and [V] that are held out: two
    shares of all, for testing and for `validation`, drawn among those with training and test
    samples.

    Raises InputError where no client would be left for one of them, or to take part.
    """
    able = np.flatnonzero((np.asarray(data.train.size) > 0) & (np.asarray(data.test.size) > 0))
    asked = {"new_clients": share, "validation_clients": validation}
    counts = [round(part * data.num_clients) for part in asked.values()]
    for (name, part), count in zip(asked.items(), counts, strict=True):
        most = min(able.size, data.num_clients - 1) - (sum(counts) - count)
        if part and not 0 < count < most:
            raise InputError(
                f"evaluate.{name}={part}: {count} of {data.num_clients} clients cannot be held"
                f" out; {able.size} have training and test samples"
            )
    drawn = np.random.default_rng([seed, data.num_clients]).choice(able, sum(counts), False)
    held, apart = np.sort(drawn[: counts[0]]), np.sort(drawn[counts[0] :])
    return np.setdiff1d(np.arange(data.num_clients), drawn), held, apart


def select_these(ids: jax.Array) -> Selection:
    """Selects the clients `ids` [n], K: none, in every round; remembers nothing, so that a method
    may wrap it, and is known before the run, so that one may start from them.
    """
    return drawn_ahead(lambda key, round, size: ids)


MakeAlgorithm = Callable[[Selection], Algorithm]  # the method, with another selection


def assign_newcomers(
    make: MakeAlgorithm,
    task: Task,
    mesh: Mesh,
    trained: State,
    data: FederatedData,
    key: Key,
    at_once: int,
) -> NewClients:
    """Assigns clients to the groups of a finished run by the method's own rule, and tests them
    on the models as the run left them.

    The rule is what a round of the method does with clients that it selects for the first time,
    so they are selected in one round that starts from `trained`. What it stores of each of them is
    kept, groups and personal models, and nothing else. Where that round moves clients of the run,
    too, its groups are not those that were trained, and the new ones stay without. What layers keep
    for a new client starts from the trained model of its group: the round that names the group is
    followed by the same round with these rows.

    Args: `make` returns the method, see also `check_rule`; the devices of `mesh` share the
    tests; `trained` is the state that the run left; `data` are those of the clients of the run
    and, after them, the new ones; `key` is the round's; `at_once` clients are selected together.
    """
    known, total, data = trained.assignment.size, data.num_clients, data.replace(has_drift=False)
    algorithm = make(select_these(jnp.full(at_once, total, jnp.int32)))
    if (served := algorithm.serve(trained)).weights is not None:
        return mix_newcomers(task, mesh, served, data, at_once)
    new = jnp.arange(total) >= known
    start = extend_state(trained, jax.jit(algorithm.init)(key, data), known)
    # methods that look at updates name groups by what clients train from these rows
    start = start_rows(algorithm, start, start.assignment, new)

    @jax.jit
    def select(key, state, data, ids):
        return make(select_these(ids)).round(key, state, data)[0]

    met = start
    for ids in split_clients(np.arange(known, total), at_once, total):
        begin, after = start, select(key, start, data, ids)
        if algorithm.first_rows is not None:
            begin = start_rows(algorithm, start, after.assignment, new)
            after = select(key, begin, data, ids)
        if np.array_equal(after.assignment[:known], begin.assignment[:known]):
            met = copy_clients(jnp.zeros(total, bool).at[ids].set(True, mode="drop"), after, met)
    used = used_models(algorithm, met, data)
    served = ServedModels(used.models, jnp.where(new, used.model_index, -1))
    groups = np.asarray(algorithm.serve(met).model_index)[known:]
    return score_newcomers(task, mesh, served, data, groups)


def score_newcomers(
    task: Task, mesh: Mesh, served: ServedModels, data: FederatedData, groups: np.ndarray
) -> NewClients:
    """Returns the new clients, the last of `data`, with their `groups` [H] and what they measure
    on what they are `served`; the devices of `mesh` share the tests.
    """
    table = jax.jit(lambda served, data: evaluate_clients(task, mesh, served, data)[0])(
        served, data
    )
    metrics = jax.tree.map(lambda leaf: np.asarray(leaf)[-groups.size :], table)
    return NewClients(groups, metrics, served)


def mix_newcomers(
    task: Task, mesh: Mesh, trained: ServedModels, data: FederatedData, at_once: int
) -> NewClients:
    """Gives each new client its mixture of the models of a finished run, by one E-step on its
    training samples from equal weights, and tests it; one without training samples gets none.

    Args: as those of `assign_newcomers`; `trained` is what the clients of the run are served.
    """
    assert trained.weights is not None
    known, count = trained.weights.shape
    total = data.num_clients
    execution = make_execution(mesh)
    estep = over_clients(share_samples(task), execution)

    @jax.jit
    def mix(ids, trained, data, weights):
        cohort = make_cohort(ids, data, execution)
        equal = jnp.full((cohort.ids.size, count), 1 / count)
        found = estep(cohort, data, (trained.models, trained.label_shares), equal)
        able = (cohort.ids < total) & (found.by_label.sum((1, 2)) > 0)
        rows = jnp.where(able, cohort.ids, total)
        return weights.at[rows].set(mean_responsibility(found.by_label, equal), mode="drop")

    weights = jnp.zeros((total, count))
    for ids in split_clients(np.arange(known, total), at_once, total):
        weights = mix(jnp.asarray(ids), trained, data, weights)
    index = jnp.where(weights.sum(1) > 0, jnp.argmax(weights, axis=1).astype(jnp.int32), -1)
    served = trained._replace(model_index=index, weights=weights)
    return score_newcomers(task, mesh, served, data, np.asarray(index)[known:])


def start_rows(algorithm: Algorithm, state: State, group: jax.Array, new: jax.Array) -> State:
    """Returns the state in which what layers keep for the clients `new` [K] bool is what a client
    of their `group` [K] int32 keeps at first, by the models that the state has.
    """
    if algorithm.first_rows is None:
        return state
    changed = {}
    for name, first in algorithm.first_rows(state).items():
        rows = state.rows[name]
        values = where_rows(new, take_rows(first, jnp.maximum(group, 0)), rows.values)
        changed[name] = rows.replace(values=values)
    return state.put_rows(changed)


def copy_clients(who: jax.Array, after: State, state: State) -> State:
    """Returns the state with what it has of the clients `who` [K] bool as in `after`."""
    parts = [(each.assignment, each.rows) for each in (after, state)]
    assignment, rows = where_rows(who, *parts)
    return state.replace(assignment=assignment, rows=rows)


def check_rule(
    make: MakeAlgorithm,
    data: FederatedData,
    key: Key,
    at_once: int,
    setting: str = "evaluate.new_clients",
) -> None:
    """Raises InputError for a method that has no rule for new clients, see
    `Method.takes_newcomers`, and what else the method raises where `at_once` new clients are
    selected. `setting` is what asks for it.
    """
    data, no_clients = data.replace(has_drift=False), jnp.full(at_once, data.num_clients, jnp.int32)
    algorithm = make(select_these(no_clients))
    state = jax.eval_shape(algorithm.init, key, data)
    if jax.eval_shape(algorithm.serve, state).weights is not None:
        return  # an E-step
    jax.eval_shape(algorithm.round, key, state, data)
    if not algorithm.takes_newcomers:
        grouped = algorithm.clustered and state.active.size < data.num_clients
        why = ": every client of the run gets its group at the start" if grouped else ""
        raise InputError(f"{setting}: the method has no rule for new clients{why}; use 0")


def extend_state(trained: State, fresh: State, known: int) -> State:
    """Returns the state `trained` with more clients, as in `fresh`: its first `known` are those of
    the run, the others have no group yet.

    Raises InputError for a method whose memory has an axis of clients.
    """
    shapes = [jax.tree.map(jnp.shape, each.memory) for each in (trained, fresh)]
    if shapes[0] != shapes[1]:
        raise InputError(
            "evaluate.new_clients: the memory of the method grows with the number of clients; keep"
            " what it has of each client in Method.client_rows, not in Method.memory"
        )

    def write(base: jax.Array, part: jax.Array) -> jax.Array:
        return base.at[tuple(map(slice, part.shape))].set(part)

    rows = jax.tree.map(write, fresh.rows, trained.rows)
    assignment = jnp.full_like(fresh.assignment, -1).at[:known].set(trained.assignment)
    return trained.replace(assignment=assignment, rows=rows, selection=fresh.selection)


def next_key(seed: int, state: State) -> Key:
    """Returns the key by which clients would train in the round after `state`."""
    return derive_key(jax.random.key(seed), TRAIN, state.round)
