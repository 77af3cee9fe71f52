"""Zhang, Zhang, Cheng, Bao, Cao, Jiang, Xu, "Communication-efficient clustered federated
learning via model distance", Machine Learning 2024,
https://doi.org/10.1007/s10994-023-06443-4.

Clients train the model of their group, as in FedAvg. The server then finds the group of
each by itself: it makes samples that the group models are sure about, and compares on them
what the client's model and the group models answer. A client receives one model a round,
where IFCA sends all of them.

The groups are found while the models leave their first plateau. A model that answers all
classes alike has no samples of its own, and a client whose loss falls for the first time is
no longer near the model it started from: clients roam, and groups specialise. This takes a
small start, as PyTorch's layers have by default (`models.LeNet`). From Keras' kernels, with
which the loss falls at once, hardly any client leaves the group it was put in.

Differs from the paper: distances are averages over the pseudo-samples and not sums; the
prior mean 0.5 is read as mid-grey, which is 0 for pixels in [-1, 1].
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from typing_extensions import TypeAliasType

from fedjax_cfl.algorithms.md_icfl.synthesis import (
    MakeSampler,
    Prior,
    Sampler,
    back_search,
    generator,
    predict_alone,
)
from fedjax_cfl.client.cohort import CohortFn, over_clients
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.data.federated import check_classes, train_label_shares
from fedjax_cfl.method import AggregateFn, Method, MigrateFn, RegroupFn, Round, Start, StartFn
from fedjax_cfl.round.aggregate import MEANS, MeanName
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import charge, common_model, copy_model, keep_groups, random_groups
from fedjax_cfl.system.reports import add_to_ledger, make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import copy_statistics, take_rows, where_rows
from fedjax_cfl.types import Algorithm, Bill, FederatedData, Key, Params, Report, State, Task
from fedjax_cfl.validation import (
    Count,
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    checked,
    pick,
)

NOISE_SHARE = 0.1  # of the root mean square of a leaf

# (task, key, models [m, ...], the largest group [] int32) -> models [m, ...] for empty groups
RefillFn = TypeAliasType("RefillFn", Callable[[Task, Key, Params, jax.Array], Params])


LABELS = "labels"


class LabelShares(struct.PyTreeNode):
    """What the server knows of the clients' labels, the row `LABELS`. Its memory is what the
    sampler keeps.
    """

    share: jax.Array  # [K, C] float32
    known: jax.Array  # [K] bool


def keep_label_shares(r: Round, share: jax.Array) -> tuple[jax.Array, LabelShares]:
    """Returns the label shares [S, C] that the clients of the cohort sent with their first model
    (Algorithm 1), for some of them the `share` [S, C] now, and what the server then knows.
    """
    kept = r.state.rows[LABELS]
    first = (r.upload.weight > 0) & ~r.cohort.take(kept.known)
    table = r.cohort.put(kept.share, share, first)
    return r.cohort.take(table), LabelShares(table, r.cohort.put(kept.known, True, first))


def bill_label_shares(r: Round) -> Bill:
    """Returns the C words of clients whose label shares the server does not know."""
    unknown = ~r.cohort.take(r.state.rows[LABELS].known) & (r.cohort.take(r.data.train.size) > 0)
    return make_bill(words_up=unknown * r.data.num_classes)


@checked("algorithm")
def md_icfl(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt,
    start: Literal["random", "common"] = "random",
    sampling: Literal["back_search", "generator"] | MakeSampler = "back_search",
    privacy: Literal["weak", "strong"] = "weak",
    aggregate: MeanName | AggregateFn = "uniform",
    empty: Literal["keep", "copy", "new"] = "keep",
    samples: Count = 30,
    prior_weight: NonNegativeFloat = 0.1,
    prior_mean: FiniteFloat = 0.0,
    squared: bool = False,
    search_lr: PositiveFloat = 0.1,
    search_steps: PositiveInt = 100,
    hidden: PositiveInt = 256,
    generator_lr: PositiveFloat = 0.01,
    generator_steps: PositiveInt = 1000,
    generator_batch: Count = 100,
    bounded: bool = True,
    warm_start: bool = False,
) -> Algorithm:
    """MD-ICFL with m groups; clients start in random ones.

    Args: `start` random | common, the first models: m different ones, or one for all; `sampling`
    back_search, with `search_lr` and `search_steps` | generator, with `hidden`, `generator_lr`,
    `generator_steps`, `generator_batch` and `bounded`, see the functions of `synthesis` of these
    names; `privacy` weak | strong: the groups are the same where no data change; `aggregate`
    uniform | samples; `empty`: the model of a group that no client is in any more, which the paper
    does not say: keep the old one | copy, the largest group's with noise | new, a random one;
    `samples` of each group and class; `prior_weight`, `prior_mean` and `squared` are those of
    `synthesis.Prior`; `warm_start` goes on from the samples, or generators, of the round before.
    """
    prior = Prior(prior_mean, prior_weight, squared)
    search = back_search(samples, search_lr, search_steps, prior, warm_start)
    adam = generator_lr, generator_steps, generator_batch
    draw = generator(samples, hidden, *adam, prior, bounded, warm_start)
    sampler = pick(sampling, back_search=search, generator=draw)(task, local)
    models = random_groups(task, m) if start == "random" else common_model(task, m)
    is_weak = privacy == "weak"
    refill = {"keep": None, "copy": copy_largest, "new": new_models}[empty]
    method = Method(
        sgd(task, local),
        start=random_assignment(models, m, sampler, is_weak),
        migrate=refill_empty_groups(task, refill) if refill else None,
        assign=keep_groups,
        takes_newcomers=True,  # by what they have trained
        prepare=charge(bill_label_shares) if is_weak else None,
        regroup=join_nearest_model(task, local, sampler, is_weak),
        aggregate=pick(aggregate, **MEANS),
    )
    return federated(task, local, system, method)


def random_assignment(models: StartFn, m: int, sampler: Sampler, is_weak: bool) -> StartFn:
    """Starts from the `models` of another start; every client is in a random group. `is_weak`: the
    server keeps label shares.
    """

    def start(key: Key, data: FederatedData) -> Start:
        check_classes(data, "algorithm=md_icfl", "use another algorithm, as ifca or flexcfl")
        groups = models(key, data).groups
        keys = jax.random.split(jax.random.fold_in(key, m))
        assignment = jax.random.randint(keys[0], (data.num_clients,), 0, m)
        memory = sampler.init(keys[1], groups, data)
        clients, none = data.num_clients, jnp.zeros(data.num_clients, bool)
        labels = LabelShares(jnp.zeros((clients, data.num_classes)), none)
        return Start(groups, assignment, memory, {LABELS: labels} if is_weak else {})

    return start


def join_nearest_model(task: Task, local: Local, sampler: Sampler, is_weak: bool) -> RegroupFn:
    """Moves each client that answered to the group of least federated model distance.

    Its model is compared with the group models before the aggregation, the one it trained from
    included. Unless privacy `is_weak` each client weighs its class-wise distances itself (Algorithm
    2): it receives m C words, and sends the number of its group, one word.
    """
    measure = class_distances(task, local)

    def regroup(r: Round) -> tuple[State, jax.Array]:
        state, data, upload = r.state, r.data, r.upload
        answered = upload.weight > 0
        samples, kept = sampler.sample(r.key, state.memory, state.groups, data)
        own, m = (upload.start_group, upload.delta), state.active.size
        distance = measure(r.cohort, data, (state.groups, samples), own)
        state, share = state.replace(memory=kept), r.cohort.take(train_label_shares(data))
        if is_weak:
            share, labels = keep_label_shares(r, share)
            state = state.put_rows({LABELS: labels})
        else:
            sent = make_bill(words_down=answered * m * data.num_classes, words_up=answered)
            state = state.replace(traffic=add_to_ledger(state.traffic, sent))
        return state, jnp.where(answered, nearest_group(share, distance, r.group), r.group)

    return regroup


def copy_largest(task: Task, key: Key, models: Params, largest: jax.Array) -> Params:
    """Returns m copies [m, ...] of the largest group's model, each with noise of its own: normal,
    a tenth of the root mean square of each leaf. Running statistics stay as they are. A
    `RefillFn`.

    Args: as those of `RefillFn`; `task` is not used.
    """
    count = len(jax.tree.leaves(models)[0])
    copies = copy_model(take_rows(models, largest), count)
    leaves, kind = jax.tree.flatten(copies)
    noisy = [
        leaf
        + NOISE_SHARE * jnp.sqrt(jnp.mean(jnp.square(leaf))) * jax.random.normal(own, leaf.shape)
        for own, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return copy_statistics(jax.tree.unflatten(kind, noisy), copies)


def new_models(task: Task, key: Key, models: Params, largest: jax.Array) -> Params:
    """Returns m new random models [m, ...]. A `RefillFn`.

    Args: as those of `RefillFn`; only `task`, `key` and the number of models are used.
    """
    return jax.vmap(task.init)(jax.random.split(key, len(jax.tree.leaves(models)[0])))


def refill_empty_groups(task: Task, refill: RefillFn) -> MigrateFn:
    """Gives each empty group the model that `refill` makes, before every round but the first.

    A group is empty if no client that has training samples is in it, whether or not it took part
    in the last round: there line 12 of Algorithm 1 divides 0 by 0. Nothing is sent: clients receive
    the model of their group as ever.
    """

    def migrate(r: Round) -> tuple[State, Report]:
        state = r.state
        inside = state.assignment[:, None] == jnp.arange(state.active.size)  # [K, m]
        size = jnp.sum(inside & (r.data.train.size > 0)[:, None], axis=0)
        made = refill(task, r.key, state.groups, jnp.argmax(size))
        empty = (size == 0) & (state.round > 0)
        return state.replace(groups=where_rows(empty, made, state.groups)), make_report()

    return migrate


def class_distances(task: Task, local: Local) -> CohortFn:
    """Returns a function of a cohort: the class-wise distances [S, m, C], from 0 to 2, of the
    clients' models to the group models (eq. 5).

    It is (cohort, data, (models [m, ...], samples [m, C, M, ...]), (start_group [S], delta
    [S, ...])). Differs from the paper: M distances are averaged and not added up.
    """

    def client_distance(client: jax.Array, data: FederatedData, shared: Any, own: Any) -> jax.Array:
        (models, samples, answers), (start, delta) = shared, own
        model = jax.tree.map(lambda group, change: group[start] + change, models, delta)

        def to_group(inputs):
            x, expected = inputs
            return jnp.mean(jnp.sum(jnp.abs(answer(task, model, x) - expected), -1), -1)

        return lax.map(to_group, (samples, answers))

    measure = over_clients(client_distance, local.execution)

    def run(cohort, data, shared, client_inputs=()):
        models, samples = shared
        answers = lax.map(lambda one: answer(task, *one), (models, samples))
        return measure(cohort, data, (models, samples, answers), client_inputs)

    return run


def answer(task: Task, model: Params, samples: jax.Array) -> jax.Array:
    """Returns the probabilities [C, M, C] that a model gives samples [C, M, ...], each alone."""
    flat = samples.reshape(-1, *samples.shape[2:])
    return jax.nn.softmax(predict_alone(task, model, flat)).reshape(*samples.shape[:2], -1)


def nearest_group(label_share: jax.Array, distance: jax.Array, present: jax.Array) -> jax.Array:
    """Returns the group [S] int32 of least federated model distance (eqs. 3 and 4); the
    lowest of several. A client whose distances are not finite stays in its `present` [S].

    `label_share` [S, C] are the shares of the classes among each client's samples;
    `distance` [S, m, C].
    """
    total = jnp.einsum("sc,smc->sm", label_share, distance)
    finite = jnp.isfinite(total)
    nearest = jnp.argmin(jnp.where(finite, total, jnp.inf), axis=1)
    return jnp.where(finite.any(1), nearest, present).astype(jnp.int32)
