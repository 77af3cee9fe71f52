"""What is sent: the numbers of FlexCFL's figure 6."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, charged, ledger, nightly

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.flexcfl.flexcfl import flexcfl
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.round.engine import federated
from fedjax_cfl.system import clock as clocks
from fedjax_cfl.system import reports, select
from fedjax_cfl.system.clock import device_profiles
from fedjax_cfl.system.reports import count_arrived, make_bill, make_report, no_bill, no_traffic
from fedjax_cfl.types import Cohort, Traffic

KEY = jax.random.key(11)


def units(algorithm, clients, rounds, swapped=lambda round: 0):
    """Returns the models sent in a whole run on `clients` clients of one sample and one
    feature each; `swapped` of them shift a round.
    """
    x = np.linspace(-1, 1, clients, dtype=np.float32)[:, None]
    each_one = cfl.Partition(np.arange(clients), np.arange(clients), np.zeros(clients, bool))
    data = cfl.federate(cfl.Pool(x, (x[:, 0] > 0).astype(np.int32), 2), each_one)

    def go(key):
        def one(t, state):
            return algorithm.round(
                key, state, data.replace(shifted=jnp.arange(clients) < swapped(t))
            )[0]

        return jax.lax.fori_loop(0, rounds, one, algorithm.init(key, data))

    spent = ledger(jax.jit(go)(KEY).traffic)
    return spent.units_down + spent.units_up


ROUND_ROBIN = select.rr_then_random(20)
QUICKLY = {"alpha": 20, "pretrain": "iters:1", "measure": "edc", "restarts": 1}
STATIC = QUICKLY | {"detector": None}  # FedGroup


@pytest.mark.parametrize(
    ("clients", "method", "expected"),
    [
        (1000, lambda *parts: fedavg(*parts, select.uniform(20)), 12_000),
        nightly(1000, lambda *parts: build(flexcfl, *parts, ROUND_ROBIN, m=3, **QUICKLY), 15_120),
        nightly(1000, lambda *parts: ifca(*parts, ROUND_ROBIN, m=3), 24_000),
        nightly(200, lambda *parts: build(flexcfl, *parts, ROUND_ROBIN, m=5, **STATIC), 13_200),
        nightly(
            200,
            lambda *parts: build(flexcfl, *parts, ROUND_ROBIN, m=5, eta_g=0.1, **STATIC),
            14_700,
        ),
    ],
    ids=["fedavg", "flexcfl", "ifca", "fedgroup", "fedgroup mixed"],
)
def test_models_sent_are_those_of_figure_6(clients, method, expected):
    """300 rounds of 20 clients (FlexCFL, Fig. 6): K + K a round, 2 alpha m at the
    start, m a client in its life, m a round for mixing.
    """
    task = cfl.as_task(cfl.models.MCLR(2), (1,), 2)
    assert (
        units(
            method(task, cfl.Local(0.1, 1, 10, execution=cfl.make_execution(cfl.make_mesh(1), 1))),
            clients,
            300,
        )
        == expected
    )


@pytest.mark.nightly
def test_ifca_mig_charges_every_swapped_client_met():
    """FlexCFL, Fig. 6a: 24,000 + 3 x 13,920 = 65,760, with 60 swaps in each of 232
    rounds after everybody has been met.
    """
    task = cfl.as_task(cfl.models.MCLR(2), (1,), 2)
    local = cfl.Local(0.1, 1, 10, execution=cfl.make_execution(cfl.make_mesh(1), 1))
    method = build(ifca, task, local, ROUND_ROBIN, m=3, detector="tv", charge="swapped")
    assert units(method, 1000, 300, lambda t: jnp.where((t >= 50) & (t < 282), 60, 0)) == 65_760


@pytest.mark.nightly
def test_bytes_are_right_up_to_1e15():
    """50 models to each of 100,000 clients a round, a thousand rounds: 5e9 models down."""
    clients, rounds, model_bytes = 100_000, 1_000, 200_000
    one_round = make_bill(jnp.full(clients, 50), jnp.full(clients, 10)), make_bill(words_up=7)

    @jax.jit
    def played():
        def add(total, _):
            return reports.add_to_ledger(total, *one_round), None

        begin = reports.add_to_ledger(no_traffic(), make_bill(words_down=2**31 - 1))
        return jax.lax.scan(add, begin, length=rounds)[0]

    sent = played()
    assert ledger(sent) == Traffic(5 * 10**9, 10**9, 2**31 - 1, 7_000)
    assert reports.count_bytes(sent, model_bytes) == (10**15 + 4 * (2**31 - 1), 2 * 10**14 + 28_000)


def test_every_way_to_add_counts_is_exact():
    """Sums of words around 2^32, against Python's integers: in turn, over two axes, under
    jit and vmap.
    """
    edges = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 - 1, 2**63]
    drawn = [int(n) for n in np.random.default_rng(0).integers(0, 2**62, 52)]
    numbers = edges + drawn
    table = jnp.array([divmod(n, 2**32) for n in numbers], jnp.uint32)  # [60, 2]
    assert [reports.count_to_int(row) for row in table] == numbers
    pairs = jax.jit(jax.vmap(jax.vmap(reports.add_counts, (None, 0)), (0, None)))(table, table)
    for row, one in zip(np.asarray(pairs), numbers, strict=True):
        found = [reports.count_to_int(count) for count in row]
        assert found == [(one + other) % 2**64 for other in numbers]
    total = jax.jit(reports.sum_counts)(table.reshape(4, 15, 2))
    assert reports.count_to_int(total) == sum(numbers) % 2**64
    by_row = jax.jit(jax.vmap(reports.sum_counts))(table.reshape(4, 15, 2))
    expected = [sum(numbers[first : first + 15]) % 2**64 for first in (0, 15, 30, 45)]
    assert [reports.count_to_int(count) for count in by_row] == expected
    assert reports.count_to_int(reports.sum_counts(jnp.zeros((0, 2), jnp.uint32))) == 0


def test_counts_are_made_of_any_whole_numbers():
    for value in (3, np.int64(3), jnp.int32(3), jnp.array(True), True):
        assert reports.count_to_int(reports.make_count(value)) == int(value)
    assert reports.make_count(jnp.arange(6).reshape(2, 3)).shape == (2, 3, 2)
    assert reports.count_to_int(reports.make_count(2**31 - 1)) == 2**31 - 1


def test_a_bill_has_one_axis():
    """That of its payers, whatever it is made of."""
    bill = make_bill(1, jnp.arange(3), words_up=True, samples=jnp.array([True, False, True]))
    for count, wanted in ((bill.units_down, [1] * 3), (bill.units_up, [0, 1, 2])):
        assert count.tolist() == wanted and count.dtype == jnp.int32
    assert bill.samples.tolist() == [1, 0, 1] and bill.samples.dtype == jnp.float32
    assert {leaf.shape for leaf in jax.tree.leaves(make_bill(7))} == {(1,)}
    assert {leaf.shape for leaf in jax.tree.leaves(no_bill())} == {(0,)}
    with pytest.raises(AssertionError, match="one axis"):
        make_bill(jnp.zeros((2, 3)))


def test_bills_add_up():
    """By payers; nobody's change nothing; the total of a run has all of them."""
    one = make_bill(units_up=jnp.array([2, 3]), samples=jnp.array([5, 0]))
    both = reports.add_bills(no_bill(), one, make_bill(1, 1, words_down=jnp.array([0, 8])))
    assert (both.units_up.tolist(), both.words_down.tolist()) == ([3, 4], [0, 8])
    assert both.samples.tolist() == [5, 0]
    assert reports.add_bills(no_bill(), no_bill()).samples.size == 0
    with pytest.raises(AssertionError, match="same payers"):
        reports.add_bills(one, make_bill(words_up=1))
    assert charged(both, no_bill(), make_bill(words_up=2**31 - 1)) == Traffic(2, 7, 8, 2**31 - 1)


def test_bytes_and_seconds_of_each_slot():
    """At a byte a second; of what one slot alone answers, only its own goes up."""
    bill = make_bill(jnp.array([1, 3, 0]), jnp.array([1, 0, 0]), words_up=jnp.array([0, 2, 5]))
    assert reports.sum_bytes(bill, 100).tolist() == [200, 308, 20]
    arrived = count_arrived(bill, jnp.array([False, True, False]))
    assert charged(arrived) == Traffic(4, 0, 0, 2)
    assert count_arrived(no_bill(), jnp.ones(3, bool)).samples.size == 0
    clock = device_profiles(np.zeros(3), np.ones(3), None, np.ones(3))
    cohort, steps = Cohort(jnp.arange(3), jnp.arange(3)), SimpleNamespace(steps=jnp.zeros(3))
    given = [make_report(), make_report(bill, early=make_bill(samples=jnp.array([0, 0, 7])))]
    seconds = clocks.client_seconds(clock, cohort, steps, given, 100, 3)
    assert seconds.tolist() == [200, 308, 27]


@pytest.mark.parametrize(
    ("step", "payers"),
    [
        ("migrate", "all clients [K], here 14"),
        ("the selection's poll", "all clients [K], here 14"),
        ("assign", "the slots [S], here 3"),
        ("assign_and_found", "the slots [S], here 3"),
        ("prepare", "the slots [S], here 3"),
    ],
)
def test_a_bill_of_other_payers_is_refused(step, payers, toy, linear, local):
    """One number in place of one of each payer, in the bill or in what is sent early."""
    wrong, selection = make_bill(words_up=1), select.uniform(3)
    report, early = make_report(wrong), make_report(early=wrong)
    steps = {
        "migrate": lambda r: (r.state, report),
        "assign": lambda r: (jnp.zeros_like(r.cohort.ids), early),
        "assign_and_found": lambda r: (r.state, jnp.zeros_like(r.cohort.ids), report),
        "prepare": lambda r: (r.work, early),
    }
    given = {step: steps[step]} if step in steps else {}
    if not given:
        selection = selection._replace(poll=lambda key, state, data: wrong)
    algorithm = federated(linear, local, selection, Method(sgd(linear, local), **given))
    state = algorithm.init(KEY, toy)
    said = f"{step} must give bills of {payers}, or of nobody (no_bill()), not of shape (1,)"
    with pytest.raises(InputError, match=f"^{re.escape(said)}"):
        jax.eval_shape(algorithm.round, KEY, state, toy)
