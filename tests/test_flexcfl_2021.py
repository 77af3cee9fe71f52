"""Quirks of the FlexCFL code, which settings name in a checkout (`papers.flexcfl_2021`)."""

import jax
import numpy as np
import pytest
from conftest import build
from papers import flexcfl_2021 as quirks

import fedjax_cfl as cfl
from fedjax_cfl.algorithms import flexcfl
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.simulation.evaluate import used_models
from fedjax_cfl.system import select

KEY = jax.random.key(0)


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


def test_a_setting_names_a_function_of_a_checkout(fedjax_cfl, tmp_path):
    line = "dataset.clients=8 clients_per_round=3 rounds=1 model=mclr local.epochs=1 run_dir=r"
    name = "papers.flexcfl_2021.received"
    status, _, error = fedjax_cfl(f"{line} +personal._target_={name}")
    assert status == 0, error
    assert name in (tmp_path / "r" / ".hydra" / "config.yaml").read_text()


def test_without_a_checkout_the_message_says_where_they_are(fedjax_cfl, monkeypatch, tmp_path):
    monkeypatch.delitem(cfl.cli.settings.sys.modules, "papers")
    monkeypatch.setattr("fedjax_cfl.cli.paper.HERE", tmp_path / "fedjax_cfl")
    status, _, error = fedjax_cfl("+personal._target_=papers.flexcfl_2021.received run_dir=r")
    assert status == 2 and error.count("\n") == 1, error
    assert "are in a checkout" in error and not (tmp_path / "r").exists()
