"""Every name that a setting of a method can have: the shapes of a start and a round with it."""

import functools

import hydra
import jax
import numpy as np
import pytest
from omegaconf import OmegaConf
from test_contract import ALGORITHMS, SETTINGS

import fedjax_cfl as cfl
from fedjax_cfl.cli import build as parts
from fedjax_cfl.cli.choices import CHOICES
from fedjax_cfl.cli.overrides import CONF, check_overrides

FACTORIES = {factory.__name__: tables for factory, tables in CHOICES.items()}


def list_other_names(method):
    """Yields (setting, name) for all but the defaults, which test_contract.py runs."""
    given = OmegaConf.load(CONF / "algorithm" / f"{method}.yaml")
    for setting, names in FACTORIES.get(method, {}).items():
        for name in names:
            if setting in given and name != OmegaConf.to_container(given)[setting]:
                yield setting, name


CASES = [(method, *each) for method in ALGORITHMS for each in list_other_names(method)]


@pytest.fixture(scope="module")
def compose(toy_pool, tmp_path_factory):
    """compose(overrides) -> (algorithm, data) on the toy."""
    path = tmp_path_factory.mktemp("toy") / "toy.npz"
    split = toy_pool.test.astype(int)
    np.savez(path, x=toy_pool.x, y=toy_pool.y, client=toy_pool.client, split=split)
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    settings.append(f"dataset.source.path={path}")

    def build(*overrides):
        algorithm, _, data, *_ = parts.build(check_overrides([*settings, *overrides]))
        return algorithm, data

    with (
        hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(cfl, "use_cpu_cores", lambda count=None: None)
        yield build


@pytest.mark.parametrize(("method", "setting", "name"), CASES)
def test_a_round_leaves_the_shapes_of_the_state(method, setting, name, compose):
    given = f"algorithm.{setting}={name}"
    algorithm, data = compose(f"algorithm={method}", given)
    key = jax.random.key(0)
    begun = jax.eval_shape(algorithm.init, key, data)
    after, _ = jax.eval_shape(algorithm.round, key, begun, data)
    shapes = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert shapes(begun) == shapes(after)
