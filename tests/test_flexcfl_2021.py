"""Quirks of the FlexCFL code, which settings name in a checkout (`papers.flexcfl_2021`)."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build
from papers import flexcfl_2021 as quirks
from test_aggregate import EXACT, combined

import fedjax_cfl as cfl
from fedjax_cfl.algorithms import flexcfl
from fedjax_cfl.cli.build import resolve_settings
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.simulation.evaluate import used_models
from fedjax_cfl.system import select

KEY = jax.random.key(0)


@pytest.mark.parametrize("round_robin", [False, True])
def test_py_sample_is_pythons_generator(round_robin):
    pick = quirks.py_sample(4, rounds=6, num_clients=10, seed=2077, round_robin=round_robin)
    drawn = [random.Random(round + 2077).sample(range(10), 4) for round in range(6)]
    if round_robin:
        drawn[:3] = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]
    assert [pick.draw(KEY, round, jnp.ones(10)).tolist() for round in range(6)] == drawn
    assert pick.draw(KEY, 7, jnp.ones(10)).tolist() == drawn[1], (
        "a run longer than the table starts over"
    )


def test_first_client_takes_one_update_for_all():
    """Deltas 1 and 3: the group moves by 1 L / (L + 1e-5), L = 2, where the mean is 2."""
    np.testing.assert_allclose(
        combined(quirks.first_client, [1.0, 3.0], [5, 7], [0, 0])[0], [2 / (2 + 1e-5)], **EXACT
    )
    np.testing.assert_allclose(
        combined(uniform_mean, [1.0, 3.0], [5, 7], [0, 0])[0], [2.0], **EXACT
    )


def test_first_client_is_first_by_selection_and_has_data():
    """Slots hold clients by size: the first selected of group 0 stands in slot 3, but
    is without data, the next in slot 1.
    """
    step, mass = combined(
        quirks.first_client, [1.0, 2.0, 4.0, 8.0], [9, 7, 5, 0], [0, 0, 1, 0], 2, rank=[3, 1, 2, 0]
    )
    np.testing.assert_allclose(step, [2 * 2 / (2 + 1e-5), 4 / (1 + 1e-5)], **EXACT)
    np.testing.assert_array_equal(mass, [2, 1])


@pytest.mark.nightly
def test_clients_are_tested_on_what_they_received(toy, linear, local):
    """By hand, round by round; the training is that without the layer."""
    pick, options = select.rr_then_random(5), {"m": 2, "alpha": 2, "pretrain": "iters:3"}
    layered = local.replace(personal=quirks.received())
    plain, tested = (build(flexcfl, linear, each, pick, **options) for each in (local, layered))
    both = [jax.jit(each.init)(KEY, toy) for each in (plain, tested)]
    steps = [jax.jit(each.round) for each in (plain, tested)]
    received = {}
    for number in range(5):
        sent = jax.tree.map(np.asarray, both[1].groups)
        both = [step(KEY, state, toy)[0] for step, state in zip(steps, both, strict=True)]
        for client in np.asarray(
            pick.draw(derive_key(KEY, SELECT, number), number, toy.train.size)
        ):
            group = int(both[1].assignment[client])
            if toy.train.size[client]:
                received[int(client)] = jax.tree.map(lambda leaf, g=group: leaf[g], sent)
    for one, other in zip(*(jax.tree.leaves(state.groups) for state in both), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    used = used_models(tested, both[1], toy, None)
    assert len(received) > 8
    for client, model in received.items():
        at = int(used.model_index[client])
        for leaf, wanted in zip(*map(jax.tree.leaves, (used.models, model)), strict=True):
            np.testing.assert_array_equal(leaf[at], wanted)
    present = np.asarray(jax.tree.leaves(both[1].groups)[0])
    older = [jax.tree.leaves(model)[0] for model in received.values()]
    assert not any(np.array_equal(leaf, now) for leaf in older for now in present)


@pytest.mark.nightly
def test_a_setting_names_a_function_of_a_checkout(fedjax_cfl, tmp_path):
    line = "dataset.clients=8 clients_per_round=3 rounds=1 model=mclr local.epochs=1 run_dir=r"
    name = "papers.flexcfl_2021.received"
    status, _, error = fedjax_cfl(f"{line} +personal._target_={name}")
    assert status == 0, error
    assert name in (tmp_path / "r" / ".hydra" / "config.yaml").read_text()


def test_what_a_preset_names_can_be_replaced_by_a_word():
    config = resolve_settings(["preset=ref", "algorithm=fesem", "algorithm.estep=all"])
    assert config["algorithm"]["estep"] == "all"
    assert config["algorithm"]["aggregate"]["_target_"] == "papers.flexcfl_2021.first_client"


def test_without_a_checkout_the_message_says_where_they_are(fedjax_cfl, monkeypatch, tmp_path):
    monkeypatch.delitem(cfl.cli.settings.sys.modules, "papers")
    monkeypatch.setattr("fedjax_cfl.cli.paper.HERE", tmp_path / "fedjax_cfl")
    status, _, error = fedjax_cfl("+personal._target_=papers.flexcfl_2021.received run_dir=r")
    assert status == 2 and error.count("\n") == 1, error
    assert "are in a checkout" in error and not (tmp_path / "r").exists()
