"""Lai, Zhu, Madhyastha, Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
Selection", OSDI 2021, https://arxiv.org/abs/2010.06081, within the quotas of groups.

Clients of high loss and of short rounds are selected, and a share of the slots goes to
clients that were never tried. Statistics are shared by all groups.

Differs from the paper: the utility takes the mean loss of a client, which an upload has, in
place of the root of its mean squared loss. A client counts as taking one second until it has been
selected, where FedScale knows an expected time; the percentile of durations is one of all clients,
as FedScale's. So while more of them than that percentile (30 % at first) have not been tried,
preferred is one second: every tried client whose rounds take longer is penalised, by the square of
its seconds, also one that is fast among its like. Constants are those of the FedScale code.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.system.select import groups_of, rank_in_groups, share_quotas
from fedjax_cfl.types import Cohort, FederatedData, Key, Selection, State, Upload
from fedjax_cfl.validation import Fraction, NonNegativeFloat, PositiveInt, checked

PACE = 20  # calls between two steps of the pacer
PACER_STEP = 5.0  # percentage points
HISTORY = 2 * PACE
CUT_OFF = 0.05  # of the score at the last exploited place
STALENESS = 0.1
CLIP = 90.0  # percentile of the utilities
ROOMY = 5  # candidates of exploration per slot


class OortMemory(struct.PyTreeNode):
    """What is remembered of the clients and of the calls."""

    utility: jax.Array  # [K] float32
    seconds: jax.Array  # [K] float32, of the last round, or expected
    last: jax.Array  # [K] int32, call of the last answer
    count: jax.Array  # [K] int32, answers
    calls: jax.Array  # [] int32
    explore: jax.Array  # [] float32, share of the slots
    percentile: jax.Array  # [] float32
    exploited: jax.Array  # [HISTORY] float32, summed utility of the exploited, latest last


def percentile_of(values: jax.Array, valid: jax.Array, percent: jax.Array) -> jax.Array:
    """Returns the percentile [] of the valid values [K], linear between ranks as NumPy's; 0 if
    there are none.
    """
    ordered = jnp.sort(jnp.where(valid, values, jnp.inf))
    place = percent / 100 * jnp.maximum(valid.sum() - 1, 0)
    low = jnp.floor(place).astype(jnp.int32)
    high = jnp.minimum(low + 1, jnp.maximum(valid.sum() - 1, 0))
    between = ordered[low] + (place - low) * (ordered[high] - ordered[low])
    return jnp.where(valid.any(), between, 0.0)


def pace(memory: OortMemory) -> jax.Array:
    """Returns the percentile [] of durations for this call: every PACE calls it grows when the
    exploited utility has hardly changed, and falls when it has changed much.
    """
    now, before = memory.exploited[PACE:].sum(), memory.exploited[:PACE].sum()
    due = (memory.calls >= 2 * PACE) & (memory.calls % PACE == 0)
    change = jnp.abs(now - before)
    slower = jnp.minimum(100.0, memory.percentile + PACER_STEP)
    faster = jnp.maximum(PACER_STEP, memory.percentile - PACER_STEP)
    moved = jnp.where(
        change <= 0.1 * before, slower, jnp.where(change >= 5 * before, faster, memory.percentile)
    )
    return jnp.where(due, moved, memory.percentile)


def penalty_of(memory: OortMemory, percentile: jax.Array, exponent: float) -> jax.Array:
    """Returns the factor [K] of the scores of clients that are slower than preferred."""
    preferred = jnp.where(
        percentile >= 100,
        jnp.inf,
        percentile_of(memory.seconds, jnp.ones_like(memory.seconds, bool), percentile),
    )
    slow = memory.seconds > preferred
    return jnp.where(slow, (preferred / jnp.where(slow, memory.seconds, 1.0)) ** exponent, 1.0)


def scores_of(memory: OortMemory, tried: jax.Array, penalty: jax.Array) -> jax.Array:
    """Returns the scores [K] of the clients `tried` [K] bool: clipped utility from 0 to 1,
    plus the bonus of those not seen for long, times the penalty.
    """
    limit = percentile_of(memory.utility, tried & (memory.utility > 0), jnp.float32(CLIP))
    clipped = jnp.minimum(memory.utility, limit)
    low = 0.999 * jnp.min(jnp.where(tried, memory.utility, jnp.inf))
    high = jnp.max(jnp.where(tried, memory.utility, -jnp.inf))
    spread = jnp.maximum(high - low, 1e-4)
    call = memory.calls.astype(jnp.float32)
    stale = jnp.sqrt(STALENESS * jnp.log(call) / jnp.maximum(memory.last, 1))
    return jnp.where(tried, jnp.abs(((clipped - low) / spread + stale) * penalty), 0.0)


def draw_by_weight(
    draws: jax.Array, weight: jax.Array, pool: jax.Array, group: jax.Array, slots: jax.Array
) -> jax.Array:
    """Returns which clients [K] bool are drawn without replacement, with chances proportional
    to their weight.

    Args: `draws` [K] are Gumbel draws; `weight` [K] >= 0; `pool` [K] bool are the clients to
    draw from; `group` [K] int32 is the group of each; `slots` [m] int32 is how many are drawn
    of each group.
    """
    value = jnp.where(pool, jnp.log(jnp.maximum(weight, 1e-30)) + draws, -jnp.inf)
    return pool & (rank_in_groups(value, jnp.where(pool, group, slots.size)) < slots[group])


def per_group(mask: jax.Array, group: jax.Array, num_groups: int) -> jax.Array:
    """Returns how many clients of `mask` [K] bool each group [m] has."""
    return jnp.zeros(num_groups, jnp.int32).at[group].add(mask.astype(jnp.int32))


def choose(
    draws: jax.Array,
    memory: OortMemory,
    candidates: jax.Array,
    group: jax.Array,
    quota: jax.Array,
    exponent: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns (selected [K] bool, exploited [K] bool) of a call.

    Args: `draws` [3, K] are Gumbel draws, for exploitation, exploration and the rest of the
    slots; `memory` is that of this call, see `next_call`; `candidates` [K] bool may be
    selected; `group` [K] int32 is the group of each client; `quota` [m] int32 is the most
    clients of each group; `exponent` >= 0 is that of the penalty on slow clients.
    """
    m = quota.size
    tried, fresh = candidates & (memory.count > 0), candidates & (memory.count == 0)
    penalty = penalty_of(memory, memory.percentile, exponent)
    score = scores_of(memory, tried, penalty)
    # the first call is random: the rest of the slots is filled so
    share = jnp.where(fresh.any() & (memory.calls > 1), memory.explore, 0.0)
    explore = jnp.floor(quota * share + 1e-4).astype(jnp.int32)
    exploit = jnp.minimum(quota - explore, per_group(tried, group, m))

    rank = rank_in_groups(jnp.where(tried, score, -1.0), jnp.where(tried, group, m))
    last = tried & (rank == jnp.maximum(exploit - 1, 0)[group])
    bar = jnp.zeros(m).at[group].max(jnp.where(last, score, 0.0))
    pool = tried & (score >= CUT_OFF * bar[group])
    exploited = draw_by_weight(draws[0], score, pool, group, exploit)

    weight = jnp.where(fresh, memory.utility * penalty, 0.0)
    near = rank_in_groups(jnp.where(fresh, weight, -1.0), jnp.where(fresh, group, m))
    pool = fresh & (near < ROOMY * explore[group])
    explored = draw_by_weight(draws[1], weight, pool, group, explore)
    taken = exploited | explored
    left = quota - per_group(taken, group, m)
    return taken | draw_by_weight(
        draws[2], jnp.ones_like(weight), candidates & ~taken, group, left
    ), exploited


@checked()
def oort(
    clients_per_round: PositiveInt,
    explore: Fraction = 0.9,
    decay: Fraction = 0.98,
    least: Fraction = 0.3,
    percentile: float = 30.0,
    penalty: NonNegativeFloat = 2.0,
) -> Selection:
    """Selects by Oort within each group's quota.

    Args: `explore` is the share of the slots that go to clients not tried yet at first, of which
    `decay` is left with every call, and `least` in the end; clients slower than the `percentile` of
    durations are penalised, with the exponent `penalty`.

    Clients not tried yet count as taking one second each, see the module for what that does to the
    others. Without a clock no client is penalised for long rounds.
    """

    def init(data: FederatedData) -> OortMemory:
        clients = data.num_clients
        return OortMemory(
            utility=data.train.size.astype(jnp.float32),
            seconds=jnp.ones(clients, jnp.float32),
            last=jnp.zeros(clients, jnp.int32),
            count=jnp.zeros(clients, jnp.int32),
            calls=jnp.zeros((), jnp.int32),
            explore=jnp.float32(explore),
            percentile=jnp.float32(percentile),
            exploited=jnp.zeros(HISTORY, jnp.float32),
        )

    def select(key: Key, memory: OortMemory, state: State, data: FederatedData) -> jax.Array:
        draws = jax.random.gumbel(key, (3, data.num_clients))
        candidates, group = data.train.size > 0, groups_of(state)
        memory = next_call(memory, decay, least)
        quota = share_quotas(clients_per_round, per_group(candidates, group, state.active.size))
        taken, _ = choose(draws, memory, candidates, group, quota, penalty)
        return jnp.nonzero(taken, size=clients_per_round, fill_value=data.num_clients)[0]

    def update(
        memory: OortMemory, state: State, cohort: Cohort, upload: Upload, seconds: jax.Array | None
    ) -> OortMemory:
        return remember(next_call(memory, decay, least), cohort, upload, seconds)

    return Selection(init, select, update)


def next_call(memory: OortMemory, decay: float, least: float) -> OortMemory:
    """Returns the memory with the share, the percentile and the number of the next call."""
    memory = memory.replace(calls=memory.calls + 1)
    share = jnp.maximum(decay * memory.explore, least)
    first = memory.calls == 1
    return memory.replace(explore=jnp.where(first, memory.explore, share), percentile=pace(memory))


def remember(
    memory: OortMemory, cohort: Cohort, upload: Upload, seconds: jax.Array | None
) -> OortMemory:
    """Stores what the clients of a cohort have shown. Those without an answer, or whose loss is
    not finite, get the mean utility of the round; if no client answered, all keep theirs.
    """
    clients = memory.utility.size
    real = cohort.ids < clients
    answered = (upload.weight > 0) & jnp.isfinite(upload.loss)
    known = jnp.minimum(cohort.ids, clients - 1)
    exploited = real & (memory.count[known] > 0)
    used = jnp.sum(jnp.where(exploited, memory.utility[known], 0.0))
    utility = upload.weight * upload.loss
    mean = jnp.sum(jnp.where(answered, utility, 0.0)) / jnp.maximum(answered.sum(), 1)
    other = jnp.where(answered.any(), mean, memory.utility[known])
    memory = memory.replace(
        utility=cohort.put(memory.utility, jnp.where(answered, utility, other)),
        last=cohort.put(memory.last, memory.calls),
        count=memory.count.at[cohort.ids].add(1, mode="drop"),
        exploited=lax.dynamic_update_index_in_dim(
            jnp.roll(memory.exploited, -1), used, HISTORY - 1, 0
        ),
    )
    if seconds is None:
        return memory
    return memory.replace(seconds=cohort.put(memory.seconds, seconds))
