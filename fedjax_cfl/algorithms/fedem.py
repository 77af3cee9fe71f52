"""Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, https://arxiv.org/abs/2108.10252.

Each client's data are a mixture, with weights of its own, of m distributions that all clients
share. A client ascribes each of its samples to the m models in parts (E-step), and trains every
model on samples that weigh as their parts (M-step). It predicts by the mean of the models'
probabilities with its weights.

Differs from the paper: models start at random, and no momentum is kept between rounds (the
authors' code starts image models from ImageNet weights and keeps momentum buffers); the short last
batch is kept. The server averages over the clients of a round; `shrink` is the code's arithmetic,
in which absent clients stand at the old models. A client whose update is not used keeps the weights
that it had. The reported training loss is the sum of the models' weighted losses. The group of a
client, in reports, is the model of its largest weight; a client has none before its first round.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.tree_util import Partial

from fedjax_cfl.client.cohort import ClientFn, client_range, over_clients
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Training, Work
from fedjax_cfl.client.mixture import mean_responsibility, share_samples
from fedjax_cfl.client.objective import erm
from fedjax_cfl.client.sgd import ClientInputs, LocalSGD, as_pytree, change_training
from fedjax_cfl.client.steps import direct_loop, no_velocity
from fedjax_cfl.data.federated import check_classes
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import FinishFn, Method, PrepareFn, Round
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import keep_groups, no_clients, random_groups
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.tree import group_mean, group_sum, take_rows
from fedjax_cfl.types import (
    Algorithm,
    FederatedData,
    Params,
    Report,
    ServedModels,
    State,
    Task,
    Upload,
)
from fedjax_cfl.validation import PositiveInt, checked

NO_STEP = 2**32 - 1  # a number that no step has, for keys


MIXTURE = "mixture"


class ClientMixture(struct.PyTreeNode):
    """What is kept of every client, the row `MIXTURE`: pi stays on the client, the rest of it on
    the server. The memory is R > 0 [m, C], the label shares of the models; () in FedEM.
    """

    weights: jax.Array  # [K, m] pi, rows sum to 1
    met: jax.Array  # [K] bool, an update of the client has been used
    by_label: Any  # [K, m, C] A, the last that each client has sent; () in FedEM


class Expected(struct.PyTreeNode):
    """What the E-step gives a client for its training."""

    parts: jax.Array  # [m, at least n] q of its samples
    by_label: jax.Array  # [m, C] sums of q
    share: jax.Array  # [] its samples, of those of all clients


@checked("algorithm")
def fedem(
    task: Task, local: Local, system: SystemLike, *, m: PositiveInt, shrink: bool = False
) -> Algorithm:
    """FedEM (Algorithm 1) with m models, which every client of a round receives, trains and sends.

    With m = 1 it is FedAvg. `shrink` divides by the samples of all K clients, not of those in the
    round, so that the models take a step as much shorter as fewer clients take part. A client
    shuffles its samples again for each model. Its weights pi stay on the client: nothing but models
    is sent. A new client takes one E-step from equal weights; without labels it is not defined.
    Raises InputError for what a mixture cannot be used with, see `refuse_single_models`.
    """
    return federated_mixture(task, local, system, m, "FedEM", shrink=shrink)


def federated_mixture(
    task: Task,
    local: Local,
    system: SystemLike,
    m: int,
    name: str,
    *,
    shrink: bool = False,
    least_count: float | None = None,
) -> Algorithm:
    """Returns FedEM, or, with the floor `least_count` of a label's sum, FedRC; `name` is the
    method's, for messages.
    """
    refuse_single_models(local, system, name)
    method = Method(
        train_components(task, local, m),
        start=random_groups(task, m),
        memory=partial(init_shares, m) if least_count is not None else None,
        client_rows=partial(init_mixture, m, least_count is not None),
        assign=keep_groups,
        prepare=expect(task, local, m),
        aggregate=mean_of_all if shrink else mean_of_cohort,
        finish=remember_mixture(least_count),
        # `shrink` reads the sizes of all clients
        start_clients=None if shrink else no_clients,
        takes_newcomers=True,  # a client that trains finds its weights
    )
    return federated(task, local, system, method)._replace(serve=serve_mixture)


def refuse_single_models(local: Local, system: SystemLike, name: str) -> None:
    """Raises InputError for what is defined for clients with one model each: personal methods,
    training in sample space, a clock for each group, and a selection by the losses of groups'
    models.
    """
    given = as_system(system)
    dual = local.execution.first_layer == "dual"
    timed = given.clock is not None and given.clock.per_group
    polls = given.select.poll is not None
    refused = (
        (bool(local.layers), "personal", "a model beside m is not defined", "none"),
        (dual, "local.first_layer=dual", "m models have no form in sample space", "auto"),
        (timed, "clock.per_group=true", "no group is done before another", "false"),
        (polls, "selection", "power-of-choice asks for the loss of one", "selection=null"),
    )
    for holds, setting, reason, instead in refused:
        if holds:
            raise InputError(
                f"{setting}: clients of {name} receive and train all m models, and {reason}; use"
                f" {instead}, or another algorithm"
            )


OTHERS = "use another algorithm, as ifca or fedsoft"  # which mix no probabilities


def init_mixture(
    m: int, with_labels: bool, groups: Params, data: FederatedData
) -> dict[str, ClientMixture]:
    """Returns the rows of clients that all have equal parts of m models."""
    clients, labels = data.num_clients, data.num_classes
    check_classes(data, f"algorithm={'fedrc' if with_labels else 'fedem'}", OTHERS)
    mixture = ClientMixture(
        jnp.full((clients, m), 1 / m, jnp.float32),
        jnp.zeros(clients, bool),
        jnp.zeros((clients, m, labels)) if with_labels else (),
    )
    return {MIXTURE: mixture}


def init_shares(m: int, groups: Params, data: FederatedData) -> jax.Array:
    """Returns the label shares [m, C] of models that have seen nothing yet."""
    return jnp.full((m, data.num_classes), 1 / m, jnp.float32)


def expect(task: Task, local: Local, m: int) -> PrepareFn:
    """Takes the E-step of the cohort's clients, from the models that they receive.

    The round counts one model down and one up; m - 1 more go with it, and in FedRC R down and A
    up, m C words each.
    """
    estep = over_clients(share_samples(task), local.execution)

    def prepare(r: Round) -> tuple[Work, Report]:
        data, cohort, work = r.data, r.cohort, r.work
        shares, size = find_label_shares(r.state), client_range(cohort.ids, data)[0]
        weights = cohort.take(r.state.rows[MIXTURE].weights)
        found = estep(cohort, data, (r.state.groups, shares), weights)
        share = size / jnp.maximum(jnp.sum(data.train.size), 1)
        real = r.real.astype(jnp.int32)
        models, words = real * (m - 1), real * m * data.num_classes * (shares is not None)
        sent = make_bill(models, models, words, words, samples=m * size)
        work = work._replace(client_extra=Expected(found.each, found.by_label, share))
        return work, make_report(sent)

    return prepare


def find_label_shares(state: State) -> jax.Array | None:
    """Returns the label shares [m, C] that divide likelihoods; None: the method has none."""
    return None if isinstance(state.memory, tuple) else state.memory


def train_components(task: Task, local: Local, m: int) -> ClientFn:
    """Trains all m models of one client, each as in FedAvg on its own shuffled batches, in which
    sample n counts q_kn times: batches are not normalised, so that a model takes steps as long as
    the client's part in it. A weight decay or an L2 penalty is not weighted.

    The upload has `delta` [m, ...], the steps of all models, and the sums of q by label as
    `extra`.
    """
    plain = erm(task)
    penalty = plain.l2
    # of the m models together, for the loss that is reported
    reported = plain.replace(l2=penalty and (lambda models: jnp.sum(jax.vmap(penalty)(models))))
    in_turn = LocalSGD(local, partial(one_after_another, plain))
    train = Partial(in_turn, (), as_pytree(reported), local.lr)

    def begin(c: ClientInputs) -> tuple[Params, Work]:
        return c.models, c.work._replace(client_extra=c.work.client_extra.parts)

    def send(c: ClientInputs, models: Params, upload: Upload) -> Upload:
        return upload.replace(steps=m * upload.steps, extra=c.work.client_extra.by_label)

    return change_training(train, send, begin)


def one_after_another(objective: Any, training: Training, data: FederatedData) -> Loop:
    """Returns the training of one client's m models `training.start` [m, ...], one after another:
    model k on samples that count `training.client_extra` [m, n] times. The first one has the
    batches of FedAvg.
    """
    start, plan, parts = training.start, training.plan, training.client_extra
    m, steps = parts.shape[0], jnp.maximum(plan.steps, 1)
    others = jax.random.split(jax.random.fold_in(training.key, NO_STEP), m - 1)
    keys = jnp.concatenate([training.key[None], others])
    words = jax.vmap(lambda key: jax.random.bits(key, (2,)))(keys)
    tables = None
    if training.table is not None:
        passes = training.samples, training.local, data.max_client_samples
        tables = jax.lax.map(lambda own: plan._replace(random_words=own).make_table(*passes), words)

    def of_model(k: jax.Array) -> Loop:
        component = training._replace(
            objective=objective,
            start=take_rows(start, k),
            client_extra=(),
            key=keys[k],
            plan=plan._replace(random_words=words[k]),
            table=take_rows(tables, k),
            weights=parts[k],
        )
        return direct_loop(component, data)

    def step(i, carry):
        k = i // steps
        stepped = of_model(k).step(i - k * steps, take_rows(carry, k))
        return jax.tree.map(lambda all, one: all.at[k].set(one), carry, stepped)

    def end(carry):
        trained, _, _, losses = carry
        return jax.tree.map(jnp.subtract, trained, start), jnp.stack(losses).sum(1), {}

    nothing, velocities = jnp.zeros(m), (no_velocity(training.local, start), ())
    return Loop(m * plan.steps, (start, (), velocities, (nothing, nothing)), step, end)


def mean_of_cohort(r: Round) -> tuple[Params, jax.Array]:
    """Averages each model's updates over the cohort, weighted by training samples."""
    mean, mass = group_mean(r.upload.weight, jnp.zeros_like(r.group), r.upload.delta, 1)
    return take_rows(mean, 0), jnp.broadcast_to(mass, r.state.active.shape)


def mean_of_all(r: Round) -> tuple[Params, jax.Array]:
    """Averages as if all clients had taken part, those that did not with updates of 0."""
    upload = r.upload
    share = jnp.where(upload.weight > 0, r.work.client_extra.share, 0.0)
    step = take_rows(group_sum(share[:, None], upload.delta), 0)
    return step, jnp.broadcast_to(upload.weight.sum(), r.state.active.shape)


def remember_mixture(least_count: float | None) -> FinishFn:
    """Keeps the weights of the clients whose update is used, and in FedRC their sums by label:
    R_k(c) is the sum over the clients met, at least `least_count`, normalised over c.
    """

    def finish(r: Round) -> State:
        cohort = r.cohort
        state, kept, sums = r.state, r.state.rows[MIXTURE], r.upload.extra
        used = (r.upload.weight > 0) & (sums.sum((1, 2)) > 0)
        new = mean_responsibility(sums, cohort.take(kept.weights))
        kept = kept.replace(
            weights=cohort.put(kept.weights, new, used), met=cohort.put(kept.met, True, used)
        )
        if least_count is not None:
            kept = kept.replace(by_label=cohort.put(kept.by_label, sums, used))
            total = jnp.maximum(kept.by_label.sum(0), least_count)
            shares = total / total.sum(1, keepdims=True)
            state = state.replace(memory=jnp.where(kept.met.any(), shares, state.memory))
        strongest = jnp.argmax(kept.weights, axis=1).astype(jnp.int32)
        assignment = jnp.where(kept.met, strongest, -1)
        return state.replace(assignment=assignment).put_rows({MIXTURE: kept})

    return finish


def serve_mixture(state: State) -> ServedModels:
    """Serves each client the mixture of all models with its weights."""
    weights = state.rows[MIXTURE].weights
    return ServedModels(state.groups, state.assignment, weights, find_label_shares(state))
