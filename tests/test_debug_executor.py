"""Every file of conf/algorithm in a Python loop, outside of `jit`: what a person sees who steps
through a method is what the compiled round computes.
"""

import copy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cfl.cli import build as parts
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import resolve_settings

ALGORITHMS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
SETTINGS = {
    "dataset": "npz",
    "partition": "by_user",
    "model": "mclr",
    "devices": 1,
    "clients_per_round": 4,
    "dataset.groups": 2,
    "dataset.alpha": 2,
    "local.epochs": 1,
    "local.batch_size": 10,
}
# searches, generators and networks of many steps
SHORTER = {
    "md_icfl": ("algorithm.search_steps=3",),
    "ifca_restarts": ("algorithm.restarts=2", "algorithm.restart_rounds=1"),
    "default": (),
}


@pytest.fixture(scope="module")
def source(toy_pool, tmp_path_factory) -> Path:
    """The toy data as a file."""
    path, split = tmp_path_factory.mktemp("toy") / "toy.npz", toy_pool.test.astype(int)
    known = np.arange(toy_pool.client.max() + 1) % 2  # true groups, for known_groups
    held = {"client": toy_pool.client, "split": split, "concept": known}
    np.savez(path, x=toy_pool.x, y=toy_pool.y, **held)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_python_loop_computes_what_the_compiled_round_does(name, source, monkeypatch):
    # JAX has started long ago
    monkeypatch.setattr("fedjax_cfl.cli.build.use_cpu_cores", lambda count=None: None)
    given = [f"{setting}={value}" for setting, value in SETTINGS.items()]
    given += [f"dataset.source.path={source}", f"algorithm={name}"]
    known = resolve_settings(given)["algorithm"]
    shorter = SHORTER.get(name, SHORTER["default"])
    shorter += ("algorithm.pretrain=iters:2",) if "pretrain" in known else ()
    config = resolve_settings([*given, *shorter])
    (setup, _), key = parts.build(config), jax.random.key(0)

    def play(executor: str):
        own = copy.deepcopy(config)
        own["local"]["executor"] = executor
        local = parts.build_local(own, setup.task, setup.data, setup.mesh)
        algorithm = parts.build_algorithm(own, setup.task, setup.data, local)
        if executor == "debug":
            with jax.disable_jit():
                return algorithm.round(key, algorithm.init(key, setup.data), setup.data)
        begin, go = jax.jit(algorithm.init), jax.jit(algorithm.round)
        return go(key, begin(key, setup.data), setup.data)

    found, want = jax.tree.leaves_with_path(play("debug")), jax.tree.leaves(play("sequential"))
    for (path, one), other in zip(found, want, strict=True):
        if not jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            text = jax.tree_util.keystr(path)
            if (name, text) == (
                "pacfl",
                "[0].rows['features'].points",
            ):  # singular vectors have no sign
                one, other = abs(one), abs(other)
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5, err_msg=text)
