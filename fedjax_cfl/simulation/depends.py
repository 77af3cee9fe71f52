"""What a function's results can depend on, read from its program without running it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Var


def find_influence(function: Callable[..., Any], *given: Any) -> Callable[[Any], bool]:
    """Returns a function that says of a tree `numbered`, see `number_leaves`, of some of the
    arguments' leaves, whether any result may depend on them.

    A loop, branch or inner function counts as one step, all of whose results depend on all that it
    gets: so "no" is certain, "yes" is not. Args: `given` are arrays or their shapes.
    """
    program = jax.make_jaxpr(function)(*given).jaxpr

    def influences(numbered: Any) -> bool:
        chosen = set(jax.tree.leaves(numbered))
        reached = {var for number, var in enumerate(program.invars) if number in chosen}
        for step in program.eqns:
            if any(isinstance(var, Var) and var in reached for var in step.invars):
                reached.update(step.outvars)
        return any(isinstance(var, Var) and var in reached for var in program.outvars)

    return influences


def number_leaves(tree: Any) -> Any:
    """Returns a tree of the numbers of its leaves, in their order."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))
