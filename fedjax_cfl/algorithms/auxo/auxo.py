"""Liu, Lai, Zhu, Fu, Gupta, Chowdhury, "Auxo: Efficient Federated Learning via Scalable
Client Clustering", SoCC 2023, https://arxiv.org/abs/2210.16656.

Groups grow by cuts in two. Only the clients of a round are looked at: each keeps a score
for every group, and for both sides of the next cut, and joins the group of its best score.

Differs from the paper, and follows its released code as far as it is described in words:
the signature of an update is its last tenth in full precision, and a client counts as
having trained in a group whenever it has taken part there.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from fedjax_cfl.algorithms.auxo.scores import Scores, prefers, score_cohort
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import keep_groups
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.hooks import Hooks, MigrateFn, Start, StartFn
from fedjax_cfl.round.start import one_active_group
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, Report, State, Task
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, check_arguments

# (memory, sizes [m], active [m]) -> [m] bool, the groups to cut
SplitFn = Callable[[Scores, jax.Array, jax.Array], jax.Array]


def split_at(split_rounds: Sequence[int] = (50, 100)) -> SplitFn:
    """Cuts every group after these rounds, as the released configuration does."""
    if not all(type(each) is int and each > 0 for each in split_rounds):
        raise InputError(
            f"algorithm.split_rounds={list(split_rounds)}: must be a list of whole numbers >= 1"
        )

    def due(memory: Scores, sizes: jax.Array, active: jax.Array) -> jax.Array:
        return active & jnp.any(memory.rounds[:, None] == jnp.array(tuple(split_rounds)), axis=1)

    return due


def split_adaptively(participants: PositiveInt = 100, least: NonNegativeFloat = 100.0) -> SplitFn:
    """Cuts a group of at least `least` * K / `participants` clients if each of its sides is
    preferred by more than K / 20 * 0.9^(groups - 1) clients.

    From the second cut on, their ratio must also be between 1/2 and 2.
    """

    def due(memory: Scores, sizes: jax.Array, active: jax.Array) -> jax.Array:
        clients, groups = memory.group.shape[0], active.sum()
        zero, one = jnp.sum(prefers(memory, 0), axis=0), jnp.sum(prefers(memory, 1), axis=0)
        fewest, most = jnp.minimum(zero, one), jnp.maximum(zero, one)
        enough = fewest > clients / 20 * 0.9 ** (groups - 1.0)
        even = (most < 2 * fewest) | (groups == 1)
        return active & (sizes >= least * clients / participants) & enough & even

    return due


PUBLISHED_SPLITS = split_at()


def auxo(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt = 4,
    split: SplitFn = PUBLISHED_SPLITS,
    explore: Fraction = 0.01,
    mu: NonNegativeFloat | jax.Array = 0.0,
) -> Algorithm:
    """Auxo with at most m groups.

    Args: `split` says which groups are cut: split_at(rounds) | split_adaptively(...); a
    client joins a random group with chance `explore`, times 0.99 every round; `mu` is the
    weight of FedProx's pull.
    """
    check_arguments(auxo, locals(), "algorithm")
    hooks = Hooks(
        sgd(task, local, proximal(mu, erm(task))),
        start=one_group(task, m),
        migrate=split_and_join(split, explore),
        assign=keep_groups,
        regroup=partial(score_cohort, local.execution.mesh),
        aggregate=uniform_mean,
    )
    return federated(task, local, system, hooks)


def one_group(task: Task, m: int) -> StartFn:
    """Starts with all clients in group 0, where they have score 1."""

    def start(key: Key, data: FederatedData) -> Start:
        initial, clients = one_active_group(task, m)(key, data), data.num_clients
        memory = Scores(
            group=jnp.zeros((clients, m)).at[:, 0].set(1.0),
            side=jnp.full((clients, m, 2), 0.5, jnp.float32),
            count=jnp.zeros((clients, m)),
            cut_seen=jnp.zeros(m, bool),
            rounds=jnp.zeros(m, jnp.int32),
            joining=jnp.zeros(clients, bool),
        )
        return initial._replace(assignment=jnp.zeros(clients, jnp.int32), memory=memory)

    return start


def split_and_join(split: SplitFn, explore: float) -> MigrateFn:
    """Cuts the groups that are due while there are free ones, and lets clients join the
    group of their best score: all of them after a cut, else those of the last round.
    """

    def migrate(key: Key, state: State, data: FederatedData) -> tuple[State, Report]:
        chance_key, choice = jax.random.split(key)
        memory, m, clients = state.memory, state.active.size, data.num_clients
        own = jnp.where(state.assignment >= 0, state.assignment, m)
        sizes = jnp.zeros(m, jnp.int32).at[own].add(1, mode="drop")
        chosen = split(memory, sizes, state.active) & state.active & (state.round > 0)
        before = state.active.sum()
        state = cut_groups(state, chosen)
        memory, active = state.memory, state.active
        everybody = active.sum() > before
        # a client that has never had samples has nothing to choose by, and joins when it has some
        able = (data.train.size > 0) | (memory.count.sum(1) > 0)
        joining = (memory.joining | everybody | (state.assignment < 0)) & able
        best = jnp.argmax(jnp.where(active, memory.group, -jnp.inf), axis=1)
        random = jax.random.randint(choice, (clients,), 0, active.sum())
        chance = explore * 0.99 ** state.round.astype(jnp.float32)
        free = (jax.random.uniform(chance_key, (clients,)) < chance) | (memory.count.sum(1) == 0)
        now = jnp.where(joining, jnp.where(free, random, best), state.assignment).astype(jnp.int32)
        moved = jnp.sum(now != state.assignment)
        return state.replace(assignment=now), make_report(migrated=moved)

    return migrate


def cut_groups(state: State, chosen: jax.Array) -> State:
    """Cuts the groups `chosen` [m] bool in two. Side 1 becomes the lowest free group, with a
    copy of the model; where none is free, nothing is cut.
    """
    memory, m = state.memory, state.active.size
    target = jnp.sum(state.active) + jnp.cumsum(chosen) - 1
    target = jnp.where(chosen & (target < m), target, m)
    number = jnp.arange(m)
    source = number.at[target].set(number, mode="drop")
    child, parent = source != number, target < m
    sides = [prefers(memory, side).astype(jnp.float32) for side in (0, 1)]
    score = jnp.where(parent, memory.group + sides[0], memory.group)
    score = jnp.where(child, (memory.group + sides[1])[:, source], score)
    count = jnp.where(parent, memory.count * sides[0], memory.count)
    count = jnp.where(child, (memory.count * sides[1])[:, source], count)
    reset = child | parent
    side = jnp.where(reset[None, :, None], score[:, :, None] / 2, memory.side)
    groups, server = take_rows((state.groups, state.server), source)
    memory = memory.replace(
        group=score,
        side=side,
        count=count,
        cut_seen=memory.cut_seen & ~reset,
        rounds=memory.rounds[source],
    )
    return state.replace(groups=groups, server=server, active=state.active | child, memory=memory)
