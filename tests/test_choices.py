"""Every name that a setting of a method can have, and every file of conf/algorithm: the shapes of
a start and a round with it, of two step sizes as one program; every setting whose values can be one
program.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from conftest import nightly
from omegaconf import OmegaConf
from test_contract import ALGORITHMS, build

from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import resolve_target
from fedjax_cfl.validation import ARRAY, join_kinds, read_settings

__all__ = ["build"]
OFTEN = "fesem", "fielding", "ifca"  # of many settings
NEEDS_ANOTHER = {"ward"}  # which metric=L2 goes with


def list_other_names(method):
    """Yields (setting, name) for all but the defaults, which test_contract.py runs."""
    given = OmegaConf.to_container(OmegaConf.load(CONF / "algorithm" / f"{method}.yaml"))
    if "_target_" not in given:  # settings of another method
        return
    for setting, allowed in read_settings(resolve_target("algorithm", given["_target_"])).items():
        for name in join_kinds(allowed).options:
            if setting in given and name not in {given[setting], *NEEDS_ANOTHER}:
                yield setting, name


def list_together(method):
    """Yields what to set in one round after another, so that all other names come up."""
    names = {}
    for setting, name in list_other_names(method):
        names.setdefault(setting, []).append(name)
    for place in range(max(map(len, names.values()), default=0)):
        yield {setting: each[place] for setting, each in names.items() if place < len(each)}


def list_cases():
    """Yields every name, several settings at once and each alone, and in every run a first round
    of what test_contract.py does not run then.
    """
    for method in ALGORITHMS:
        together = list(list_together(method)) or [{}]
        for place, chosen in enumerate(together):
            marks = () if not place and method in OFTEN else pytest.mark.nightly
            id = "-".join([method, *chosen.values()])
            yield pytest.param(method, chosen, id=id, marks=marks)
        for setting, name in list_other_names(method):
            yield nightly(method, {setting: name}, id=f"{method}-{setting}-{name}")


def trace_two(build, method, given, setting):
    """Returns the shapes of a start, and of the state after a round, of two values of a setting as
    one program.
    """
    (make, _), _, data, _ = build(method, members=True, given=given)

    def run(value):
        algorithm, key = make(values={setting: value}), jax.random.key(0)
        begun = algorithm.init(key, data)
        return begun, algorithm.round(key, begun, data)[0]

    return jax.eval_shape(jax.vmap(run), jnp.array([0.1, 0.2]))


@pytest.mark.parametrize(("method", "chosen"), list(list_cases()))
def test_a_round_leaves_the_shapes_of_the_state(method, chosen, build):
    given = tuple(f"algorithm.{setting}={name}" for setting, name in chosen.items())
    begun, after = trace_two(build, method, given, "local.lr")
    shapes = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert shapes(begun) == shapes(after)


def list_grid_settings():
    """Yields (part, option, setting) for every number of a method that may be an array, and every
    one of a layer but that which FedALA asks for in Python.
    """
    for part in ("algorithm", "personal"):
        for path in sorted((CONF / part).glob("*.yaml")):
            given = OmegaConf.to_container(OmegaConf.load(path))
            target = given.get("_target_")
            known = read_settings(resolve_target(part, target)) if target else {}
            for name, each in known.items():
                arrays = any(kind.words == ARRAY for kind in each)
                several = arrays or (part == "personal" and name != "share")
                if several and isinstance(given.get(name), float):
                    marks = () if path.stem == "ditto" else pytest.mark.nightly
                    yield pytest.param(part, path.stem, f"{part}.{name}", marks=marks)


@pytest.mark.parametrize(("part", "option", "setting"), list(list_grid_settings()))
def test_values_of_a_grid_are_one_program(part, option, setting, build):
    """An option that does more with them than compute does not say that they may be arrays."""
    given = {"fedala": (), "moon": ("model=mlp",), "pfedme": ("personal.lam=1",)}.get(option, ())
    method = option if part == "algorithm" else "fedavg"
    layer = (f"personal={option}",) if part == "personal" else ()
    trace_two(build, method, (*layer, *given), setting)
