"""Cho, Wang, Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
AISTATS 2022, https://arxiv.org/abs/2010.01243, within the quotas of groups.

Candidates are drawn with chances proportional to their samples; those of highest loss are
selected. pow-d asks for the loss of the whole training set, cpow-d for that of one
mini-batch, rpow-d takes the last one known.

All candidates get their group's model and send their loss, and a round waits for the slowest
of them before it begins to train; those that are selected have the model already.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import CohortFn, client_range, make_cohort, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import check_selection_model, training_loss
from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.system.reports import make_bill
from fedjax_cfl.system.select import groups_of, memoryless, take_quotas
from fedjax_cfl.types import Bill, Cohort, FederatedData, Key, Selection, State, Task, Upload
from fedjax_cfl.validation import PositiveInt, checked


def batch_loss(task: Task, batch: int) -> Callable[..., jax.Array]:
    """Returns a function of one client: the mean loss [m] of each model over one random
    mini-batch, drawn with replacement; its `shared` is (key, models).
    """

    def client_loss(client, data: FederatedData, shared, client_inputs):
        key, models = shared
        count, start = client_range(client, data)
        own = jax.random.fold_in(key, client)
        place = jax.random.randint(own, (batch,), 0, jnp.maximum(count, 1))
        x, y = gather(data, data.train.order[start + place])
        owner = jnp.full(batch, client)

        def loss(model):
            return task.targets.loss_value(task.predict(model, x, owner), y).mean()

        return jax.vmap(loss)(models)

    return client_loss


def draw_candidates(key: Key, state: State, data: FederatedData, candidates: int) -> jax.Array:
    """Draws the candidates' ids, K in places that stay empty: `candidates` in all, shared
    among groups, with chances proportional to their training samples.
    """
    size = data.train.size
    draws = jnp.log(jnp.maximum(size, 1)) + jax.random.gumbel(key, size.shape)
    return take_quotas(state, draws, size > 0, candidates)


def check_candidates(clients_per_round: int, candidates: int) -> None:
    """Raises InputError for fewer candidates than places."""
    if candidates < clients_per_round:
        raise InputError(
            f"candidates={candidates}: must be at least clients_per_round={clients_per_round}"
        )


def select_highest(
    losses: CohortFn, local: Local, clients_per_round: int, candidates: int, batch: int | None
) -> Selection:
    """Selects the candidates whose group's model has the highest loss on their data.

    Args: `losses` gives a cohort's losses [S, m] of the group models; `local` says how clients
    train; `clients_per_round` is the number of places; `candidates`, at least as many, are drawn;
    `batch` is the number of samples that a loss is taken of, None: all of a client's. Raises
    InputError for fewer candidates.
    """
    check_candidates(clients_per_round, candidates)
    check_selection_model(local, "power-of-choice")

    def select(key: Key, memory: tuple, state: State, data: FederatedData) -> jax.Array:
        drawing, trying = jax.random.split(key)
        ids = draw_candidates(drawing, state, data, candidates)
        cohort = make_cohort(ids, data, local.execution)
        each = losses(cohort, data, (trying, state.groups) if batch else state.groups)
        own = cohort.take(groups_of(state))
        loss = jnp.take_along_axis(each, own[:, None], axis=1)[:, 0]
        score = cohort.put(jnp.full(data.num_clients, -jnp.inf), loss)
        drawn = cohort.put(jnp.zeros(data.num_clients, bool), True)
        return take_quotas(state, score, drawn, clients_per_round)

    def poll(key: Key, state: State, data: FederatedData) -> Bill:
        drawing, _ = jax.random.split(key)
        ids = draw_candidates(drawing, state, data, candidates)
        drawn = jnp.zeros(data.num_clients, jnp.int32).at[ids].set(1, mode="drop")
        inferred = jnp.minimum(data.train.size, batch or data.max_client_samples)
        return make_bill(units_down=drawn, words_up=drawn, samples=drawn * inferred)

    return memoryless(select)._replace(poll=poll)


@checked()
def pow_d(
    task: Task, local: Local, clients_per_round: PositiveInt, candidates: PositiveInt
) -> Selection:
    """Selects by the loss of each candidate's whole training set (pow-d)."""
    losses = over_clients(training_loss(task), local.execution)
    return select_highest(losses, local, clients_per_round, candidates, batch=None)


@checked()
def cpow_d(
    task: Task, local: Local, clients_per_round: PositiveInt, candidates: PositiveInt
) -> Selection:
    """Selects by the loss of one mini-batch of each candidate (cpow-d)."""
    losses = over_clients(batch_loss(task, local.batch_size), local.execution)
    return select_highest(losses, local, clients_per_round, candidates, local.batch_size)


@checked()
def rpow_d(clients_per_round: PositiveInt, candidates: PositiveInt) -> Selection:
    """Selects by the last loss known of each candidate; those never selected come first
    (rpow-d). It sends nothing more.
    """
    check_candidates(clients_per_round, candidates)

    def select(key: Key, loss: jax.Array, state: State, data: FederatedData) -> jax.Array:
        ids = draw_candidates(key, state, data, candidates)
        drawn = jnp.zeros(data.num_clients, bool).at[ids].set(True, mode="drop")
        # those never selected in random order, not by id
        first = 1e30 * (1.0 + jax.random.uniform(jax.random.fold_in(key, 1), loss.shape))
        score = jnp.where(jnp.isinf(loss), first, loss)
        return take_quotas(state, score, drawn, clients_per_round)

    def update(
        loss: jax.Array, state: State, cohort: Cohort, upload: Upload, seconds: jax.Array | None
    ) -> jax.Array:
        known = (upload.weight > 0) & jnp.isfinite(upload.loss)
        return cohort.put(loss, upload.loss, known)

    return Selection(lambda data: jnp.full(data.num_clients, jnp.inf, jnp.float32), select, update)
