"""Several runs as one program: the members of a grid of keys and settings, mapped over
and stepped together.

A member is what it would be alone, up to rounding. Clients of all members train as one
cohort, see `client.cohort`; the rest of a round is mapped over keys, and inside them over the
values of settings.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.padding import find_room, pad_data
from fedjax_cfl.data.prefetch import DeviceFeed
from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import replicate
from fedjax_cfl.simulation.program import (
    Program,
    check_data,
    check_plan,
    compile_functions,
    make_program,
)
from fedjax_cfl.simulation.rounds import Plan, make_functions, state_shapes
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.types import Algorithm, FederatedData, Task


def stack_data(data: Sequence[FederatedData]) -> FederatedData:
    """Stacks data sets [D, ...] of equally many clients; the smaller ones get samples
    that no client holds. On the host.

    Raises InputError if clients, features or classes differ.
    """
    for name, of in (
        ("clients", lambda d: d.num_clients),
        ("features", lambda d: d.x.shape[1:]),
        ("classes", lambda d: d.num_classes),
        ("turned images", lambda d: d.turns is not None),
        ("times", lambda d: d.time is not None),
    ):
        if len({of(one) for one in data}) > 1:
            raise InputError(
                f"vectorize: the seeds' data differ in their {name}"
                f" ({', '.join(str(of(one)) for one in data)})"
            )
    room = find_room(data)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(pad_data(one, room) for one in data))


def compile_members(
    build: Callable[[Mapping[str, jax.Array]], tuple[Algorithm, Drift]],
    setup: Setup,
    data: Sequence[FederatedData],
    keys: jax.Array,
    values: Mapping[str, Sequence[float]],
    plan: Plan,
) -> Program:
    """Compiles a grid of runs, key by key and inside a key in the order of the values.

    Args: `build(values)` -> (Algorithm made with `Execution(runs_as_one=True)`, Drift), given
    one member's values, scalars which may be traced; `setup` is that of any member; `data`
    one data set per key, or one for all; `keys` [D] typed keys; `values` name -> [H] values of
    a setting, several settings in step.
    Raises what `compile_run` raises; InputError if the data sets do not fit together.
    """
    check_plan(plan, data)
    _, task, _, drift, mesh, _ = setup
    points = max(map(len, values.values()), default=1)
    places = [(s, h) for s in range(keys.size) for h in range(points)]
    settings = {name: jnp.asarray(each, jnp.float32) for name, each in values.items()}
    algorithm, _ = build({name: each[0] for name, each in settings.items()})
    for one in data:
        check_data(algorithm, task, drift, one)
    own = [bound_client_samples(one, drift) for one in data]
    held = replicate(stack_data(own) if len(own) > 1 else own[0], mesh)
    lift = make_lift(points, len(own) > 1)
    functions = member_functions(build, task, mesh, plan)
    lifted = [lift(each, *axes) for each, axes in zip(functions, LIFTED, strict=True)]
    feed = DeviceFeed(held, plan.rounds, plan.eval_every)
    made = setup._replace(algorithm=algorithm)
    with explain_closures(list(settings)):
        compiled = compile_functions(lifted, made, (settings, keys), feed)
    alone = [
        state_shapes(Setup(algorithm, task, own[s % len(own)], drift, mesh), key)
        for s, key in enumerate(keys)
    ]
    data, shapes = [own[s % len(own)] for s, _ in places], [alone[s] for s, _ in places]
    return make_program(made, data, shapes, places, len(own) > 1, feed, compiled)


@contextlib.contextmanager
def explain_closures(settings: Sequence[str]) -> Iterator[None]:
    """Raises InputError in place of JAX's error where a function of one client closes over one of
    `settings`, whose values differ from run to run; see `over_clients`.
    """
    try:
        yield
    except AssertionError as error:
        # of `custom_vmap`, whose message is which of the constants are mapped
        mapped = error.args[0] if error.args else None
        if not isinstance(mapped, list | tuple) or True not in mapped:
            raise
        raise InputError(
            f"vectorize: a function of one client closes over one of {', '.join(settings)}; bind"
            " the value with jax.tree_util.Partial(function, value), or run the values one after"
            " another, without vectorize"
        ) from error


LIFTED = (0, 0), (2, 2), (2, 2)  # how many arguments after the data are mapped, and are not


def member_functions(
    build: Callable[..., tuple[Algorithm, Drift]], task: Task, mesh: Mesh, plan: Plan
) -> tuple[Callable, Callable, Callable]:
    """Returns the functions of one member, of its values, key and data: see
    `make_functions`.
    """
    block = min(plan.eval_every, plan.rounds)
    begin, train, test = make_functions(build, task, mesh, plan, block, on_host=False)

    def train_together(values, key, data, state, data_state, done, count):
        # one round number for all: mapped, a branch that is due in some rounds only would be
        # run in every round
        state = state.replace(round=lax.convert_element_type(done, state.round.dtype))
        return train(values, key, data, state, data_state, done, count)

    return begin, train_together, test


def make_lift(points: int, several: bool) -> Callable:
    """Returns lift(f, carried, common): the map of f(values, key, data, *carried,
    *common) over keys and, inside, over `points` values.
    """

    def lift(function, carried: int = 0, common: int = 0):
        rest = (0,) * carried + (None,) * common
        inner = jax.vmap(function, in_axes=(0, None, None, *rest), axis_size=points)
        return jax.vmap(inner, in_axes=(None, 0, 0 if several else None, *rest))

    return lift
