"""Every personal layer over six methods, as users run them: clients swap data and fail, the run is
cut off and goes on, two seeds are one program on four devices.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import last_arrays, lasting_rows, nightly
from test_grid import same

from fedjax_cfl.runs.checkpoint import list_steps

METHODS = {
    "fedavg": "",
    "ifca": "algorithm.m=2",
    "flexcfl": "algorithm.m=2 algorithm.pretrain=iters:3 algorithm.alpha=2",
    "fesem": "algorithm.m=2",
    "fielding": "algorithm.m=3 algorithm.tau=0",
    "feddrift": "algorithm.m=3 algorithm.delta=0.02",
}
LAYERS = {
    "ditto": "",
    "apfl": "personal.adaptive=true",
    "pfedme": "",
    "per_fedavg": "",
    "fedper": "",
    "fedrep": "",
    "fedbabu": "",
    "lg_fedavg": "",
    "fedbn": "model.module._target_=normed.Normed",
    "fine_tune": "",
    "fedala": "",
    "moon": "",
    "scaffold": "",
    "feddyn": "",
}
OWN_JUDGE = ("feddrift", "lg_fedavg")
REFUSED = {
    ("fesem", "feddyn"): "the server of this method makes another step; use personal=none, or",
    OWN_JUDGE: "personal.judge=own: FedDrift tests the models of groups as they are; use template",
}
REMEDIES = {OWN_JUDGE: "personal.judge=template"}  # what the refusal names
PAIRS = [
    (method, layer)
    for method in METHODS
    for layer in LAYERS
    if (method, layer) not in REFUSED.keys() - REMEDIES.keys()
]
UNSEEN = ("ditto", "fine_tune")  # train beside the method below, which does not notice
LINE = (
    "dataset.clients=12 clients_per_round=6 local.epochs=2 rounds=4 eval_every=2 checkpoint.every=2"
    " drift=swap_all drift.p=0.4 faults.dropout=0.2 faults.straggler=0.2 faults.nan=0.1"
)
MODEL = """import flax.linen as nn


class Normed(nn.Module):
    num_classes: int
    hidden: tuple[int, ...] = (6,)

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.hidden[0])(x.reshape(len(x), -1))
        return nn.Dense(self.num_classes)(nn.relu(nn.LayerNorm()(x)))
"""


def run(fedjax_cfl, line, run_dir):
    status, out, err = fedjax_cfl(f"{line} run_dir={run_dir}")
    assert (status, err) == (0, "")
    return out


def cut_off(run_dir):
    """As if the process had been killed after the last row, before its checkpoint."""
    last = list_steps(run_dir / "checkpoints")[-1]
    (run_dir / "checkpoints" / f"{last}.header").unlink()
    (run_dir / "final.npz").unlink()
    (run_dir / "summary.json").unlink()


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "layer"), PAIRS)
def test_every_layer_over_every_method(method, layer, fedjax_cfl, tmp_path):
    (tmp_path / "normed.py").write_text(MODEL)
    below = f"algorithm={method} {METHODS[method]} {LINE} model=mlp model.module.hidden=[6]"
    line = f"{below} personal={layer} {LAYERS[layer]} {REMEDIES.get((method, layer), '')}"
    run(fedjax_cfl, line, "whole")
    rows = lasting_rows("whole")
    assert sum(row["dropped_clients"] + row["late_clients"] for row in rows)
    assert sum(row["shifted_clients"] for row in rows)

    shutil.copytree("whole", "torn")
    cut_off(Path("torn"))
    assert "resuming after round 2\n" in run(fedjax_cfl, line, "torn")
    assert lasting_rows("torn") == rows
    np.testing.assert_equal(last_arrays("torn"), last_arrays("whole"))

    run(fedjax_cfl, f"{line} vectorize=[seed] seed=0,1 devices=4", "both")
    same(lasting_rows("both/0"), rows)
    for name, array in last_arrays("both/0").items():
        np.testing.assert_allclose(
            array, last_arrays("whole")[name], rtol=2e-4, atol=2e-5, err_msg=name
        )
    assert lasting_rows("both/1") != rows

    if layer in UNSEEN:
        run(fedjax_cfl, below, "below")
        alone, over = last_arrays("below"), last_arrays("whole")
        assert alone.keys() <= over.keys()
        assert (alone.keys() == over.keys()) == (layer == "fine_tune"), "it keeps nothing"
        for name, array in alone.items():
            np.testing.assert_allclose(array, over[name], rtol=1e-6, atol=1e-7, err_msg=name)


STACKS = {
    "scaffold,ditto": "personal.ditto.lam=0.5",
    "feddyn,apfl": "personal.apfl.adaptive=true",
    "scaffold,moon,fine_tune": "personal.fine_tune.epochs=2",
    "moon,fedrep": "",
}


@pytest.mark.parametrize("stack", [next(iter(STACKS)), *map(nightly, [*STACKS][1:])])
def test_layers_on_layers_on_the_command_line(stack, fedjax_cfl):
    """A run that is cut off goes on to the same bits, with the rows of all layers."""
    line = f"algorithm=ifca algorithm.m=2 {LINE} model=mlp model.module.hidden=[6]"
    line = f"{line} personal=[{stack}] {STACKS[stack]} eval_auxiliary=false"
    run(fedjax_cfl, line, "whole")
    shutil.copytree("whole", "torn")
    cut_off(Path("torn"))
    assert "resuming after round 2\n" in run(fedjax_cfl, line, "torn")
    assert lasting_rows("torn") == lasting_rows("whole")
    np.testing.assert_equal(last_arrays("torn"), last_arrays("whole"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("personal=[scaffold,dito]", "personal=dito: unknown personal (did you mean 'ditto'?)"),
        ("personal=[ditto,ditto]", "personal=[ditto,ditto]: ditto is given twice; use it once"),
        ("personal=[scaffold,ditto] personal.ditto.lam=-1", "personal.ditto.lam=-1: must be"),
        ("personal=[scaffold,ditto] personal.lam=1", "personal.lam=1: unknown setting"),
        ("personal=[ditto,apfl]", "personal=[ditto,apfl]: both say which model a client is tested"),
    ],
)
def test_a_wrong_stack_is_refused_in_one_line(given, says, fedjax_cfl):
    status, _, err = fedjax_cfl(f"dataset.clients=12 clients_per_round=6 rounds=1 {given}")
    assert status == 2 and err.count("\n") == 1 and says in err, err


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "layer"), REFUSED)
def test_what_cannot_be_stacked_is_refused(method, layer, fedjax_cfl):
    line = f"algorithm={method} {METHODS[method]} {LINE} personal={layer} run_dir=run"
    status, _, err = fedjax_cfl(line)
    assert status == 2 and err.count("\n") == 1 and REFUSED[method, layer] in err
