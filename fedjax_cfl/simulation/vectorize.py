"""Several runs as one program: the members of a grid of keys and settings, mapped over
and stepped together.

A member is what it would be alone, up to rounding. Clients of all members train as one
cohort, see `client.cohort`; the rest of a round is mapped over keys, and inside them over the
values of settings. Not every method can be mapped: see `NotMapped`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.padding import measure_room, merge_rooms, pad_data
from fedjax_cfl.data.prefetch import DeviceFeed
from fedjax_cfl.formatting import shorten
from fedjax_cfl.sharding import is_cpu, replicate
from fedjax_cfl.simulation.program import (
    Program,
    Source,
    check_data,
    check_plan,
    compile_functions,
    make_program,
    trace_programs,
)
from fedjax_cfl.simulation.rounds import Plan, Setup, make_functions, state_shapes
from fedjax_cfl.types import Algorithm, FederatedData, Task


class NotMapped(Exception):
    """Why runs cannot be one program. They can follow one another."""


def stack_data(data: Sequence[FederatedData]) -> FederatedData:
    """Stacks data sets [D, ...] of equally many clients; the smaller ones get samples
    that no client holds. On the host.

    Raises NotMapped if clients, features or classes differ.
    """
    for name, of in (
        ("clients", lambda d: d.num_clients),
        ("features", lambda d: d.x.shape[1:]),
        ("classes", lambda d: d.num_classes),
        ("turned images", lambda d: d.turns is not None),
        ("times", lambda d: d.time is not None),
    ):
        if len({of(one) for one in data}) > 1:
            counts = ", ".join(str(of(one)) for one in data)
            raise NotMapped(f"the seeds' data differ in their {name} ({counts})")
    room = merge_rooms([measure_room(one) for one in data])
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
    Raises what `compile_run` raises; NotMapped if they cannot be one program.
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
    source = Source(lifted, made, (settings, keys), feed)
    with explain_obstacles():
        for _, traced in trace_programs(source):  # what compiling finds again
            check_decompositions(traced, mesh)
        compiled = compile_functions(source)
    alone = [
        state_shapes(Setup(algorithm, task, own[s % len(own)], drift, mesh), key)
        for s, key in enumerate(keys)
    ]
    data, shapes = [own[s % len(own)] for s, _ in places], [alone[s] for s, _ in places]
    return make_program(made, data, shapes, places, len(own) > 1, feed, compiled)


@contextlib.contextmanager
def explain_obstacles() -> Iterator[None]:
    """Raises NotMapped in place of JAX's errors where a method cannot be mapped over runs: a
    function of one client closes over a setting whose values differ, see `over_clients`, Python
    asks for the number, or an operation has no rule for it.
    """
    try:
        yield
    except jax.errors.JAXTypeError as error:
        raise NotMapped("Python code asks for the number of a setting") from error
    except NotImplementedError as error:
        raise NotMapped(shorten(str(error))) from error
    except AssertionError as error:
        # of `custom_vmap`, whose message is which of the constants are mapped
        mapped = error.args[0] if error.args else None
        if not isinstance(mapped, list | tuple) or True not in mapped:
            raise
        raise NotMapped("a function of one client closes over a setting") from error


# LAPACK splits a batch of matrices over the threads of all CPU devices, see `decompose`
DECOMPOSITIONS = {"cholesky", "eig", "eigh", "geqrf", "lu", "qr", "schur", "svd", "tridiagonal"}


def check_decompositions(traced: jax.stages.Traced, mesh: Mesh) -> None:
    """Raises NotMapped for a program in which several CPU devices would decompose a batch of
    matrices, and could wait for one another for ever.
    """
    if is_cpu(mesh) and mesh.size > 1 and (names := list_batched(traced.jaxpr)):
        raise NotMapped(f"{names[0]} of a batch of matrices can hang on several CPU devices")


def list_batched(jaxpr: Jaxpr | ClosedJaxpr) -> list[str]:
    """Returns the names of the decompositions that a traced function applies to a batch."""
    names: list[str] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        ranks = [len(getattr(v.aval, "shape", ())) for v in equation.invars]
        if name in DECOMPOSITIONS and max(ranks) > 2:
            names.append(name)
        for inner in jax.tree.leaves(equation.params):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                names += list_batched(inner)
    return names


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
