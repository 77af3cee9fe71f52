"""Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order
Model Optimization", ICLR 2021, https://arxiv.org/abs/2012.08565.

Every client has a model of its own. It receives the models of a few others, weighs each by
how much it lowers the loss on held-out samples of its own per unit of distance, mixes
them, and trains on. An affinity says which others it is sent next time.

The model of the one group is that from which all begin, as in `nonfed`. K clients, F other models
sent to a client. Differs from the paper: every fifth of a
client's samples is held out, in their order, instead of a random fifth; a client that has
none held out goes on from its own model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.algorithms.nonfed import measure_alone
from fedjax_cfl.client.cohort import ClientFn, client_range, over_clients, reads_in_place
from fedjax_cfl.client.executor import map_result
from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.client.sgd import ClientInputs, change_training, sgd
from fedjax_cfl.method import FinishFn, Method, PrepareFn, Round
from fedjax_cfl.round.aggregate import zero_step
from fedjax_cfl.round.client_rows import refuse_layers
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import copy_model, one_active_group
from fedjax_cfl.sharding import put_models, take_models
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import drop_statistics, take_rows
from fedjax_cfl.types import (
    Algorithm,
    ClientIndex,
    FederatedData,
    Info,
    Key,
    Params,
    Report,
    ServedModels,
    State,
    Task,
    Upload,
)
from fedjax_cfl.validation import BelowOne, Fraction, NonNegativeFloat, PositiveInt, checked, pick

# rows of clients: its model before its last local training [K, ...], and after it; how useful each
# other's model has been to it [K, K] float32; `Peer`
MIXED, TRAINED, AFFINITY, PEER = "mixed", "trained", "affinity", "peer"


class Peer(struct.PyTreeNode):
    """What the server knows of every client."""

    uploaded: jax.Array  # [K] bool, clients that answered in the round before
    started: jax.Array  # [K] bool, clients that were sent the common start


class Mixture(struct.PyTreeNode):
    """What a client trains from, and what it tells the server of the others."""

    model: Params  # [S, ...]
    peers: jax.Array  # [S, F] int32, the others whose models it was sent, K for none
    gain: jax.Array  # [S, 1 + F] float32, first of its own model


def l1_norm(tree: Params) -> jax.Array:
    """Returns the sums [n] of the absolute values of `tree` [n, ...]."""
    return sum(
        (
            jnp.sum(jnp.abs(leaf).reshape(len(leaf), -1), axis=1)
            for leaf in jax.tree.leaves(drop_statistics(tree))
        ),
        jnp.zeros(()),
    )


def l2_norm(tree: Params) -> jax.Array:
    """Returns the Euclidean norms [n] of `tree` [n, ...]."""
    return jnp.sqrt(l1_norm(jax.tree.map(jnp.square, tree)))


def serve_rows(name: str, state: State) -> ServedModels:
    """Serves each client its model of the row `name`."""
    return ServedModels(state.rows[name], jnp.arange(state.assignment.size, dtype=jnp.int32))


@checked("algorithm")
def fedfomo(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    models: PositiveInt = 4,
    validation: BelowOne = 0.2,
    explore: Fraction = 0.3,
    explore_decay: NonNegativeFloat = 0.05,
    norm: Literal["L1", "L2"] | Callable[[Params], jax.Array] = "L1",
    test: Literal["mixed", "trained"] | Callable[[State], ServedModels] = "mixed",
) -> Algorithm:
    """FedFomo.

    Args: `models` F sent to a client in a round, in addition to its own; `validation` the share of
    a client's samples that is held out; a model is sent by chance with probability `explore` -
    `explore_decay` * round, otherwise by affinity; `norm` L1 | L2 of the distance between models;
    `test` mixed | trained, the model that clients are tested on.
    """
    refuse_layers(local)
    measure = pick(norm, L1=l1_norm, L2=l2_norm)
    serve = pick(test, **{name: partial(serve_rows, name) for name in (MIXED, TRAINED)})
    method = Method(
        train_from_mixture(sgd(task, local)),
        start=one_active_group(task, 1, joined=True),
        takes_newcomers=False,
        client_rows=init_rows,
        split_rows=(MIXED, TRAINED, AFFINITY),
        prepare=mix_models(task, local, models, (explore, explore_decay), measure),
        ships_model=False,
        aggregate=zero_step,
        finish=remember_mixture(local.execution.mesh),
    )
    algorithm = federated(task, local, system, method)

    def round(key: Key, state: State, data: FederatedData) -> tuple[State, Info]:
        after, info = algorithm.round(key, state, hold_out_samples(data, validation))
        return after, measure_alone(info)

    return algorithm._replace(round=round, serve=serve)


def init_rows(groups: Params, data: FederatedData) -> dict[str, Any]:
    """Returns the rows of clients that all have the same model, and no affinity yet."""
    clients = data.num_clients
    models, none = copy_model(take_rows(groups, 0), clients), jnp.zeros(clients, bool)
    return {
        MIXED: models,
        TRAINED: models,
        AFFINITY: 0.1 * jnp.eye(clients),
        PEER: Peer(none, none),
    }


def train_from_mixture(solve: ClientFn) -> ClientFn:
    """Trains one client from its `Mixture` instead of its group's model, and uploads the
    mixture as well. The delta is relative to that.
    """

    def begin(c: ClientInputs) -> tuple[Params, Work]:
        return c.work.client_extra.model, c.work._replace(client_extra=())

    def send(c: ClientInputs, model: Params, upload: Upload) -> Upload:
        return upload.replace(extra=c.work.client_extra)

    return change_training(solve, send, begin)


def remember_mixture(mesh: Mesh | None) -> FinishFn:
    """Remembers what the clients that answered have mixed, and trained."""

    def finish(r: Round) -> State:
        state, cohort = r.state, r.cohort
        kept, mixture, clients = state.rows, r.upload.extra, state.assignment.size
        answered = r.upload.weight > 0
        rows = jnp.where(answered, cohort.ids, clients)
        total = jnp.abs(mixture.gain.sum(1, keepdims=True))
        share = mixture.gain / jnp.where(total > 0, total, 1.0)
        tested = jnp.concatenate([cohort.ids[:, None], mixture.peers], axis=1)
        trained = jax.tree.map(jnp.add, mixture.model, r.upload.delta)
        new = {
            MIXED: put_models(kept[MIXED], rows, mixture.model, mesh),
            TRAINED: put_models(kept[TRAINED], rows, trained, mesh),
            AFFINITY: kept[AFFINITY].at[rows[:, None], tested].add(share, mode="drop"),
            PEER: Peer(
                uploaded=cohort.put(jnp.zeros(clients, bool), True, answered),
                started=cohort.put(kept[PEER].started, True),
            ),
        }
        return state.put_rows(new)

    return finish


def pick_peers(
    key: Key, affinity: jax.Array, eligible: jax.Array, explore: jax.Array, count: int
) -> jax.Array:
    """Returns `count` different clients [count] int32, K where there are no more.

    Each is drawn at random with probability `explore`; otherwise it is the client of highest
    affinity, a random one of several.

    Args: `affinity` [K] is higher for more useful clients; `eligible` [K] bool are those to
    pick from; `explore` [] is from 0 to 1; `count` is static.
    """

    def next_peer(left, key):
        keys = jax.random.split(key)
        lot = jax.random.uniform(keys[0], left.shape)
        best = left & (affinity == jnp.max(jnp.where(left, affinity, -jnp.inf)))
        allowed = jnp.where(jax.random.uniform(keys[1]) < explore, left, best)
        peer = jnp.argmax(jnp.where(allowed, lot, -1.0))
        found = jnp.where(left.any(), peer, left.size).astype(jnp.int32)
        return left.at[found].set(False, mode="drop"), found

    return lax.scan(next_peer, eligible, jax.random.split(key, count))[1]


def mix_models(
    task: Task,
    local: Local,
    count: int,
    exploration: tuple[float, float],
    norm: Callable[[Params], jax.Array],
) -> PrepareFn:
    """Sends each client `count` models of the round before, and lets it mix them (a `Mixture`,
    the client's extra).

    Args: `count` is at most K, more count as K; `exploration` is (first, decay): a model is
    picked at random with probability first - decay * round, at least 0; `norm` measures the
    distance [n] of models [n, ...], l1_norm | l2_norm.
    """
    mix = over_clients(first_order_mixture(task, norm), local.execution)
    in_place = reads_in_place(local.execution)

    def prepare(r: Round) -> tuple[Work, Report]:
        state, cohort = r.state, r.cohort
        kept, clients = state.rows, r.data.num_clients
        client = jnp.minimum(cohort.ids, clients - 1)
        explore = jnp.maximum(exploration[0] - exploration[1] * state.round, 0.0)

        def pick(client, affinity):
            eligible = kept[PEER].uploaded & (jnp.arange(clients) != client)
            draw = jax.random.fold_in(r.key, client)
            return pick_peers(draw, affinity, eligible, explore, min(count, clients))

        mixed, trained, affinity = take_models(
            (kept[MIXED], kept[TRAINED], kept[AFFINITY]), client, local.execution.mesh
        )
        peers = jax.vmap(pick)(client, affinity)
        all_models, others = kept[TRAINED], ()
        if not in_place:  # [S, F, ...]: no device needs the models of all clients
            rows = jnp.minimum(peers, clients - 1)
            all_models, others = (), take_models(kept[TRAINED], rows, local.execution.mesh)
        tested = take_held_out(r.data)
        model, gain = mix(cohort, tested, all_models, (mixed, trained, others, peers))
        report = charge_peers(kept[PEER], cohort.ids, peers, tested)
        return r.work._replace(client_extra=Mixture(model, peers, gain)), report

    return prepare


def charge_peers(kept: Peer, ids: jax.Array, peers: jax.Array, tested: FederatedData) -> Report:
    """Reports what clients `ids` [S] receive and infer, and the word that each sends up for each
    of its peers.

    A client receives the models of its `peers` [S, F], and in its first round the common start
    as well. On its held-out samples (`tested`) it tests them, its own model from before its last
    training and, unless this is its first round, its own model after it.
    """
    sent = jnp.sum(peers < tested.num_clients, axis=1)
    started = kept.started[jnp.minimum(ids, tested.num_clients - 1)]
    others = sent + started
    models = jnp.where(others > 0, others + 1, 0)
    real = ids < tested.num_clients
    samples = models * client_range(ids, tested)[0]
    return make_report(make_bill(real * (sent + ~started), words_up=real * sent, samples=samples))


def first_order_mixture(task: Task, norm: Callable[[Params], jax.Array]) -> Callable[..., Any]:
    """Returns a function of one client: its new model, and the gain [1 + F] of each model
    that it can choose from (eqs. 4 to 6 of the paper).

    The gain is the fall of the loss on the samples of `data`, from the client's model before
    its last training, per unit of distance from that. The models of others are its own input,
    or () where it reads them from those of `all_models`.
    """
    losses = training_loss(task)

    def mix(client, data: FederatedData, all_models: Params, own):
        mixed, trained, others, peers = own
        last = data.num_clients - 1
        rows = jnp.concatenate([jnp.minimum(client, last)[None], peers])
        others = others or take_rows(all_models, jnp.minimum(peers, last))

        def join(one, more):
            return jnp.concatenate([one[None], more])

        choices = jax.tree.map(join, trained, others)
        tried = jax.tree.map(join, mixed, choices)

        def end(loss):
            change = jax.tree.map(jnp.subtract, choices, mixed)
            distance = norm(change)
            gain = (loss[0] - loss[1:]) / jnp.where(distance > 0, distance, 1.0)
            usable = (rows <= last) & (distance > 0) & jnp.isfinite(distance) & jnp.isfinite(gain)
            gain = jnp.where(usable, gain, 0.0)
            weight = jnp.maximum(gain, 0.0)
            weight = weight / jnp.where(weight.sum() > 0, weight.sum(), 1.0)
            count, _ = client_range(client, data)
            weight = jnp.where(count > 0, weight, jnp.arange(weight.size) == 0)

            def weigh(leaf):
                counts = weight.reshape(-1, *[1] * (leaf.ndim - 1)) > 0  # 0 x inf would be NaN
                return jnp.tensordot(weight, jnp.where(counts, leaf, 0.0), axes=1)

            return jax.tree.map(lambda own, leaf: own + weigh(leaf), mixed, change), gain

        return map_result(losses(client, data, tried, ()), end)

    return mix


def hold_out_samples(data: FederatedData, share: float) -> FederatedData:
    """Returns the data without a `share` of every client's training samples, evenly spread
    over them; they stay in `train.order`, behind the client's others.
    """
    train = data.train
    at = jnp.arange(train.order.size)
    # whose range it is: hidden samples have no owner, and stay behind those that are shown
    client = jnp.searchsorted(train.start, at, side="right").astype(jnp.int32) - 1
    place = at - train.start[client]
    shown = (client >= 0) & (place < train.size[client])
    # 1e-3: shares are rounded
    before, after = (jnp.floor(number * share + 1e-3) for number in (place, place + 1))
    part = jnp.where(shown, (after > before).astype(jnp.int32), 2)
    _, _, order = lax.sort((client, part, train.order), num_keys=2, is_stable=True)
    size = jnp.zeros_like(train.size).at[client].add((part == 0).astype(jnp.int32))
    return data.replace(train=ClientIndex(order, train.start, size))


def take_held_out(data: FederatedData) -> FederatedData:
    """Returns the data of `hold_out_samples` with the held-out samples as training samples."""
    train, owner = data.train, data.owner[data.train.order]
    owner = jnp.where(owner < 0, data.num_clients, owner)
    whole = jnp.zeros_like(train.size).at[owner].add(1, mode="drop")
    train = train.replace(start=train.start + train.size, size=whole - train.size)
    return data.replace(train=train)
