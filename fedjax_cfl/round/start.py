"""Starts that methods share, see `method.StartFn`; whose samples they read; groups that stay."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from typing_extensions import TypeAliasType

from fedjax_cfl.client.local import Local
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, START, derive_key
from fedjax_cfl.method import Method, PrepareFn, Round, Start, StartFn
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.select import current_groups
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Bill, FederatedData, Key, Params, Report, ServedModels, State, Task

# (task, local, system, m) -> how a method starts
MakeStart = TypeAliasType("MakeStart", Callable[[Task, Local, SystemLike, int], StartFn])


class GroupCount(NamedTuple):
    """How many groups a method has: the first `used` of `size`. Programs of runs that differ in
    `used` alone are the same.
    """

    size: int
    used: ArrayLike  # [] int32

    @property
    def is_padded(self) -> bool:
        """Whether there may be groups that are not in use."""
        return not (isinstance(self.used, int) and self.used == self.size)

    @property
    def active(self) -> jax.Array:
        """[size] bool, the groups in use."""
        return jnp.arange(self.size) < self.used

    def serve(self, state: State) -> ServedModels:
        """Serves each client the model of its group. Models that are not in use are left out,
        unless `used` is an input of the program.
        """
        known = self.used if isinstance(self.used, int) else self.size
        return ServedModels(take_rows(state.groups, slice(known)), state.assignment)


def count_groups(m: ArrayLike, max_m: int | None) -> GroupCount:
    """Returns how many groups a method with the settings `m` and `max_m` has.

    Raises InputError where m is an array and `max_m` is not given, and where it is less than m.
    """
    if max_m is None:
        if not isinstance(m, int):
            raise InputError("algorithm.m: may be an array only with algorithm.max_m, their most")
        return GroupCount(m, m)
    if isinstance(m, int) and m > max_m:
        raise InputError(f"algorithm.max_m={max_m}: must be at least algorithm.m={m}")
    return GroupCount(max_m, m if isinstance(m, int) else jnp.asarray(m, jnp.int32))


def random_groups(task: Task, num_groups: int) -> StartFn:
    """Starts from `num_groups` independent random models, the first of them the same for any
    number.
    """

    def start(key: Key, data: FederatedData) -> Start:
        return Start(jax.vmap(task.init)(jax.random.split(key, num_groups)))

    return start


def common_model(task: Task, num_groups: int) -> StartFn:
    """Starts all groups from one random model: the first of `random_groups`, so that under one
    seed all such methods begin with the same.
    """

    def start(key: Key, data: FederatedData) -> Start:
        return Start(copy_model(task.init(jax.random.split(key, 1)[0]), num_groups))

    return start


def one_active_group(task: Task, num_groups: int, joined: bool = False) -> StartFn:
    """Starts from one random model in group 0; the other groups, copies of it, are not active
    yet. `joined`: all clients are in group 0, else in none.
    """

    def start(key: Key, data: FederatedData) -> Start:
        first = jnp.zeros(data.num_clients, jnp.int32) if joined else None
        begun, active = common_model(task, num_groups)(key, data), jnp.arange(num_groups) == 0
        return begun._replace(active=active, assignment=first)

    return start


def copy_model(model: Params, count: int) -> Params:
    """Returns `count` copies of one model, stacked [count, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), model)


def no_clients(key: Key, num_clients: int) -> jax.Array:
    """Returns no ids: the start reads no samples (a `StartClientsFn`)."""
    return jnp.zeros(0, jnp.int32)


def charge(bill: Callable[[Round], Bill]) -> PrepareFn:
    """Leaves the work as it is, and reports `bill`, (r) -> what the slots [S] send and infer."""
    return lambda r: (r.work, make_report(bill(r)))


def keep_groups(r: Round) -> tuple[jax.Array, Report]:
    """Leaves every client in its group; clients without one train group 0 (an `AssignFn`)."""
    return jnp.maximum(current_groups(r.state, r.cohort), 0), make_report()


def find_data_clients(
    method: Method, layers: tuple[Method, ...], draw: Callable[..., jax.Array] | None
) -> Callable[..., jax.Array] | None:
    """Returns `Algorithm.data_clients`: (key, round, size [K]) -> the clients whose samples that
    round reads; round None is the start, and `size` counts each client's training samples. Returns
    None if they are not known before the run, or if each test trains every client on its own.
    """
    start_clients = method.start_clients
    if start_clients is None or draw is None or any(layer.adapt for layer in layers):
        return None

    def data_clients(key: Key, round: ArrayLike | None, size: jax.Array) -> jax.Array:
        if round is None:
            return start_clients(derive_key(key, START), len(size))
        return draw(derive_key(key, SELECT, round), round, size)

    return data_clients
