"""Every name that a setting of a method can have: the shapes of a start and a round with it."""

import functools

import jax
import pytest
from omegaconf import OmegaConf
from test_contract import ALGORITHMS, build

from fedjax_cfl.cli.choices import CHOICES
from fedjax_cfl.cli.overrides import CONF

__all__ = ["build"]
FACTORIES = {factory.__name__: tables for factory, tables in CHOICES.items()}


def list_other_names(method):
    """Yields (setting, name) for all but the defaults, which test_contract.py runs."""
    given = OmegaConf.load(CONF / "algorithm" / f"{method}.yaml")
    for setting, names in FACTORIES.get(method, {}).items():
        for name in names:
            if setting in given and name != OmegaConf.to_container(given)[setting]:
                yield setting, name


CASES = [(method, *each) for method in ALGORITHMS for each in list_other_names(method)]


@pytest.mark.parametrize(("method", "setting", "name"), CASES)
def test_a_round_leaves_the_shapes_of_the_state(method, setting, name, build):
    algorithm, _, data, _ = build(method, given=(f"algorithm.{setting}={name}",))
    key = jax.random.key(0)
    begun = jax.eval_shape(algorithm.init, key, data)
    after, _ = jax.eval_shape(algorithm.round, key, begun, data)
    shapes = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert shapes(begun) == shapes(after)
