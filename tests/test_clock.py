"""The time model, its devices, and the time of drift events."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, call, nightly, spent
from flax import struct

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.system import clock as clocks
from fedjax_cfl.system import devices as device_clock
from fedjax_cfl.system import power_of_choice, select
from fedjax_cfl.system.clock import CohortSizes, device_profiles, find_duration
from fedjax_cfl.system.reports import count_to_int, make_bill, make_report, no_bill
from fedjax_cfl.types import Cohort, Traffic


class SimpleState(struct.PyTreeNode):
    """What of a state the clocks of groups read."""

    assignment: jax.Array
    active: jax.Array
    clock_ms: jax.Array


def test_stand_ins_give_the_means_that_the_paper_reports():
    profiles = device_clock.stand_in_profiles(200_000, seed=1)
    compute = 3 * 20 * 20 * profiles.sample_seconds
    assert compute.mean() == pytest.approx(50.4, rel=0.02)
    sent = 2 * 4 * 11.21e6 / profiles.bytes_per_second
    assert sent.mean() == pytest.approx(116.7, rel=0.03)
    again = device_clock.stand_in_profiles(200_000, seed=1)
    np.testing.assert_array_equal(profiles.sample_seconds, again.sample_seconds)


def test_seconds_of_a_client_by_hand(tmp_path):
    """3 * 20 steps * 20 samples * 42 ms = 50.4 s, and 1 MiB at 512 kbit/s is 16 s."""
    path = tmp_path / "devices.csv"
    path.write_text("computation,communication\n7,1\n42,512\n21,1024\n")
    clock = device_clock.fedscale_clock(CohortSizes(4, 20, 4), path=str(path))
    ids = jnp.arange(4)
    upload = SimpleNamespace(steps=jnp.full(4, 20))
    seconds = clock.seconds(Cohort(ids, ids), upload, jnp.full(4, 2.0**20))
    # client i has row (i + 1) modulo 3
    wanted = [50.4 + 16, 25.2 + 8, 8.4 + 8192, 50.4 + 16]
    np.testing.assert_allclose(seconds, wanted, rtol=1e-5)


def test_parquet_equals_csv(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    columns = {"computation": [7.0, 42.0], "communication": [1.5, 512.0]}
    parquet.write_table(arrow.table(columns), tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_text("communication,computation\n1.5,7\n512,42\n")
    one, other = (
        device_clock.read_profiles(str(tmp_path / f"d.{end}"), 5) for end in ("parquet", "csv")
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("d.pkl", "x", "is a pickle and is not opened"),
        ("none.csv", None, "No such file"),
        ("d.csv", "computation\n1\n", "x=communication is not there"),
        (
            "d.csv",
            "computation,communication\n1,2\n0,3\n",
            "computation is 0 in row 2",
        ),
        ("d.csv", "computation,communication\n1,many\n", "column communication is 'many' in row 1"),
        ("d.csv", "computation,communication\n", "table has no rows"),
        (
            "d.csv",
            "computation,communication\n1\n",
            "column communication has no value in row 1",
        ),
        ("d.csv", "computation,communication\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("d.parquet", "no parquet", ""),
    ],
)
def test_tables_that_cannot_be_are_refused_in_one_line(tmp_path, name, text, said):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=f"^clock.path={path}: .*{said}") as error:
        device_clock.read_profiles(str(path), 3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"overcommit": 0.9}, "clock.overcommit=0.9: must be a number >= 1"),
        ({"model_factor": 0}, "clock.model_factor=0"),
        ({"server_seconds": -1}, "clock.server_seconds=-1"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        device_clock.fedscale_clock(CohortSizes(3, 5, 3), **settings)


def test_rounds_grow_with_participants_and_over_commitment_never_lengthens_them():
    rng = np.random.default_rng(0)
    seconds = jnp.asarray(rng.lognormal(3, 1, 26), jnp.float32)
    whole = [float(find_duration(seconds, jnp.arange(26) < n, None)[0]) for n in range(27)]
    assert whole == sorted(whole) and whole[0] == 0
    everyone = jnp.ones(26, bool)
    for wait_for in (1, 20, 26, 40):
        duration, late = find_duration(seconds, everyone, wait_for)
        assert duration <= whole[-1]
        assert late.sum() == max(26 - wait_for, 0)
    assert device_clock.fedscale_clock(CohortSizes(30, 5, 26), overcommit=1.3).wait_for == 20
    assert (
        device_clock.fedscale_clock(CohortSizes(30, 5, 33), overcommit=1.1).wait_for == 30
    )  # 29.999... in floats
    assert device_clock.fedscale_clock(CohortSizes(30, 5, 26)).wait_for is None


def counts_of(milliseconds):
    """Returns times [k] as counts [k, 2]."""
    return jnp.asarray([[now >> 32, now % 2**32] for now in milliseconds], jnp.uint32)


@pytest.mark.nightly
def test_a_drift_event_takes_as_long_as_its_slowest_report(toy, linear, local):
    """4 labels are 16 bytes: at 2 bytes a second 8 s, and 3 s of the server."""
    rate = np.full(14, 16.0)
    rate[7] = 2.0
    clock = device_profiles(np.zeros(14), rate, None, np.zeros(14))._replace(server_seconds=3.0)
    y = np.where(np.isin(np.asarray(toy.owner), [1, 7]), 3, np.asarray(toy.y))
    shifted = jnp.asarray(np.isin(np.arange(14), [1, 7]))
    moved = toy.replace(y=jnp.asarray(y, jnp.int32), shifted=shifted)

    def durations(clock):
        algorithm = build(
            algorithms.fielding,
            linear,
            local,
            cfl.System(select.full_participation(), clock=clock),
            m=2,
            cluster="k_center",
            trigger="never",
        )
        key, step = jax.random.key(0), jax.jit(algorithm.round)
        state, times = jax.jit(algorithm.init)(key, toy), []
        for data in (toy, moved, moved.replace(shifted=jnp.zeros(14, bool))):
            state, info = step(key, state, data)
            times.append(float(info.seconds))
        assert count_to_int(state.clock_ms) == pytest.approx(1000 * sum(times), abs=3)
        return times

    still, event, after = durations(clock)
    assert event - still == pytest.approx(8 + 3, rel=1e-4) and after == still
    assert durations(clock._replace(ask_seconds=None)) == [still] * 3


GROUPS = SimpleState(jnp.array([0, 0, 0, 1, 1]), jnp.ones(2, bool), counts_of([0, 0]))


def test_groups_wait_for_their_own_reports_unless_all_are_clustered_again():
    """At a byte a second, 1, 2 and 4 words are 4, 8 and 16 s, and 3 s of the server."""
    clock = device_profiles(np.ones(5), np.ones(5), None, np.zeros(5))
    clock = clock._replace(server_seconds=3.0, per_group=True)
    words = make_bill(words_up=jnp.array([1, 2, 0, 4, 1]))
    for reclustered, wanted in ((0, [8 + 3, 16 + 3]), (1, [16 + 3, 16 + 3])):
        report = make_report(words, reclustered=reclustered)
        waited = clocks.wait_before(clock, GROUPS, report, no_bill(), 100)
        np.testing.assert_allclose(waited, wanted)


def test_a_small_group_waits_for_one_answer():
    """Of two answers in all, the share of one client among five is 0.4."""
    clock = device_profiles(np.ones(5), np.ones(5), wait_for=2)._replace(per_group=True)
    ids, seconds = jnp.arange(5), jnp.array([5.0, 3.0, 4.0, 6.0, 7.0])
    gid = jnp.array([0, 0, 0, 0, 1])
    given = Cohort(ids, ids), gid, jnp.ones(5, bool), seconds, jnp.zeros(2)
    duration, late = clocks.end_round(clock, *given, num_clients=5)
    # group 0: 2 * 4 // 5 = 1 answer
    np.testing.assert_array_equal(duration, [3, 7])
    assert late.tolist() == [True, False, True, True, False]


def test_a_round_without_answers_lasts_as_long_as_the_time_before_training():
    clock, ids = device_profiles(np.ones(5), np.ones(5)), jnp.arange(5)
    given = GROUPS.assignment, jnp.zeros(5, bool), jnp.full(5, 5.0), jnp.array([10.0])
    duration, late = clocks.end_round(clock, Cohort(ids, ids), *given, num_clients=5)
    np.testing.assert_array_equal(duration, [10])
    assert not late.any()


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["pow_d", nightly("cpow_d")])
def test_a_round_waits_for_the_losses_of_all_candidates(variant, toy, linear, local):
    """By hand: the slowest candidate gets the model, infers its samples and sends a number; then
    the slowest of those selected trains, and sends its model.
    """
    rng = np.random.default_rng(5)
    rate, sample = rng.uniform(20, 200, 14), rng.uniform(0.1, 2, 14)
    timed = device_profiles(rng.uniform(0.1, 1, 14), rate, None, sample)
    clock = timed._replace(ask_seconds=None)
    make, key = getattr(power_of_choice, variant), jax.random.key(1)
    found = []
    for own in (clock, timed):
        chosen = make(linear, local, 3, 9)
        algorithm = algorithms.fedavg(linear, local, cfl.System(chosen, clock=own))
        state = jax.jit(algorithm.init)(key, toy)
        after, info = jax.jit(algorithm.round)(key, state, toy)
        found.append((float(info.seconds), spent(state, after)))
    drawing = jax.random.split(derive_key(key, SELECT, 0))[0]
    ids = np.asarray(power_of_choice.draw_candidates(drawing, state, toy, 9))
    size = np.asarray(toy.train.size)[ids]
    inferred = size if variant == "pow_d" else np.minimum(size, local.batch_size)
    asking = np.max((24 * 4 + 4) / rate[ids] + inferred * sample[ids])
    assert found[1][0] - found[0][0] == pytest.approx(asking, rel=1e-5)
    cohort = np.asarray(chosen.select(derive_key(key, SELECT, 0), (), state, toy))
    steps = 2 * -(-np.asarray(toy.train.size)[cohort] // local.batch_size)
    step = np.asarray(clock.seconds(Cohort(jnp.arange(14), ()), SimpleNamespace(steps=1), 0.0))
    training = np.max(steps * step[cohort] + 24 * 4 / rate[cohort])
    assert found[0][0] == pytest.approx(training, rel=1e-5), "they have the model already"
    assert found[0][1] == found[1][1] == Traffic(9, 3, 0, 9)


def test_clocks_of_groups_equal_a_twin():
    """Random groups before and after, some begun, some ended, now and then all made anew."""
    rng = np.random.default_rng(0)
    clock = device_profiles(np.ones(12), np.ones(12))._replace(per_group=True)
    merge = jax.jit(lambda *given: clocks.merge_clocks(clock, *given))
    seen = set()
    for case in range(60):
        old, new = rng.integers(-1, 5, 12), rng.integers(0, 5, 12)
        active, later = rng.random(5) < 0.7, rng.random(5) < 0.7
        reclustered = case % 5 == 0
        times = rng.integers(0, 2**34, 5)
        before, after = (
            SimpleState(jnp.asarray(group), jnp.asarray(live), counts_of(times.tolist()))
            for group, live in ((old, active), (new, later))
        )
        wanted = []
        for k in range(5):
            fresh = reclustered or (later[k] and not active[k])
            waits = [
                times[max(old[i], 0)]
                for i in range(12)
                if new[i] == k and old[i] >= 0 and (fresh or not later[old[i]])
            ]
            waits += [] if fresh else [times[k]]
            wanted.append(max(waits, default=max(times[active], default=0)))
        found = merge(before, after, jnp.int32(reclustered))
        assert [count_to_int(each) for each in found.clock_ms] == wanted, case
        seen.add(tuple(wanted) == tuple(times))
    same = clocks.merge_clocks(clock._replace(per_group=False), before, after, 1)
    assert same is after and seen == {True, False}


@pytest.mark.nightly
@pytest.mark.parametrize("selection", ["oort", pytest.param("pow_d", marks=pytest.mark.slow)])
def test_selection_and_clock_from_the_command_line(selection, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = (
        f"run_dir=run rounds=2 eval_every=2 algorithm=fielding selection={selection} algorithm.m=2"
        " drift=swap_part clock=fedscale clock.overcommit=1.3 local.epochs=1"
        " algorithm.cluster=k_center offline=true clock.per_group=true"
    )
    assert call(monkeypatch, line, devices=1) == 0
    (row,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert '"sim_time_s": 0.0' not in row and '"sim_time_s"' in row
