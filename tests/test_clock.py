"""The time model, its devices, availability, and the time of drift events."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, call

from fedjax_cfl import algorithms
from fedjax_cfl.errors import InputError
from fedjax_cfl.round import device_clock, select, select_by_group
from fedjax_cfl.round.clock import device_profiles, end_round
from fedjax_cfl.round.counts import count_to_int
from fedjax_cfl.types import Cohort


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
    clock = device_clock.fedscale_clock(4, 20, 4, path=str(path))
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
        ("d.pkl", "x", r"must be a .csv or .parquet file"),
        ("none.csv", None, "no such file"),
        ("d.csv", "computation\n1\n", "has no column communication"),
        ("d.csv", "computation,communication\n1,2\n0,3\n", "column computation .* > 0 in row 2"),
        ("d.csv", "computation,communication\n1,many\n", "column communication must hold numbers"),
        ("d.csv", "computation,communication\n", "has no column computation"),
        ("d.csv", "computation,communication\n1\n", "column communication must hold numbers"),
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
        device_clock.fedscale_clock(3, 5, 3, **settings)


def test_rounds_grow_with_participants_and_over_commitment_never_lengthens_them():
    rng = np.random.default_rng(0)
    seconds = jnp.asarray(rng.lognormal(3, 1, 26), jnp.float32)
    whole = [float(end_round(seconds, jnp.arange(26) < n, None)[0]) for n in range(27)]
    assert whole == sorted(whole) and whole[0] == 0
    everyone = jnp.ones(26, bool)
    for wait_for in (1, 20, 26, 40):
        duration, late = end_round(seconds, everyone, wait_for)
        assert duration <= whole[-1]
        assert late.sum() == max(26 - wait_for, 0)
    assert device_clock.fedscale_clock(30, 5, 26, overcommit=1.3).wait_for == 20
    assert device_clock.fedscale_clock(30, 5, 26).wait_for is None


def test_clients_are_online_in_their_intervals_and_these_repeat():
    table = np.array([[[0, 10], [50, 60]], [[5, 100], [0, 0]]], float)
    online = device_clock.online_by_intervals(table, 100.0)
    for now in (0, 7, 10, 55, 99.9, 100, 107, 4_294_967.296 + 9.0, 3 * 4_294_967.296 + 0.5):
        milliseconds = round(now * 1000)
        state = SimpleNamespace(
            clock_ms=jnp.asarray([milliseconds >> 32, milliseconds % 2**32], jnp.uint32)
        )
        place = milliseconds % 100_000 / 1000
        wanted = [any(a <= place < b for a, b in own) for own in table]
        assert online(state).tolist() == wanted, now
    for bad in (table[0], table[..., ::-1], table * 2, np.full((1, 1, 2), np.nan)):
        with pytest.raises(InputError, match=r"^clock\.intervals: "):
            device_clock.online_by_intervals(bad, 100.0)


def test_clients_that_are_offline_are_not_selected(toy, linear, local):
    hours = np.zeros((14, 1, 2))
    hours[:, 0, 1] = np.where(np.arange(14) < 5, 3600, 0)
    online = device_clock.online_by_intervals(hours, 7200.0)
    algorithm = algorithms.fedavg(linear, local, select_by_group.by_group(6, online=online))
    state = jax.jit(algorithm.init)(jax.random.key(0), toy)
    step = jax.jit(algorithm.round)
    assert step(jax.random.key(0), state, toy)[1].selected == 4  # client 2 has no samples
    night = state.replace(clock_ms=jnp.asarray([0, 4_000_000], jnp.uint32))
    assert step(jax.random.key(0), night, toy)[1].selected == 0


def test_a_drift_event_takes_as_long_as_its_slowest_report(toy, linear, local):
    """4 labels are 16 bytes: at 2 bytes a second 8 s, and 3 s of the server."""
    rate = np.full(14, 16.0)
    rate[7] = 2.0
    clock = device_profiles(np.zeros(14), rate)._replace(
        event_seconds=device_clock.report_seconds(rate, 3.0)
    )
    y = np.where(np.isin(np.asarray(toy.owner), [1, 7]), 3, np.asarray(toy.y))
    shifted = jnp.asarray(np.isin(np.arange(14), [1, 7]))
    moved = toy.replace(y=jnp.asarray(y, jnp.int32), shifted=shifted)

    def durations(clock):
        algorithm = build(
            algorithms.fielding,
            linear,
            local._replace(clock=clock),
            select.full_participation(),
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
    assert durations(clock._replace(event_seconds=None)) == [still] * 3


@pytest.mark.parametrize("selection", ["oort", pytest.param("pow_d", marks=pytest.mark.slow)])
def test_selection_and_clock_from_the_command_line(selection, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = (
        f"run_dir=run rounds=2 eval_every=2 algorithm=fielding selection={selection} algorithm.m=2"
        " drift=swap_part clock=fedscale clock.overcommit=1.3 local.epochs=1"
        " algorithm.cluster=k_center offline=true"
    )
    assert call(monkeypatch, line, devices=1) == 0
    (row,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert '"sim_time_s": 0.0' not in row and '"sim_time_s"' in row
