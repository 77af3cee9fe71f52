"""Oort against a plain Python twin over 50 calls; quotas and the other guided selections."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, charged, nightly

from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.errors import InputError
from fedjax_cfl.system import oort, power_of_choice, select
from fedjax_cfl.types import Cohort

CLIENTS, SLOTS = 40, 9


class Twin:
    """Oort in plain Python, a client at a time; `lots` are Gumbel draws."""

    def __init__(self, size, seconds):
        self.utility, self.seconds = size.astype(float), seconds.astype(float)
        self.last, self.count = np.zeros(CLIENTS, int), np.zeros(CLIENTS, int)
        self.calls, self.explore, self.percentile, self.used = 0, 0.9, 30.0, []

    def begin(self):
        self.calls += 1
        if self.calls > 1:
            self.explore = max(0.98 * self.explore, 0.3)
        if self.calls >= 40 and self.calls % 20 == 0:
            used = [0.0] * (40 - len(self.used)) + self.used
            now, before = sum(used[-20:]), sum(used[-40:-20])
            if abs(now - before) <= 0.1 * before:
                self.percentile = min(100, self.percentile + 5)
            elif abs(now - before) >= 5 * before:
                self.percentile = max(5, self.percentile - 5)

    def draw(self, pool, weight, lots, count):
        value = {i: np.log(max(weight[i], 1e-30)) + lots[i] for i in pool}
        return sorted(pool, key=lambda i: (-value[i], i))[:count]

    def select(self, lots, group, candidates, quota):
        tried = [i for i in candidates if self.count[i]]
        fresh = [i for i in candidates if not self.count[i]]
        limit = np.percentile(self.seconds, self.percentile) if self.percentile < 100 else np.inf
        penalty = np.array([(limit / s) ** 2 if s > limit else 1.0 for s in self.seconds])
        score, taken = {}, []
        if tried:
            utility = self.utility[tried]
            clip = np.percentile(utility[utility > 0], 90) if (utility > 0).any() else 0
            low = 0.999 * utility.min()
            spread = max(utility.max() - low, 1e-4)
            for i in tried:
                stale = np.sqrt(0.1 * np.log(self.calls) / self.last[i])
                score[i] = abs(((min(self.utility[i], clip) - low) / spread + stale) * penalty[i])
        for g, slots in enumerate(quota):
            mine = [i for i in candidates if group[i] == g]
            share = self.explore if fresh and self.calls > 1 else 0
            explore = int(slots * share + 1e-4)
            old, new = ([i for i in mine if i in half] for half in (tried, fresh))
            exploit, own = min(slots - explore, len(old)), []
            if exploit:
                bar = 0.05 * sorted((score[i] for i in old), reverse=True)[exploit - 1]
                own += self.draw([i for i in old if score[i] >= bar], score, lots[0], exploit)
            weight = self.utility * penalty
            near = sorted(new, key=lambda i: (-weight[i], i))[: 5 * explore]
            own += self.draw(near, weight, lots[1], explore)
            rest = [i for i in mine if i not in own]
            own += self.draw(rest, np.ones(CLIENTS), lots[2], slots - len(own))
            taken += own
        return taken

    def answer(self, ids, weight, loss, seconds):
        self.used.append(sum(self.utility[i] for i in ids if self.count[i]))
        utility = weight * loss
        for place, i in enumerate(ids):
            if weight.any():
                answers = utility[weight > 0]
                self.utility[i] = utility[place] if weight[place] > 0 else answers.mean()
            self.seconds[i], self.last[i] = seconds[place], self.calls
            self.count[i] += 1


def population(rng, groups):
    size = rng.integers(0, 60, size=CLIENTS)
    size[5] = 0
    data = SimpleNamespace(
        num_clients=CLIENTS, train=SimpleNamespace(size=jnp.asarray(size, jnp.int32))
    )
    group = rng.integers(groups, size=CLIENTS)
    state = SimpleNamespace(
        assignment=jnp.asarray(group), active=jnp.ones(groups, bool), groups=None
    )
    return size, data, group, state


@pytest.mark.parametrize("groups", [nightly(1), 3])
def test_oort_equals_its_twin_over_50_calls(groups):
    rng = np.random.default_rng(groups)
    size, data, group, state = population(rng, groups)
    speed = rng.lognormal(0, 1, CLIENTS).astype("f4")
    selection = oort.oort(SLOTS)
    memory, twin = selection.init(data).replace(seconds=jnp.asarray(speed)), Twin(size, speed)
    candidates = np.flatnonzero(size > 0)
    members = np.bincount(group[candidates], minlength=groups)
    quota = [min(SLOTS // groups + (g < SLOTS % groups), members[g]) for g in range(groups)]

    @jax.jit
    def select(key, memory):
        return selection.select(key, memory, state, data)

    @jax.jit
    def update(memory, ids, weight, loss, seconds):
        upload = SimpleNamespace(weight=weight, loss=loss)
        return selection.update(memory, state, Cohort(ids, ids), upload, seconds)

    explored, paces = [], set()
    for call in range(50):
        key = jax.random.key(call)
        ids = np.asarray(select(key, memory))
        twin.begin()
        lots = np.asarray(jax.random.gumbel(key, (3, CLIENTS)))
        wanted = twin.select(lots, group, candidates, quota)
        real = ids[ids < CLIENTS]
        assert sorted(real) == sorted(wanted), call
        assert len(ids) == SLOTS and len(set(real)) == len(real)
        weight = np.where(rng.random(SLOTS) < 0.9, size[np.minimum(ids, CLIENTS - 1)], 0)
        weight = np.where((ids < CLIENTS) & (call != 30), weight, 0).astype("f4")
        loss = rng.gamma(2.0, 0.5 if call < 20 else 20.0, SLOTS).astype("f4")
        seconds = (speed[np.minimum(ids, CLIENTS - 1)] * rng.uniform(0.9, 1.1, SLOTS)).astype("f4")
        memory = update(memory, ids, weight, loss, seconds)
        place = [list(ids).index(i) for i in real]
        twin.answer(real, weight[place], loss[place], seconds[place])
        np.testing.assert_allclose(memory.utility, twin.utility, rtol=1e-5)
        np.testing.assert_array_equal(memory.count, twin.count)
        explored.append(int((twin.count > 0).sum()))
        paces.add(float(memory.percentile))
    assert explored[-1] == len(candidates), "everybody has been tried"
    assert float(memory.explore) == pytest.approx(max(0.9 * 0.98**49, 0.3), rel=1e-4)
    assert len(paces) > 1, "the pacer has moved"


def fresh_memory(**values):
    """Returns the memory of three clients before the first call, with other values."""
    data = SimpleNamespace(num_clients=3, train=SimpleNamespace(size=jnp.array([1, 2, 3])))
    return oort.oort(2).init(data).replace(**{n: jnp.asarray(v) for n, v in values.items()})


def test_the_pacer_by_hand():
    """In calls 40, 60, ... the percentile grows by 5 where the sum of the last 20 utilities
    differs by a tenth of the one before, or less, and falls where it is six times that.
    """
    for before, now, wanted in (
        (10.0, 11.0, 35.0),
        (10.0, 9.0, 35.0),
        (10.0, 11.5, 30.0),
        (10.0, 60.0, 25.0),
        (0.0, 0.0, 35.0),
        (0.0, 1.0, 25.0),
    ):
        exploited = np.zeros(40, "f4")
        exploited[3], exploited[25] = before, now
        memory = fresh_memory(exploited=exploited, percentile=np.float32(30), calls=60)
        assert oort.pace(memory) == wanted, (before, now)
        assert oort.pace(memory.replace(calls=jnp.int32(61))) == 30


def test_scores_by_hand():
    """Utilities 1 and 2 are clipped to 1 and 1.9, and count from 0.999: (u - 0.999) / 1.001."""
    memory = fresh_memory(utility=np.float32([1, 2, 50]), calls=1)
    tried = jnp.array([True, True, False])
    found = at_once(oort.scores_of, memory, tried, jnp.array([1.0, 0.5, 1.0]))
    np.testing.assert_allclose(found, [0.001 / 1.001, 0.5 * 0.901 / 1.001, 0], rtol=1e-3)


def test_only_clients_that_were_tried_before_count_as_exploited():
    memory = fresh_memory(utility=np.float32([5, 7, 11]), count=np.int32([0, 2, 1]))
    ids = jnp.array([0, 1, 3])
    upload = SimpleNamespace(weight=jnp.array([2.0, 0, 0]), loss=jnp.array([4.0, 9, 9]))
    after = oort.remember(memory, Cohort(ids, ids), upload, None)
    assert after.exploited[-1] == 7 and after.count.tolist() == [1, 3, 1]
    assert after.utility.tolist() == [8, 8, 11], "without an answer the mean of the round"


@pytest.mark.parametrize("percent", [0, 5, 30, 90, 100])
def test_percentiles_equal_numpy(percent):
    values = np.random.default_rng(0).random(31).astype("f4")
    valid = np.arange(31) % 3 > 0
    found = oort.percentile_of(jnp.asarray(values), jnp.asarray(valid), jnp.float32(percent))
    assert found == pytest.approx(np.percentile(values[valid], percent), rel=1e-5)
    assert oort.percentile_of(jnp.asarray(values), jnp.zeros(31, bool), jnp.float32(9)) == 0


def test_quotas():
    for slots, members, wanted in (
        (10, [5, 5, 5], [4, 3, 3]),
        (10, [5, 0, 5, 5], [4, 0, 3, 3]),
        (7, [1, 9], [1, 3]),
        (2, [3, 3, 3], [1, 1, 0]),
        (5, [0, 0], [0, 0]),
    ):
        assert select.share_quotas(slots, jnp.array(members)).tolist() == wanted


@pytest.mark.parametrize("groups", [1, 4])
def test_the_highest_scores_of_each_group_are_selected(groups):
    rng = np.random.default_rng(groups)
    size, data, group, state = population(rng, groups)
    score = rng.integers(5, size=CLIENTS).astype("f4")
    selection = select.by_group(SLOTS, lambda key, state, data: jnp.asarray(score))
    ids = np.asarray(at_once(selection.select, jax.random.key(0), (), state, data))
    candidates = size > 0
    quota = select.share_quotas(
        SLOTS, jnp.asarray(np.bincount(group[candidates], minlength=groups))
    )
    for g in range(groups):
        mine = [i for i in range(CLIENTS) if candidates[i] and group[i] == g]
        wanted = sorted(mine, key=lambda i: (-score[i], i))[: int(quota[g])]
        assert sorted(i for i in ids if i < CLIENTS and group[i] == g) == sorted(wanted)


def grouped(toy, models):
    return SimpleNamespace(assignment=jnp.arange(14) % 3, active=jnp.ones(3, bool), groups=models)


def test_nearest_to_center(toy, models):
    state = grouped(toy, models)
    selection = select.nearest_to_center(6)
    ids = np.asarray(jax.jit(lambda key: selection.select(key, (), state, toy))(jax.random.key(0)))
    counts = np.zeros((14, 4))
    rows = np.asarray(toy.train.order)
    np.add.at(counts, (np.asarray(toy.owner)[rows], np.asarray(toy.y)[rows]), 1)
    alive = counts.sum(1) > 0
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wanted = []
    for g in range(3):
        mine = [i for i in range(g, 14, 3) if alive[i]]
        center = shares[mine].mean(0)
        wanted += sorted(mine, key=lambda i: np.abs(shares[i] - center).sum())[:2]
    assert sorted(ids) == sorted(wanted)
    soft = select.nearest_to_center(6, temperature=100.0)
    draw = jax.jit(lambda key: soft.select(key, (), state, toy))
    drawn = {int(i) for n in range(20) for i in draw(jax.random.key(n))}
    assert drawn > set(wanted)


@pytest.mark.parametrize("variant", [nightly("pow_d"), "cpow_d", "rpow_d"])
def test_power_of_choice_takes_the_highest_losses_of_each_group(
    variant, toy, linear, local, models
):
    state = grouped(toy, models)
    make = getattr(power_of_choice, variant)
    first = () if variant == "rpow_d" else (linear, local)
    selection = make(*first, 3, 13)
    memory = selection.init(toy)
    cohort = make_cohort(jnp.arange(14, dtype=jnp.int32), toy, local.execution)
    each = over_clients(training_loss(linear), local.execution)(cohort, toy, models)
    loss = np.zeros(14)
    loss[np.asarray(cohort.ids)] = np.asarray(each)[
        np.arange(cohort.ids.size), np.asarray(cohort.ids) % 3
    ]
    if variant == "rpow_d":
        upload = SimpleNamespace(weight=jnp.ones(14), loss=jnp.asarray(loss))
        ids = jnp.arange(14)
        memory = selection.update(memory, state, Cohort(ids, ids), upload, None)
    ids = np.asarray(
        jax.jit(lambda key: selection.select(key, memory, state, toy))(jax.random.key(0))
    )
    assert sorted(ids % 3) == [0, 1, 2] and 2 not in ids
    if variant != "cpow_d":
        alive = np.asarray(toy.train.size) > 0
        for g in range(3):
            mine = [i for i in range(g, 14, 3) if alive[i]]
            assert max(mine, key=lambda i: loss[i]) in ids


def test_candidates_are_drawn_in_proportion_to_their_samples():
    """Of 4,000 draws of one of three clients with 0, 3 and 9 samples, about 1,000 and 3,000."""
    data = SimpleNamespace(train=SimpleNamespace(size=jnp.array([0, 3, 9])))
    state = SimpleNamespace(assignment=jnp.zeros(3, jnp.int32), active=jnp.ones(1, bool))
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.vmap(lambda key: power_of_choice.draw_candidates(key, state, data, 1))
    ids = jax.jit(draw)(keys)
    drawn = np.bincount(np.asarray(ids)[np.asarray(ids) < 3], minlength=3)
    assert drawn.sum() == 4000 and drawn[0] == 0 and abs(drawn[1] - 1000) < 120


def test_clients_never_selected_come_first_in_random_order(toy, models):
    selection = power_of_choice.rpow_d(3, 13)
    state, unknown = grouped(toy, models), selection.init(toy)
    pick = jax.jit(lambda key, loss: selection.select(key, loss, state, toy))
    drawn = {tuple(sorted(pick(jax.random.key(n), unknown).tolist())) for n in range(12)}
    assert len(drawn) > 6
    known = unknown.at[jnp.array([0, 1, 5])].set(9.0)
    assert not {0, 1, 5} & set(pick(jax.random.key(0), known).tolist())


@pytest.mark.nightly
@pytest.mark.parametrize("candidates", [nightly(4), 13])
def test_what_candidates_send_is_in_the_ledger(candidates, toy, linear, local, models):
    """A loss each, and a model for those who are not selected (pow-d, section 5)."""
    state = grouped(toy, models)
    selection = power_of_choice.pow_d(linear, local, 3, candidates)
    drawn = power_of_choice.draw_candidates(jax.random.key(1), state, toy, candidates)
    drawn = int((drawn < 14).sum())
    ids = selection.select(jax.random.key(0), (), state, toy)
    asked = selection.poll(jax.random.key(0), state, toy)
    assert set(ids.tolist()) < set(np.flatnonzero(asked.samples).tolist())
    sent = charged(asked)
    assert (sent.units_down, sent.words_up, sent.units_up) == (drawn, drawn, 0) and drawn > 3
    assert power_of_choice.rpow_d(3, candidates).poll is None


def test_a_batch_that_is_everything_has_the_whole_loss(toy, linear, local, models):
    """Of one sample, a mini-batch drawn with replacement is the whole set."""
    cohort = make_cohort(jnp.array([6], jnp.int32), toy, local.execution)
    whole = over_clients(training_loss(linear), local.execution)(cohort, toy, models)
    batch = over_clients(power_of_choice.batch_loss(linear, 5), local.execution)(
        cohort, toy, (jax.random.key(0), models)
    )
    np.testing.assert_allclose(whole, batch, rtol=1e-5)


def test_fewer_candidates_than_clients_are_refused(linear, local):
    with pytest.raises(InputError, match="candidates=2: must be at least clients_per_round=3"):
        power_of_choice.rpow_d(3, 2)
    with pytest.raises(InputError, match="candidates=2"):
        power_of_choice.pow_d(linear, local, 3, 2)
    with pytest.raises(InputError, match="clients_per_round=0"):
        oort.oort(0)
