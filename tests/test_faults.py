"""Simulated faults: drawn by client and round alone, counted, and without any way for a
NaN to reach a model.
"""

import dataclasses
import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import at_once, build, ledger, nightly, others_nightly, with_execution

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.cfl import cfl as cfl_method
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.feddane import feddane
from fedjax_cfl.algorithms.feddrift import DriftLosses, remember_losses
from fedjax_cfl.algorithms.fedopt import fedadam
from fedjax_cfl.algorithms.fesem.fesem import fesem
from fedjax_cfl.algorithms.fl_hc import fl_hc
from fedjax_cfl.algorithms.flexcfl.flexcfl import draw_founders, flexcfl
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.algorithms.qfedavg import qfedavg
from fedjax_cfl.algorithms.tkm import tkm
from fedjax_cfl.client.executor import map_result
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError, NonFiniteUpdate
from fedjax_cfl.keys import FAULTS, START, derive_key
from fedjax_cfl.method import Method, Round
from fedjax_cfl.round.aggregate import weighted_mean
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import count_groups, random_groups
from fedjax_cfl.simulation.rows import raise_if_nonfinite
from fedjax_cfl.system import faults, power_of_choice, select
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.system.oort import OortMemory, remember
from fedjax_cfl.system.reports import count_to_int, make_bill, make_report, no_faults
from fedjax_cfl.types import Cohort, State, Traffic, Upload

KEY = jax.random.key(5)
CLIENTS, ROUNDS = 14, 3
EVERYBODY = np.tile(np.arange(CLIENTS), (ROUNDS, 1))
REAL = 13  # toy client 2 has no training samples
# NaN in a round without updates
MEANS = ("loss", "last_loss", "discrepancy", "group_discrepancy", "dissimilarity")
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums in another order


@functools.cache
def everybodys_rounds(task, local, failing):
    """Returns the program of three rounds of FedAvg, which several tests run."""
    return compiled(fedavg(task, local, cfl.System(select.from_table(EVERYBODY), failing)), ROUNDS)


def compiled(algorithm, rounds):
    """Returns f(data) -> (first state, last state, infos) of some rounds."""

    def run(data):
        first = algorithm.init(KEY, data)
        return first, *jax.lax.scan(
            lambda state, _: algorithm.round(KEY, state, data), first, length=rounds
        )

    return jax.jit(run)


def go(task, local, data, method=fedavg, table=EVERYBODY, rounds=ROUNDS, failing=None, **options):
    """Returns (first state, last state, infos) of some rounds."""
    failing = failing or Faults()
    if method is fedavg and table is EVERYBODY and rounds == ROUNDS and not options:
        return everybodys_rounds(task, local, failing)(data)
    system = cfl.System(select.from_table(table), failing)
    return compiled(build(method, task, local, system, **options), rounds)(data)


def cohort_of(*ids):
    return Cohort(jnp.array(ids, jnp.int32), jnp.arange(len(ids), dtype=jnp.int32))


def upload_of(delta, weight=None):
    """Returns an upload whose deltas are the rows of a matrix, in two leaves: the first
    column, and the others.
    """
    delta = jnp.asarray(delta, jnp.float32)
    weight = jnp.ones(len(delta)) if weight is None else jnp.array(weight, jnp.float32)
    ones = jnp.ones(len(delta))
    return Upload(
        {"a": delta[:, 0], "b": delta[:, 1:]},
        weight,
        loss=ones,
        last_loss=ones,
        steps=ones.astype(jnp.int32),
        start_group=jnp.zeros(len(delta), jnp.int32),
    )


def rows(upload):
    return np.concatenate([upload.delta["a"][:, None], upload.delta["b"]], axis=1)


# who fails


MIXED = {"dropout": 0.3, "straggler": 0.5, "nan": 0.2, "byzantine": 0.3, "attack": "noise"}


@pytest.fixture(scope="module")
def mixed(linear, local, toy):
    return go(linear, local, toy, failing=Faults(**MIXED))


@pytest.mark.nightly
@pytest.mark.parametrize(("devices", "width"), [nightly(1, 5), (4, 2)])
def test_the_same_faults_whatever_the_devices_and_width(mixed, devices, width, linear, local, toy):
    local = with_execution(local, mesh=cfl.make_mesh(devices), width=width)
    _, state, infos = go(linear, local, toy, failing=Faults(**MIXED))
    chex.assert_trees_all_equal(
        (infos.fault_counts, infos.steps, state.traffic),
        (mixed[2].fault_counts, mixed[2].steps, mixed[1].traffic),
    )
    chex.assert_trees_all_close(state.groups, mixed[1].groups, **ROUNDING)


@pytest.mark.nightly
def test_mixed_faults_are_counted(mixed):
    _, state, infos = mixed
    assert (
        infos.fault_counts.dropped.sum() > 0
        and infos.fault_counts.nonfinite.sum() > 0
        and (infos.fault_counts.byzantine == infos.fault_counts.byzantine[0]).all()
    )
    np.testing.assert_array_equal(
        infos.clients, REAL - infos.fault_counts.dropped - infos.fault_counts.nonfinite
    )
    sent = ledger(state.traffic)
    assert sent.units_up == ROUNDS * CLIENTS - infos.fault_counts.dropped.sum()
    assert sent.units_down == ROUNDS * CLIENTS
    assert (
        len(set(infos.fault_counts.dropped.tolist() + infos.fault_counts.nonfinite.tolist())) > 1
    ), "every round draws anew"


def test_a_draw_belongs_to_the_client():
    ids = np.random.default_rng(0).permutation(1000)
    some = faults.draw_failures(KEY, faults.DROPOUT, cohort_of(*ids), 0.3)
    np.testing.assert_array_equal(
        some, faults.draw_failures(KEY, faults.DROPOUT, cohort_of(*range(1000)), 0.3)[ids]
    )
    assert 240 < some.sum() < 360
    assert (some != faults.draw_failures(KEY, faults.NAN, cohort_of(*ids), 0.3)).sum() > 300, (
        "purposes are independent"
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_exactly_so_many_clients_are_hostile(share):
    chosen = [
        faults.draw_byzantine(Faults(byzantine=share), jax.random.key(seed), CLIENTS)
        for seed in (0, 0, 1)
    ]
    assert [hostile.sum() for hostile in chosen] == [round(share * CLIENTS)] * 3
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert (chosen[0] != chosen[2]).any() == (0 < round(share * CLIENTS) < CLIENTS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dropout": 1.1},
        {"nan": -0.1},
        {"byzantine": float("nan")},
        {"attack": "flip"},
        {"nonfinite": "x"},
    ],
)
def test_nonsense_is_refused(wrong, linear, local):
    with pytest.raises(InputError, match=f"faults.{next(iter(wrong))}="):
        fedavg(linear, local, cfl.System(select.from_table(EVERYBODY), Faults(**wrong)))


@pytest.mark.nightly
def test_chances_that_never_come_true_change_no_bit(linear, local, toy):
    usual = go(linear, local, toy)
    never = go(
        linear,
        local,
        toy,
        failing=Faults(
            dropout=1e-9, straggler=1e-9, nan=1e-9, byzantine=1e-9, attack="noise", nonfinite="zero"
        ),
    )
    zero = go(
        linear,
        local,
        toy,
        failing=Faults(
            dropout=0.0, byzantine=0.0, attack="label_flip", scale=9.0, nonfinite="raise"
        ),
    )
    chex.assert_trees_all_equal(never, usual)
    chex.assert_trees_all_equal(zero, usual)


# what failing does


@pytest.mark.nightly
def test_dropping_out_is_weight_zero(linear, local, toy):
    round, chance = 2, 0.4

    def without_them(r):
        gone = faults.draw_failures(
            derive_key(KEY, FAULTS, round), faults.DROPOUT, r.cohort, chance
        )
        left = r.upload.replace(weight=jnp.where(gone, 0.0, r.upload.weight))
        return weighted_mean(r._replace(upload=left))

    def by_hand(task, local, select):
        method = Method(sgd(task, local), aggregate=without_them)
        return federated(task, local, select, method)

    def one(algorithm):
        state = jax.jit(algorithm.init)(KEY, toy).replace(round=jnp.int32(round))
        return jax.jit(algorithm.round)(KEY, state, toy)

    (state, info), (other, _) = (
        one(method(linear, local, cfl.System(select.from_table(EVERYBODY), failing)))
        for method, failing in ((fedavg, Faults(dropout=chance)), (by_hand, Faults()))
    )
    assert 0 < info.fault_counts.dropped < REAL
    assert ledger(state.traffic).units_up == CLIENTS - info.fault_counts.dropped
    chex.assert_trees_all_equal(state.groups, other.groups)


@pytest.mark.parametrize(
    ("method", "lost"),
    [
        (fedadam, {"dropout": 1.0}),
        nightly(ifca, {"nan": 1.0}),
        nightly(fedadam, {"nan": 1.0}),
        nightly(ifca, {"dropout": 1.0}),
    ],
)
def test_when_everybody_is_lost_the_models_stay(method, lost, linear, local, toy):
    options = {"m": 2} if method is ifca else {}
    first, last, infos = go(linear, local, toy, method, failing=Faults(**lost), **options)
    chex.assert_trees_all_equal((last.groups, last.server), (first.groups, first.server))
    np.testing.assert_array_equal(
        infos.fault_counts.dropped if "dropout" in lost else infos.fault_counts.nonfinite, REAL
    )
    groups = np.unique(last.assignment[last.assignment >= 0])  # one client has no samples, and none
    np.testing.assert_array_equal(infos.idle_groups, len(groups))
    assert ledger(last.traffic).units_up == ROUNDS * (CLIENTS - REAL * ("dropout" in lost))
    chex.assert_tree_all_finite(infos.replace(**dict.fromkeys(MEANS, 0.0)))
    assert all(jnp.isnan(getattr(infos, name)).all() for name in MEANS)


def test_screening_by_hand():
    upload = upload_of([[1, 2, 3], [jnp.nan, 5, 6], [7, jnp.inf, 9], [1, 1, 1]], [1, 2, 3, 0])
    skipped, bad, leaf = at_once(faults.guard_nonfinite, "skip", upload)
    np.testing.assert_array_equal(rows(skipped), [[1, 2, 3], [0, 0, 0], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(skipped.weight, [1, 0, 0, 0])
    np.testing.assert_array_equal(bad, [False, True, True, False])
    np.testing.assert_array_equal(leaf, [-1, 0, 1, -1])
    zeroed, *_ = at_once(faults.guard_nonfinite, "zero", upload)
    np.testing.assert_array_equal(rows(zeroed), [[1, 2, 3], [0, 5, 6], [7, 0, 9], [1, 1, 1]])
    np.testing.assert_array_equal(zeroed.weight, upload.weight)


EXTRA = {
    "words": np.array([[1, 2], [np.nan, 4], [5, 6], [np.inf, 8]], np.float32),
    "group": np.arange(4, dtype=np.int32),
}


@pytest.mark.parametrize(
    ("policy", "words", "weight"),
    [
        ("skip", [[1, 2], [0, 0], [5, 6], [0, 8]], [1, 0, 3, 0]),
        ("zero", [[1, 2], [0, 4], [5, 6], [0, 8]], [1, 2, 3, 0]),
    ],
)
def test_what_is_sent_beside_a_model_is_screened_with_it(policy, words, weight):
    """Client 1 is lost by what it sends beside its model; client 3 has nothing to train on."""
    upload = upload_of(np.ones((4, 3)), [1, 2, 3, 0])
    left, bad, leaf = faults.guard_nonfinite(policy, upload.replace(extra=EXTRA))
    left = faults.clear_extra(left, bad)
    np.testing.assert_array_equal(bad, [False, True, False, False])
    np.testing.assert_array_equal(leaf, [-1, 2, -1, -1])
    np.testing.assert_array_equal(left.extra["words"], words)
    np.testing.assert_array_equal(
        left.extra["group"], [0, 0, 2, 3] if policy == "skip" else [0, 1, 2, 3]
    )
    assert left.extra["group"].dtype == np.int32
    np.testing.assert_array_equal(left.weight, weight)
    np.testing.assert_array_equal(rows(left)[1], np.full(3, policy == "zero"))


def test_what_is_sent_beside_a_model_is_lost_with_it():
    """A client that drops out is not one whose numbers are not finite; its loss is gone, too."""
    upload = upload_of(np.ones((4, 3))).replace(extra=EXTRA, loss=jnp.full(4, jnp.inf))
    none = jnp.zeros(20, bool)
    inject, lost = faults.inject_faults, Faults(dropout=1.0)
    left, counts = at_once(inject, lost, KEY, cohort_of(3, 5, 7, 11), upload, none)
    assert (int(counts.dropped.sum()), int(counts.nonfinite.sum())) == (4, 0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((left.extra, left.loss, left.weight)))
    hostile = Faults(byzantine=1.0, scale=3.0)
    attacked, _ = at_once(inject, hostile, KEY, cohort_of(3), upload_of([[1, 2, 3]]), ~none)
    np.testing.assert_array_equal(rows(attacked), [[-3, -6, -9]])


def test_a_round_counts_and_remembers_only_what_arrives(linear, local, toy):
    """Clients that drop out leave no trace in a memory, and nothing that they were to send up
    with their model counts; what they sent before they trained does.
    """
    chance, bad = 0.5, 9

    def prepare(r):
        real = r.cohort.ids < CLIENTS
        sent = make_bill(units_down=real, units_up=2 * real, words_up=3 * real)
        return r.work, make_report(sent, early=make_bill(words_up=100 * real))

    def solve(client, data, shared, work):
        def send(upload):
            return upload.replace(extra=jnp.where(client == bad, jnp.nan, client + 1.0))

        return map_result(sgd(linear, local)(client, data, shared, work), send)

    def finish(r):
        return r.state.replace(memory=r.cohort.put(r.state.memory, r.upload.extra))

    def start(key, data):
        return random_groups(linear, 1)(key, data)._replace(memory=jnp.zeros(CLIENTS))

    system = cfl.System(select.from_table(EVERYBODY), Faults(dropout=chance))
    method = Method(solve, start=start, prepare=prepare, finish=finish)
    _, last, infos = compiled(federated(linear, local, system, method), 1)(toy)
    cohort, key = cohort_of(*range(CLIENTS)), derive_key(KEY, FAULTS, 0)
    gone = faults.draw_failures(key, faults.DROPOUT, cohort, chance) & (toy.train.size > 0)
    assert 0 < gone.sum() < REAL and not gone[bad]
    remembered = np.arange(1, CLIENTS + 1) * ~np.asarray(gone)
    remembered[bad] = 0
    np.testing.assert_array_equal(last.memory, remembered)
    assert infos.fault_counts.first_nonfinite[0].tolist() == [bad, 2]
    arrived = CLIENTS - int(gone.sum())
    assert ledger(last.traffic) == Traffic(2 * CLIENTS, 3 * arrived, 0, 3 * arrived + 100 * CLIENTS)


@pytest.mark.parametrize(
    ("method", "options", "up"),
    [
        nightly(ifca, {"m": 2}, (CLIENTS - REAL, CLIENTS - REAL)),
        nightly(feddane, {}, (CLIENTS + CLIENTS - REAL, 0)),
    ],
)
def test_words_are_lost_with_a_model_and_gradients_are_not(method, options, up, linear, local, toy):
    """Everybody with samples drops out after the download, FedDANE's clients in phase two."""
    _, last, _ = go(linear, local, toy, method, failing=Faults(dropout=1.0), rounds=1, **options)
    sent = ledger(last.traffic)
    assert (sent.units_up, sent.words_up) == up


def test_a_loss_that_is_not_finite_is_not_remembered():
    upload = upload_of(np.ones((3, 2)), [1, 2, 3]).replace(loss=jnp.array([jnp.nan, 5, jnp.inf]))
    cohort = cohort_of(0, 1, 2)
    chosen = power_of_choice.rpow_d(1, 2).update(jnp.ones(4), None, cohort, upload, None)
    np.testing.assert_array_equal(chosen, [1, 5, 1, 1])
    rows = {"losses": DriftLosses(jnp.ones(4), None)}
    state = State(*[None] * len(dataclasses.fields(State))).replace(rows=rows)
    after = remember_losses(Round(None, state, None, cohort, None, upload))
    np.testing.assert_array_equal(after.rows["losses"].best, [1, 5, 1, 1])
    tried = OortMemory(jnp.ones(4), *[jnp.zeros(4)] * 3, jnp.int32(1), 0.0, 0.0, jnp.zeros(2))
    known = remember(tried, cohort, upload, None)
    np.testing.assert_array_equal(known.utility, [10, 10, 10, 1])


@pytest.mark.nightly
def test_a_zeroed_update_keeps_its_weight(linear, local, toy):
    _, state, infos = go(linear, local, toy, failing=Faults(nan=1.0, nonfinite="zero"))
    np.testing.assert_array_equal(infos.clients, REAL)
    np.testing.assert_array_equal(infos.idle_groups, 0)
    chex.assert_tree_all_finite(state)


@pytest.mark.nightly
@pytest.mark.parametrize("width", [nightly(1), 7])
def test_raise_names_round_client_and_layer(width, linear, local, toy):
    """The first client by selection, whatever the slots."""
    table = np.array([[2, 2, 2], [9, 1, 11]])  # nobody has data in round 1
    algorithm = fedavg(
        linear,
        with_execution(local, width=width),
        cfl.System(select.from_table(table), Faults(nan=1.0, nonfinite="raise")),
    )
    seen = []

    class See(cfl.Callback):
        def on_rows(self, row, grouping, take):
            seen.append(row["round"])

    with pytest.raises(
        NonFiniteUpdate, match=r"^round 2: client 9 sent a non-finite update of \S+/\S+$"
    ):
        cfl.run(
            algorithm,
            linear,
            toy,
            KEY,
            rounds=2,
            mesh=local.execution.mesh,
            callbacks=[See()],
        )
    assert seen == [1], "the row of the round that failed is not written"


def test_raise_names_numbers_beside_the_model(linear):
    counts = no_faults().replace(first_nonfinite=jnp.array([[-1, -1], [7, 2]]))
    groups = jax.eval_shape(jax.vmap(linear.init), jax.random.split(KEY, 1))
    strict = SimpleNamespace(nonfinite="raise")
    with pytest.raises(NonFiniteUpdate, match=r"^round 6: client 7 sent numbers beside its model "):
        raise_if_nonfinite(strict, groups, 6, SimpleNamespace(fault_counts=counts))


@pytest.mark.nightly
def test_a_diverging_client_is_screened_too(linear, local, toy):
    _, state, infos = go(linear, local.replace(lr=1e38), toy)
    assert infos.fault_counts.nonfinite.sum() > 0
    chex.assert_tree_all_finite(state)


def test_attacks_by_hand():
    upload, by = upload_of([[1, -2, 3], [4, 5, -6]]), jnp.array([True, False])
    flipped = faults.apply_attack(
        Faults(attack="sign_flip", scale=3.0), KEY, cohort_of(4, 5), upload, by
    )
    np.testing.assert_array_equal(rows(flipped), [[-3, 6, -9], [4, 5, -6]])
    chex.assert_trees_all_equal(
        faults.apply_attack(Faults(attack="label_flip"), KEY, cohort_of(4, 5), upload, by), upload
    )


def test_noise_is_as_long_as_the_update_and_belongs_to_the_client():
    delta = np.random.default_rng(0).normal(size=(3, 5000)) * [[1], [10], [0]]
    fault_model, everyone = Faults(attack="noise", scale=0.5), jnp.ones(3, bool)
    noise = (
        rows(faults.apply_attack(fault_model, KEY, cohort_of(4, 8, 2), upload_of(delta), everyone))
        - delta
    )
    np.testing.assert_allclose(
        np.linalg.norm(noise, axis=1), 0.5 * np.linalg.norm(delta, axis=1), rtol=0.05
    )
    unit = noise[:2] / np.linalg.norm(noise[:2], axis=1, keepdims=True)
    assert (
        abs(unit[0] @ unit[1]) < 0.06 and abs(unit[0] @ delta[0]) / np.linalg.norm(delta[0]) < 0.06
    )
    swapped = rows(
        faults.apply_attack(
            fault_model, KEY, cohort_of(2, 4, 8), upload_of(delta[[2, 0, 1]]), everyone
        )
    )
    np.testing.assert_allclose(swapped, (delta + noise)[[2, 0, 1]], rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
def test_label_flip_trains_on_the_opposite_label(linear, local, toy):
    fault_model = Faults(byzantine=1.0, attack="label_flip")
    opposite = toy.replace(y=toy.num_classes - 1 - toy.y)
    _, state, infos = go(linear, local, toy, failing=fault_model)
    chex.assert_trees_all_equal(state.groups, go(linear, local, opposite)[1].groups)
    np.testing.assert_array_equal(infos.fault_counts.byzantine, REAL)
    algorithm = fedavg(linear, local, cfl.System(select.from_table(EVERYBODY), fault_model))
    result = cfl.run(algorithm, linear, toy, KEY, rounds=3, mesh=local.execution.mesh)
    np.testing.assert_array_equal(result.data.y, toy.y)
    assert result.rows[-1]["accuracy"] < 0.2, "scored by the true labels"


def test_only_hostile_owners_see_other_labels(toy):
    seen = faults.flip_labels(
        Faults(byzantine=0.5, attack="label_flip"), jnp.arange(CLIENTS) < 7, toy
    )
    np.testing.assert_array_equal(
        seen.y, np.where(np.asarray(toy.owner) < 7, 3 - np.asarray(toy.y), toy.y)
    )


@pytest.mark.nightly
def test_a_straggler_does_less_and_is_kept(linear, local, toy):
    usual, slow = (
        go(linear, local, toy)[2],
        go(linear, local, toy, failing=Faults(straggler=1.0))[2],
    )
    taken, full = ([count_to_int(steps) for steps in infos.steps] for infos in (slow, usual))
    assert all(0 < few < all_of_them for few, all_of_them in zip(taken, full, strict=True))
    np.testing.assert_array_equal(slow.clients, REAL)
    shares = faults.apply_stragglers(
        Faults(straggler=0.4), KEY, cohort_of(*range(1000)), jnp.full(1000, 0.5)
    )
    assert 0 <= shares.min() and shares.max() == 0.5 and 320 < jnp.sum(shares < 0.5) < 480


# nothing divides by zero


METHODS = {
    "edc": (flexcfl, {"measure": "edc"}),
    "madc": (flexcfl, {"measure": "madc"}),
    "edc_randomized": (flexcfl, {"measure": "edc_randomized"}),
    "ifca": (ifca, {}),
    "fedadam": (fedadam, {}),
    "qfedavg": (qfedavg, {"q": 1.0}),
}


@pytest.mark.parametrize("name", others_nightly(METHODS, ["ifca"]))
def test_degenerate_rounds_stay_finite(name, linear, local, toy):
    """More groups than directions; then no gradient at all, no step, everybody alike,
    and a group that loses all its clients.
    """
    method, options = METHODS[name]
    if method in (flexcfl, ifca):
        options = options | {"m": 6}
    if method is flexcfl:
        options = options | {"alpha": 2, "pretrain": "iters:3", "eta_g": 0.1}

    def run(lr, data, later):
        cohorts = select.from_table(EVERYBODY[:, 3:12])
        algorithm = build(method, linear, local.replace(lr=lr), cohorts, **options)
        state = algorithm.init(KEY, data)
        return jax.lax.scan(
            lambda state, _: algorithm.round(KEY, state, later), state, length=ROUNDS
        )

    run, alike = jax.jit(run), toy.replace(x=jnp.ones_like(toy.x), y=jnp.zeros_like(toy.y))
    nothing = toy.replace(
        train=toy.train.replace(size=jnp.zeros_like(toy.train.size)),
        shifted=jnp.ones(CLIENTS, bool),
    )
    half = nothing.replace(
        train=toy.train.replace(size=jnp.where(jnp.arange(CLIENTS) % 2, 0, toy.train.size))
    )
    cases = {
        "usual": (0.2, toy, toy),
        "no inputs": (0.2, toy.replace(x=jnp.zeros_like(toy.x)), toy),
        "no step": (1e-12, toy, toy),
        "everybody alike": (0.2, alike, alike),
        "nobody has data": (0.2, nothing, nothing),
        "groups emptied": (0.2, toy, half),
    }
    for case, (lr, data, later) in cases.items():
        state, infos = run(lr, data, later)
        means = MEANS if case.startswith("nobody") else ("group_discrepancy",)
        assert jnp.isnan(infos.loss).all() == (means is MEANS)
        chex.assert_tree_all_finite({case: (state, infos.replace(**dict.fromkeys(means, 0.0)))})
        clients = (
            REAL - 4
            if case in ("usual", "no inputs", "no step", "everybody alike")
            else 0
            if case.startswith("nobody")
            else 4
        )
        np.testing.assert_array_equal(infos.clients, clients, err_msg=case)


def with_huge_inputs(data, client):
    """Returns data in which a client holds the same huge sample under several labels, so
    that whatever the model, training on it overflows.
    """
    assert len(np.unique(data.y[data.owner == client])) > 1
    return data.replace(x=jnp.where((data.owner == client)[:, None], 1e30, data.x))


FOUND = {"m": 2, "alpha": 3, "pretrain": "iters:5"}
FREE = {"m": 3, "eps1": 9.0, "eps2": 0.0, "warm_up": 0}
TRAINING_ASIDE = {
    # the clients that train at the start; and how many updates each client sends in three
    # rounds with everybody: one a round, one more as a newcomer, and one for each cut of its
    # group, in which a client that sent nothing usable has taken no side
    "flexcfl": (flexcfl, FOUND, "founders", 4),
    "fesem": (fesem, {"m": 2}, "all", 3),
    "fesem random": (fesem, {"m": 2, "start": "random_models"}, "none", 3),
    "ifca": (ifca, {"m": 2, "start": "kmeanspp_loss"}, "all", 3),
    "cfl": (cfl_method, FREE, "none", 5),
    "fl_hc": (fl_hc, {"m": 3, "warm_up": 1, "newcomers": "nearest"}, "none", 4),
    "tkm": (tkm, {"m": 2, "erm_epochs": 2}, "all", 3),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINING_ASIDE)
def test_a_client_with_huge_inputs_spoils_nothing_anywhere(name, linear, local, toy):
    """Its every update is screened and counted, as a founder, a newcomer, at the start and
    in rounds; each of three clients in turn.
    """
    method, options, starters, sends = TRAINING_ASIDE[name]
    founders = draw_founders(
        jax.random.split(derive_key(KEY, START), 4)[1], CLIENTS, count_groups(2, None), 3
    ).tolist()
    run = jax.jit(lambda data: go(linear, local, data, method, **options))
    assert 11 in founders and 7 not in founders
    for client in (5, 7, 11):
        first, last, infos = run(with_huge_inputs(toy, client))
        chex.assert_tree_all_finite((first, last, infos.replace(group_discrepancy=0.0)))
        starts = starters == "all" or (starters == "founders" and client in founders)
        assert first.start_faults.nonfinite == starts
        assert infos.fault_counts.nonfinite.sum() == starts + sends
        assert (infos.fault_counts.first_nonfinite[:, 0] == client).all()
        assert infos.clients.tolist() == [REAL - 1] * ROUNDS


@pytest.mark.parametrize("scale", [nightly(1e10), nightly(1e15), nightly(1e30)])
def test_a_huge_loss_to_a_high_power_spoils_nothing(scale, linear, local, toy):
    """A client's update may be finite where the power of its loss is not."""
    client = (toy.owner == 5)[:, None]
    _, last, infos = go(linear, local, toy.replace(x=jnp.where(client, scale, toy.x)), qfedavg, q=4)
    chex.assert_tree_all_finite((last, infos.replace(group_discrepancy=0.0)))


@pytest.mark.nightly
def test_a_newcomer_with_huge_inputs_walks_the_cuts(linear, local, toy):
    """It misses the cuts of CFL's first rounds and then passes them, one after another."""
    client, huge = 11, with_huge_inputs(toy, 11)
    table = np.array([np.delete(np.arange(14), client)] * 3 + [np.arange(1, 14)])
    _, last, infos = go(linear, local, huge, cfl_method, table, rounds=4, **FREE)
    chex.assert_tree_all_finite(last)
    assert last.active.sum() == 3 and last.assignment[client] == 0
    walked = int(np.sum(last.memory.parent == 0))
    assert infos.fault_counts.nonfinite.tolist() == [0, 0, 0, 1 + walked]


@pytest.mark.nightly
def test_a_founder_at_fault_stops_the_run(linear, local, toy):
    huge = with_huge_inputs(toy, 5)
    strict = cfl.System(select.uniform(1), Faults(nonfinite="raise"))
    algorithm = build(fesem, linear, local, strict, m=2)
    with pytest.raises(NonFiniteUpdate, match=r"^round 1: client 5 sent a non-finite update of "):
        cfl.run(algorithm, linear, huge, KEY, rounds=1, mesh=local.execution.mesh)
