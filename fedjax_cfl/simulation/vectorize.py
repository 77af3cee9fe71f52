"""Several runs as one program: the members of a grid of keys and settings, mapped over
and stepped together.

A member is what it would be alone, up to rounding. Clients of all members train as one
cohort, see `members`; the rest of a round is mapped over keys, and inside them over the
values of settings.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl import sharding
from fedjax_cfl.data.drift import Drift, bound_client_samples
from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import make_mesh, replicate, replicated_sharding
from fedjax_cfl.simulation import evaluate, memory
from fedjax_cfl.simulation.compilation import (
    init_data_state,
    make_rounds_fn,
    parallel_compiler,
    state_shapes,
)
from fedjax_cfl.simulation.driver import (
    COUNTERS,
    TIMES,
    Result,
    Snapshot,
    check_plan,
    discards_accuracy,
    metrics_row,
    raise_if_nonfinite,
    update_counters,
)
from fedjax_cfl.types import ClientIndex, FederatedData, Task


def stack_data(data: Sequence[FederatedData]) -> FederatedData:
    """Stacks data sets [D, ...] of equally many clients; the smaller ones get samples
    that nobody holds. On the host.

    Raises InputError if clients, features or classes differ.
    """
    for name, of in (
        ("clients", lambda d: d.num_clients),
        ("features", lambda d: d.x.shape[1:]),
        ("classes", lambda d: d.num_classes),
    ):
        if len({of(one) for one in data}) > 1:
            raise InputError(
                f"vectorize: the seeds' data differ in their {name}"
                f" ({', '.join(str(of(one)) for one in data)})"
            )
    longest = {
        side: max(getattr(one, side).order.size for one in data) for side in ("train", "test")
    }
    capacity = max(one.max_client_samples for one in data)
    total, rows = sum(longest.values()), max(len(one.x) for one in data)
    indexed = any(one.sample is not None for one in data)

    def padded(one: FederatedData) -> FederatedData:
        held = one.y.size

        def fill(array, value, length=total):
            array = np.asarray(array)
            return np.concatenate(
                [array, np.full((length - len(array), *array.shape[1:]), value, array.dtype)]
            )

        def view(side: str, begin: int) -> ClientIndex:
            own = getattr(one, side)
            spare = np.arange(begin, begin + longest[side] - own.order.size, dtype=np.int32)
            return own.replace(order=np.concatenate([np.asarray(own.order), spare]))

        train = view("train", held)
        test = view("test", held + longest["train"] - one.train.order.size)
        return one.replace(
            x=fill(one.x, 0, rows if indexed else total),
            y=fill(one.y, 0),
            owner=fill(one.owner, -1),
            sample=fill(one.sample if one.sample is not None else np.arange(held), 0)
            if indexed
            else None,
            train=train,
            test=test,
            max_client_samples=capacity,
        )

    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(padded, data))


def crop(tree, shapes):
    """Returns the leading part of every array, of the given shapes: a member's own
    arrays without what `stack_data` added.
    """
    return jax.tree.map(lambda leaf, like: leaf[tuple(slice(n) for n in like.shape)], tree, shapes)


def run_members(
    build: Callable[[dict[str, jax.Array]], Any],
    task: Task,
    data: Sequence[FederatedData],
    keys: jax.Array,
    values: dict[str, Sequence[float]],
    *,
    rounds: int,
    eval_every: int = 1,
    drift: Drift | None = None,
    discard: str = "rounds",
    with_auxiliary: bool = True,
    mesh=None,
    start: Sequence[Snapshot] | None = None,
    on_start: Callable[[int, Callable[[], Snapshot]], None] = lambda member, snapshot: None,
    on_rows: Callable[
        [list[dict[str, Any]], list[Callable[[], Snapshot]]], bool | None
    ] = lambda rows, snapshots: None,
) -> list[Result]:
    """Runs a grid of runs; returns their results, key by key and inside a key in the
    order of the values.

    Args: `build(values)` -> Algorithm made with `Local(vmap_runs=True)`, given one
    member's values, scalars which may be traced; `data` one data set per key, or one
    for all; `keys` [D] typed keys; `values` name -> [H] values of a setting, several
    settings in step. Everything else as in `run`; `on_start` and `on_rows` get
    functions that return where a member stands. The members share the program's seconds
    evenly. Raises what `run` raises; InputError if the data sets do not fit together.
    """
    check_plan(rounds, eval_every, discard)
    mesh, drift = mesh or make_mesh(), drift or no_drift()
    points = max(map(len, values.values()), default=1)
    places = [(s, h) for s in range(keys.size) for h in range(points)]
    values = {name: jnp.asarray(each, jnp.float32) for name, each in values.items()}
    own = [bound_client_samples(one, drift) for one in data]
    held = stack_data(own) if len(own) > 1 else own[0]
    given = values, keys, replicate(held, mesh)
    lift = make_lift(points, len(own) > 1)
    began = time.perf_counter()
    shapes, begin, train, test = compile_members(
        build, drift, task, mesh, given, lift, min(eval_every, rounds), with_auxiliary
    )
    compile_s = (time.perf_counter() - began) / len(places)
    planned = memory.plan_memory(shapes[0], given[2], [begin, train, test])
    memory.check_memory(planned, mesh)
    state, data_state = begin(*given)
    if start:
        state, data_state = jax.device_put(
            restore_members((state, data_state), start, places), replicated_sharding(mesh)
        )
    counters = [
        one | {"compile_s": one["compile_s"] + compile_s}
        for one in ([s.counters for s in start] if start else [COUNTERS] * len(places))
    ]
    algorithm = build({name: each[0] for name, each in values.items()})
    alone = [
        state_shapes(algorithm, drift, mesh, own[s % len(own)], key)[1]
        for s, key in enumerate(keys)
    ]

    def snapshot(member: int) -> Snapshot:
        place = places[member]
        stands, moved = jax.tree.map(lambda leaf: leaf[place], (state, data_state))
        return Snapshot(stands, crop(moved, alone[place[0]]), counters[member])

    snapshots = [functools.partial(snapshot, member) for member in range(len(places))]
    for member, stands in enumerate(snapshots):
        on_start(member, stands)
    rows, table, done = [[] for _ in places], None, int(state.round[0, 0])
    groups = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), state.groups
    )
    while done < rounds:
        count = min(eval_every - done % eval_every, rounds - done)
        started = time.perf_counter()
        state, data_state, infos = jax.block_until_ready(
            train(*given, state, data_state, done, count)
        )
        trained = time.perf_counter()
        found, table = jax.block_until_ready(test(*given, state, data_state))
        ended = time.perf_counter()
        seconds = (trained - started) / len(places), (ended - trained) / len(places)
        fetched = jax.device_get(((state.round, state.traffic, state.clock_ms), infos, found))
        for member, place in enumerate(places):
            (round, sent, clock_ms), info, score = jax.tree.map(
                lambda leaf, place=place: leaf[place], fetched
            )
            info = jax.tree.map(lambda values, count=count: values[:count], info)
            stand = state.replace(round=round, traffic=sent, clock_ms=clock_ms, groups=groups)
            raise_if_nonfinite(algorithm, stand, info)
            row = metrics_row(stand, info, score, counters[member])
            if algorithm.clustered and discards_accuracy(
                discard, row, int(info.selected[0]), own[0].num_clients
            ):
                row["accuracy"] = None
            counters[member] = update_counters(counters[member], row, *seconds)
            rows[member].append(row)
        done += count
        if on_rows([each[-1] for each in rows], snapshots):
            break
    if table is None:
        _, table = test(*given, state, data_state)

    def result(member: int) -> Result:
        (s, _), stands, times = (
            places[member],
            snapshot(member),
            {name: counters[member][name] for name in TIMES},
        )
        clients = jax.tree.map(lambda leaf: leaf[places[member]], table)
        return Result(
            stands.state,
            stands.data_state.apply_to(own[s % len(own)]),
            rows[member],
            clients,
            times,
            planned,
        )

    return [result(member) for member in range(len(places))]


def compile_members(build, drift, task, mesh, given, lift, block: int, with_auxiliary: bool):
    """Returns the shapes of all members' state and moving data, and the compiled start,
    rounds and evaluation of all of them.
    """
    everywhere = replicated_sharding(mesh)

    def begin(values, key, data):
        return build(values).init(key, data), init_data_state(drift, key, data)

    def train(values, key, data, state, data_state, done, count):
        # one round number for all: mapped, a branch that is due in some rounds only would be
        # run in every round
        state = state.replace(round=lax.convert_element_type(done, state.round.dtype))
        return make_rounds_fn(build(values), drift, block)(key, state, data_state, data, count)

    def test(values, key, data, state, data_state):
        return evaluate.evaluate_all(
            build(values), task, mesh, state, data_state.apply_to(data), with_auxiliary
        )

    with parallel_compiler() as compiled:
        begin = jax.jit(lift(begin), out_shardings=everywhere).lower(*given)
        shapes = sharding.replicated_shapes(begin.out_info, mesh)
        begin = compiled(begin)
        train = compiled(
            jax.jit(lift(train, 2, 2), donate_argnums=(3, 4), out_shardings=everywhere).lower(
                *given, *shapes, 0, 1
            )
        )
        test = compiled(jax.jit(lift(test, 2), out_shardings=everywhere).lower(*given, *shapes))
        return shapes, begin.result(), train.result(), test.result()


def make_lift(points: int, several: bool):
    """Returns lift(f, carried, common): the map of f(values, key, data, *carried,
    *common) over keys and, inside, over `points` values.
    """

    def lift(function, carried: int = 0, common: int = 0):
        rest = (0,) * carried + (None,) * common
        inner = jax.vmap(function, in_axes=(0, None, None, *rest), axis_size=points)
        return jax.vmap(inner, in_axes=(None, 0, 0 if several else None, *rest))

    return lift


def restore_members(begun, start: Sequence[Snapshot], places: list[tuple[int, int]]):
    """Returns (state, moving data) [D, H, ...] of all members, with those of the
    snapshots written over their leading parts.
    """

    def write(base, *parts):
        base = np.array(base)
        for place, part in zip(places, parts, strict=True):
            base[(*place, *(slice(n) for n in part.shape))] = part
        return base

    return jax.tree.map(
        write,
        jax.device_get(begun),
        *jax.device_get([(stands.state, stands.data_state) for stands in start]),
    )
