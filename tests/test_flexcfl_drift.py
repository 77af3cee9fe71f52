"""FlexCFL while clients swap their data, against a slow twin in NumPy: who is detected,
where they go, whom they are compared with from then on, what is sent, and the models.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, ledger
from test_reference import (
    KEY,
    Model,
    assert_models_close,
    batches_of,
    mean,
    models_of,
    passes,
    samples,
    trained,
)

import fedjax_cfl as cfl
from fedjax_cfl import algorithms
from fedjax_cfl.clustering.migrate import charge_swapped
from fedjax_cfl.keys import ASSIGN, MIGRATE, SELECT, TRAIN, derive_key
from fedjax_cfl.simulation.rounds import init_data_state, run_round
from fedjax_cfl.system import select

M, ALPHA, STEPS, COHORT, ROUNDS = 2, 3, 11, 5, 6
DRIFT = cfl.drift.swap_all(p=0.6)


def counts_of(data, client) -> np.ndarray:
    """Returns a client's training samples of each class [C]."""
    return np.bincount(np.asarray(data.y)[samples(data, client)], minlength=data.num_classes)


def is_shifted(counts: np.ndarray, reference: np.ndarray) -> bool:
    """More than a fifth of a client's data changed their label; a client that has its first
    samples has shifted, one without samples shows nothing.
    """
    if not counts.sum():
        return False
    if not reference.sum():
        return True
    return 0.5 * np.abs(counts / counts.sum() - reference / reference.sum()).sum() > 0.2 + 1e-6


class Twin:
    """What the server knows."""

    def __init__(self, state, data, local):
        self.groups, self.local = models_of(state.groups), local
        self.initial = models_of(state.memory.initial)[0]
        self.directions = np.array([model.flat() for model in models_of(state.memory.directions)])
        self.assignment = np.asarray(state.assignment).copy()
        self.reference = np.array([counts_of(data, k) for k in range(data.num_clients)])
        founders = ALPHA * M
        self.down, self.up = founders * (1 + M), founders

    def choose(self, purpose: int, round: int, data, client: int) -> int:
        """The group of the nearest direction, after STEPS steps from the initial model."""
        held = samples(data, client)
        if not len(held):
            return 0
        epochs = passes(derive_key(KEY, purpose, round), data, client, STEPS)
        order = batches_of(epochs, self.local.batch_size)[:STEPS]
        update = trained(self.initial, data, order, self.local.lr).flat() - self.initial.flat()
        return int(np.argmax(self.directions @ update / np.linalg.norm(self.directions, axis=1)))

    def migrate(self, round: int, data) -> tuple[set[int], int]:
        """Returns the clients detected, and how many of them changed their group."""
        counts = np.array([counts_of(data, k) for k in range(data.num_clients)])
        detected = {
            k
            for k in range(data.num_clients)
            if self.assignment[k] >= 0 and is_shifted(counts[k], self.reference[k])
        }
        before = self.assignment.copy()
        for k in detected:
            self.assignment[k] = self.choose(MIGRATE, round, data, k)
            self.reference[k] = counts[k]
        return detected, int((self.assignment != before).sum())

    def train(self, round: int, data, ids: list[int]) -> None:
        """One round of the cohort `ids`."""
        members: list[list[Model]] = [[] for _ in range(M)]
        weights: list[list[int]] = [[] for _ in range(M)]
        for k in ids:
            if self.assignment[k] < 0:
                self.assignment[k] = self.choose(ASSIGN, round, data, k)
                self.down += M
            if not len(samples(data, k)):
                continue
            epochs = passes(derive_key(KEY, TRAIN, round), data, k, self.local.epochs)
            order = batches_of(epochs, self.local.batch_size)
            group = self.assignment[k]
            members[group].append(trained(self.groups[group], data, order, self.local.lr))
            weights[group].append(len(epochs[0]))
        self.groups = [
            mean(mine, weight) if mine else old
            for old, mine, weight in zip(self.groups, members, weights, strict=True)
        ]
        self.down, self.up = self.down + len(ids), self.up + len(ids)


@pytest.fixture(scope="module")
def rounds(toy, linear, local) -> list[dict[str, Any]]:
    """Every round of the package's run beside the twin's."""
    pick = select.uniform(COHORT)
    options = {"m": M, "alpha": ALPHA, "pretrain": f"iters:{STEPS}"}
    algorithm = build(algorithms.flexcfl, linear, local, pick, **options)
    state = jax.jit(algorithm.init)(KEY, toy)
    data_state = init_data_state(DRIFT, KEY, toy)
    step = jax.jit(
        lambda state, moving, data: run_round(algorithm, DRIFT, KEY, state, moving, data)
    )
    twin, found = Twin(state, toy, local), []
    for round in range(ROUNDS):
        state, data_state, info = step(state, data_state, toy)
        now = data_state.apply_to(toy)
        met = twin.assignment >= 0
        detected, moved = twin.migrate(round, now)
        ids = np.asarray(pick.draw(derive_key(KEY, SELECT, round), round, now.train.size))
        twin.train(round, now, ids.tolist())
        found.append(
            {
                "state": jax.device_get(state),
                "info": jax.device_get(info),
                "groups": twin.groups,
                "assignment": twin.assignment.copy(),
                "reference": twin.reference.copy(),
                "moved": moved,
                "sent": (twin.down, twin.up),
                "detected": detected,
                "shifted": set(np.flatnonzero(data_state.shifted).tolist()),
                "met": met,
            }
        )
    return found


def test_models_and_groups(rounds):
    for each in rounds:
        assert_models_close(each["state"].groups, each["groups"])
        np.testing.assert_array_equal(each["state"].assignment, each["assignment"])


def test_who_migrates(rounds):
    """Only clients met are detected, and all of what is compared was seen to happen: some
    stay in their group, some leave it, some shift before they are met.
    """
    for each in rounds:
        assert each["info"].migrated == each["moved"]
    detected = sum(len(each["detected"]) for each in rounds)
    moved = sum(each["moved"] for each in rounds)
    unmet = [k for each in rounds for k in each["shifted"] if not each["met"][k]]
    assert 3 <= moved < detected and unmet


def test_references_change_for_the_detected_alone(rounds):
    for each in rounds:
        reference = each["state"].rows["shift_reference"].reference
        np.testing.assert_array_equal(reference, each["reference"])


def test_what_is_sent(rounds):
    """2 alpha m and alpha m^2 at the start, m for a client never met, and the cohort; a
    client that starts cold again has the directions already.
    """
    for each in rounds:
        sent = ledger(each["state"].traffic)
        assert (sent.units_down, sent.units_up) == each["sent"]


def test_only_clients_met_pay_for_a_swap(toy):
    """Fig. 6 counts clients met whose data changed, whether the shift was detected or not."""
    met = jnp.arange(toy.num_clients) % 2 == 0
    changed = toy.replace(shifted=jnp.arange(toy.num_clients) < 5)
    paying = charge_swapped(jnp.zeros_like(met), met, changed)
    assert np.flatnonzero(paying).tolist() == [0, 2, 4]


@pytest.mark.nightly
def test_a_client_trains_in_four_places(toy, linear, local):
    """The start, newcomers, shifted clients, the round: each is compiled for each branch of
    `choose_train`, and compiling is what a short run waits for.
    """
    traced = []

    def loss(*arguments):
        traced.append(1)
        return linear.loss(*arguments)

    counted = cfl.Task(linear.init, loss, linear.predict)  # trained directly: one branch

    def count(function, *arguments):
        traced.clear()
        found = jax.eval_shape(function, *arguments)
        return len(traced), found

    methods = {"flexcfl": {"m": 2}, "fedgroup": {"m": 2}, "fedavg": {}}
    found = {}
    for name, options in methods.items():
        method = getattr(algorithms, name)(counted, local, select.uniform(4), **options)
        moving = init_data_state(DRIFT, KEY, toy)
        start, state = count(method.init, KEY, toy)
        rounds, _ = count(
            lambda state, method=method, moving=moving: run_round(
                method, DRIFT, KEY, state, moving, toy
            ),
            state,
        )
        found[name] = start, rounds
    assert found == {"flexcfl": (1, 3), "fedgroup": (1, 2), "fedavg": (0, 1)}
