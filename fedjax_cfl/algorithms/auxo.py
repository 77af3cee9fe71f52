"""Liu, Lai, Zhu, Fu, Gupta, Chowdhury, "Auxo: Efficient Federated Learning via Scalable
Client Clustering", SoCC 2023, https://arxiv.org/abs/2210.16656.

Groups grow by cuts in two. Only the clients of a round are looked at: each keeps a score
for every group, and for both sides of the next cut, and joins the group of its best score.

Differs from the paper, and follows its released code as far as it is described in words:
the signature of an update is its last tenth in full precision, and a client counts as
having trained in a group whenever it has taken part there.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from typing_extensions import TypeAliasType

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.distances import as_rows, dot
from fedjax_cfl.clustering.kmeans import kmeans
from fedjax_cfl.method import Method, MigrateFn, Round
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import keep_groups, one_active_group
from fedjax_cfl.sharding import on_every_device
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Key, Params, Report, State, Task
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, checked, pick

LEAST_CLIENTS = 5  # of a group in a round: with fewer, none is scored
# of 2-means: over 200 groups of ten random unit vectors its cut is 0.1 % above the best in the
# mean, 1.6 % at most; with 4 restarts it is 1.4 and 7.8 %
RESTARTS = 32
REWARD = 5.0


SCORES = "scores"


class Scores(struct.PyTreeNode):
    """What is known of the clients, for each group, the row `SCORES`."""

    group: jax.Array  # [K, m] float32, how well the client fits the group
    side: jax.Array  # [K, m, 2] float32, how well it fits each side of the next cut
    count: jax.Array  # [K, m] float32, rounds in the group, 0 after a cut for the other side
    joining: jax.Array  # [K] bool, clients that choose their group before the next round


class Cuts(struct.PyTreeNode):
    """What is known of the groups."""

    cut_seen: jax.Array  # [m] bool, sides have been named since the last cut
    rounds: jax.Array  # [m] int32, of the group and of those it was cut from


class Fit(NamedTuple):
    """What the clients of one group did in a round, each [S]."""

    member: jax.Array  # bool
    known: jax.Array  # bool, have trained here before and belong here
    side: jax.Array  # [S, 2], sides so far
    score: jax.Array
    first: jax.Array  # [] bool, no side has been named since the last cut
    several: jax.Array  # [] bool, there is more than one group


# (scores, cuts, sizes [m], active [m]) -> [m] bool, the groups to cut
SplitFn = TypeAliasType("SplitFn", Callable[[Scores, Cuts, jax.Array, jax.Array], jax.Array])


@checked("algorithm")
def split_at(split_rounds: tuple[PositiveInt, ...] = (50, 100)) -> SplitFn:
    """Cuts every group after these rounds, as the released configuration does."""

    def due(scores: Scores, cuts: Cuts, sizes: jax.Array, active: jax.Array) -> jax.Array:
        return active & jnp.any(cuts.rounds[:, None] == jnp.array(tuple(split_rounds)), axis=1)

    return due


def split_adaptively(participants: PositiveInt = 100, least: NonNegativeFloat = 100.0) -> SplitFn:
    """Cuts a group of at least `least` * K / `participants` clients if each of its sides is
    preferred by more than K / 20 * 0.9^(groups - 1) clients.

    From the second cut on, their ratio must also be between 1/2 and 2.
    """

    def due(scores: Scores, cuts: Cuts, sizes: jax.Array, active: jax.Array) -> jax.Array:
        clients, groups = scores.group.shape[0], active.sum()
        zero, one = jnp.sum(prefers(scores, 0), axis=0), jnp.sum(prefers(scores, 1), axis=0)
        fewest, most = jnp.minimum(zero, one), jnp.maximum(zero, one)
        enough = fewest > clients / 20 * 0.9 ** (groups - 1.0)
        even = (most < 2 * fewest) | (groups == 1)
        return active & (sizes >= least * clients / participants) & enough & even

    return due


@checked("algorithm")
def auxo(
    task: Task,
    local: Local,
    system: SystemLike,
    *,
    m: PositiveInt = 4,
    split: Literal["fixed", "adaptive"] | SplitFn = "fixed",
    split_rounds: tuple[PositiveInt, ...] = (50, 100),
    participants: PositiveInt = 100,
    least: NonNegativeFloat = 100.0,
    explore: Fraction = 0.01,
    mu: NonNegativeFloat | jax.Array = 0.0,
) -> Algorithm:
    """Auxo with at most m groups.

    Args: `split` says which groups are cut: fixed, after `split_rounds`, see `split_at` | adaptive,
    with `participants` and `least`, see `split_adaptively`; a client joins a random group with
    chance `explore`, times 0.99 every round; `mu` is the weight of FedProx's pull.
    """
    fixed, adaptive = split_at(split_rounds), split_adaptively(participants, least)
    due = pick(split, fixed=fixed, adaptive=adaptive)
    method = Method(
        sgd(task, local, proximal(mu, erm(task))),
        start=one_active_group(task, m, joined=True),
        takes_newcomers=False,
        memory=lambda groups, data: Cuts(jnp.zeros(m, bool), jnp.zeros(m, jnp.int32)),
        client_rows=partial(init_scores, m),
        migrate=split_and_join(due, explore),
        assign=keep_groups,
        regroup=partial(score_cohort, local.execution.mesh),
        aggregate=uniform_mean,
    )
    return federated(task, local, system, method)


def init_scores(m: int, groups: Params, data: FederatedData) -> dict[str, Scores]:
    """Returns the scores of clients that are all in group 0: there it is 1."""
    clients = data.num_clients
    scores = Scores(
        group=jnp.zeros((clients, m)).at[:, 0].set(1.0),
        side=jnp.full((clients, m, 2), 0.5, jnp.float32),
        count=jnp.zeros((clients, m)),
        joining=jnp.zeros(clients, bool),
    )
    return {SCORES: scores}


def split_and_join(split: SplitFn, explore: float) -> MigrateFn:
    """Cuts the groups that are due while there are free ones, and lets clients join the
    group of their best score: all of them after a cut, else those of the last round.
    """

    def migrate(r: Round) -> tuple[State, Report]:
        state = r.state
        chance_key, choice = jax.random.split(r.key)
        m, clients = state.active.size, r.data.num_clients
        own = jnp.where(state.assignment >= 0, state.assignment, m)
        sizes = jnp.zeros(m, jnp.int32).at[own].add(1, mode="drop")
        chosen = split(state.rows[SCORES], state.memory, sizes, state.active)
        chosen &= state.active & (state.round > 0)
        before = state.active.sum()
        state = cut_groups(state, chosen)
        scores, active = state.rows[SCORES], state.active
        was_cut = active.sum() > before
        # a client that has never had samples has nothing to choose by, and joins when it has some
        able = (r.data.train.size > 0) | (scores.count.sum(1) > 0)
        joining = (scores.joining | was_cut | (state.assignment < 0)) & able
        best = jnp.argmax(jnp.where(active, scores.group, -jnp.inf), axis=1)
        random = jax.random.randint(choice, (clients,), 0, active.sum())
        chance = explore * 0.99 ** state.round.astype(jnp.float32)
        free = (jax.random.uniform(chance_key, (clients,)) < chance) | (scores.count.sum(1) == 0)
        now = jnp.where(joining, jnp.where(free, random, best), state.assignment).astype(jnp.int32)
        moved = jnp.sum(now != state.assignment)
        return state.replace(assignment=now), make_report(migrated=moved)

    return migrate


def cut_groups(state: State, chosen: jax.Array) -> State:
    """Cuts the groups `chosen` [m] bool in two. Side 1 becomes the lowest free group, with a
    copy of the model; where none is free, nothing is cut.
    """
    scores, cuts, m = state.rows[SCORES], state.memory, state.active.size
    target = jnp.sum(state.active) + jnp.cumsum(chosen) - 1
    target = jnp.where(chosen & (target < m), target, m)
    number = jnp.arange(m)
    source = number.at[target].set(number, mode="drop")
    child, parent = source != number, target < m
    sides = [prefers(scores, side).astype(jnp.float32) for side in (0, 1)]
    score = jnp.where(parent, scores.group + sides[0], scores.group)
    score = jnp.where(child, (scores.group + sides[1])[:, source], score)
    count = jnp.where(parent, scores.count * sides[0], scores.count)
    count = jnp.where(child, (scores.count * sides[1])[:, source], count)
    reset = child | parent
    side = jnp.where(reset[None, :, None], score[:, :, None] / 2, scores.side)
    groups, server = take_rows((state.groups, state.server), source)
    cuts = Cuts(cuts.cut_seen & ~reset, cuts.rounds[source])
    state = state.put_rows({SCORES: scores.replace(group=score, side=side, count=count)})
    return state.replace(groups=groups, server=server, active=state.active | child, memory=cuts)


def prefers(scores: Scores, side: int) -> jax.Array:
    """Returns which clients [K, m] bool prefer a side of each group."""
    return scores.side[:, :, side] > scores.side[:, :, 1 - side]


def last_tenth(delta: Params) -> jax.Array:
    """Returns the last tenth [S, p] of the parameters of the updates `delta` [S, ...]."""
    rows = as_rows(delta)
    taken, left = [], max(sum(row.shape[1] for row in rows) // 10, 1)
    for row in reversed(rows):
        taken.append(row[:, max(row.shape[1] - left, 0) :])
        left -= taken[-1].shape[1]
        if left <= 0:
            break
    return jnp.concatenate(taken[::-1], axis=1)


def name_sides(key: Key, unit: jax.Array, fit: Fit) -> jax.Array:
    """Returns the side [S] int32 of each client, -1 where none is named.

    At the first time in a group, 2-means of the unit vectors [S, p] names them. Later a
    client has the side it prefers. The others take that of the nearest client that has
    one; where all have the same, only the nearest quarter to the first of them.

    Args: `key` draws the first centers of 2-means; `unit` [S, p] are unit vectors of the
    updates, centered in the group.
    """
    rows = jnp.where(fit.several, fit.member & fit.known, fit.member)
    labels = kmeans(key, unit, 2, restarts=RESTARTS, weight=rows.astype(jnp.float32)).labels
    fresh = jnp.where(rows & (rows.sum() >= 2), labels, -1)

    prefer = jnp.where(fit.side[:, 1] > fit.side[:, 0], 1, 0)
    undecided = (fit.side[:, 0] == fit.side[:, 1]) | (fit.score < 0)
    named = fit.member & ~undecided
    both = jnp.any(named & (prefer == 0)) & jnp.any(named & (prefer == 1))
    apart = 2 - 2 * dot(unit, unit.T)  # squared distances of unit vectors
    nearest = jnp.argmin(jnp.where(named, apart, jnp.inf), axis=1)
    of_neighbour = jnp.where(named, prefer, prefer[nearest])
    leader = jnp.argmax(named)
    far = jnp.where(fit.member & ~named, apart[leader], jnp.inf)
    close = jnp.argsort(jnp.argsort(far)) < fit.member.sum() // 4
    of_leader = jnp.where(named | (close & jnp.isfinite(far)), prefer[leader], -1)
    later = jnp.where(both, of_neighbour, jnp.where(jnp.any(named), of_leader, -1))
    return jnp.where(fit.member, jnp.where(fit.first, fresh, later), -1).astype(jnp.int32)


def score_group(key: Key, signature: jax.Array, fit: Fit) -> tuple[jax.Array, jax.Array]:
    """Returns (side [S, 2], score [S]) of the clients of one group after a round. `signature` [S,
    p] are the parts of the updates that are compared, see `last_tenth`.
    """
    size = fit.member.sum()
    present = fit.member.astype(jnp.float32)
    centered = signature - present @ signature / jnp.maximum(size, 1)
    norm = jnp.sqrt(jnp.sum(jnp.square(centered), axis=1, keepdims=True))
    unit = jnp.where(norm > 0, centered / jnp.where(norm > 0, norm, 1), 0)
    named = name_sides(key, unit, fit)
    sign = jnp.where(named[:, None] == jnp.arange(2), 1.0, -1.0)
    side = fit.side + jnp.where((named >= 0)[:, None], sign, 0.0)

    known = fit.member & fit.known
    center = known @ centered / jnp.maximum(known.sum(), 1)
    distance = jnp.sqrt(jnp.sum(jnp.square(centered - center), axis=1))
    mean = jnp.sum(present * distance) / jnp.maximum(size, 1)
    spread = jnp.sqrt(jnp.sum(present * jnp.square(distance - mean)) / jnp.maximum(size, 1))
    scale = jnp.maximum(mean + spread, 1e-12)
    reward = REWARD * (1 - distance / scale) * known.sum() / jnp.maximum(size, 1)
    reward = jnp.where(fit.member & fit.several & (known.sum() >= 2), reward, 0.0)
    score = fit.score + reward
    side = jnp.where((reward < 0)[:, None], score[:, None] / 2, side)
    enough = size >= LEAST_CLIENTS
    return jnp.where(enough, side, fit.side), jnp.where(enough, score, fit.score)


def score_groups(
    key: Key,
    kept: tuple[Scores, Cuts],
    clients: jax.Array,
    sent: jax.Array,
    gid: jax.Array,
    signature: jax.Array,
    several: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns for each group: (side [m, S, 2], score [m, S], whether its sides were named now
    [m], member [m, S]).

    Args: `kept` has the scores and cuts so far; `clients` [S] int32 are the rows of the slots'
    clients; `sent` [S] bool says whose update counts; `gid` [S] int32 is the group of each slot;
    `signature` [S, p] and `several` [] are as in `score_group`.
    """
    scores, cuts = kept

    def of_group(k):
        count, score = scores.count[clients, k], scores.group[clients, k]
        member, known, first = sent & (gid == k), (count > 0) & (score > 1), ~cuts.cut_seen[k]
        fit = Fit(member, known, scores.side[clients, k], score, first, several)
        side, score = score_group(jax.random.fold_in(key, k), signature, fit)
        named = first & jnp.any(fit.member[:, None] & (side != fit.side))
        return side, score, named, fit.member

    return lax.map(of_group, jnp.arange(cuts.rounds.size))


def score_cohort(mesh: Mesh | None, r: Round) -> tuple[State, jax.Array]:
    """Scores the clients of a round by their updates. They train on in their group, and may
    join another before the next round.

    Args: each device of `mesh` computes all scores by itself, None: one device; the others are
    those of `RegroupFn`, which this is without `mesh`.
    """
    state, cohort = r.state, r.cohort
    kept, cuts, several = state.rows[SCORES], state.memory, state.active.sum() > 1
    clients = jnp.minimum(cohort.ids, r.data.num_clients - 1)
    sent, signature = r.upload.weight > 0, last_tenth(r.upload.delta)
    sides, scores, named, members = on_every_device(score_groups, mesh)(
        r.key, (kept, cuts), clients, sent, r.group, signature, several
    )
    rows = jnp.where(sent, cohort.ids, r.data.num_clients)
    side = jnp.where(members.T[:, :, None], sides.swapaxes(0, 1), kept.side[clients])
    score = jnp.where(members.T, scores.T, kept.group[clients])
    new = Scores(
        side=cohort.put(kept.side, side, sent),
        group=cohort.put(kept.group, score, sent),
        count=kept.count.at[rows].add(members.T.astype(jnp.float32), mode="drop"),
        joining=cohort.put(jnp.zeros_like(kept.joining), True, sent),
    )
    memory = Cuts(cuts.cut_seen | named, cuts.rounds + state.active)
    return state.replace(memory=memory).put_rows({SCORES: new}), r.group
