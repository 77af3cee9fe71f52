"""The oracle of clustering: FedAvg within the true groups of the data, which no other method
knows. It has no paper; tables call it oracle, or known clusters.

It bounds what groups can give, and not what models of clients' own can (`personal=...` stands over
it as well). A client's group is `data.concept` from the start and in every round, also after its
data have changed, and costs nothing to know.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method, Round, Start
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import common_model, keep_groups
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.system import SystemLike, as_system
from fedjax_cfl.types import Algorithm, FederatedData, Key, Params, Report, Selection, State, Task
from fedjax_cfl.validation import PositiveInt, checked


@checked("algorithm")
def known_groups(task: Task, local: Local, system: SystemLike, *, m: PositiveInt) -> Algorithm:
    """FedAvg within the true groups, 0 .. m - 1; groups that the data do not have are not in use,
    and one that appears later begins with the mean of the models that its clients had.

    A client whose group is not known (-1) neither trains nor is served, also from the round in
    which its data become a mixture. As under other methods, one that has had no training samples
    yet is not served, either. A run raises InputError for data without known groups, and for
    more than m of them.
    """

    def start(key: Key, data: FederatedData) -> Start:
        group = true_groups(data, m)
        active = jnp.any(group[:, None] == jnp.arange(m), axis=0)
        return common_model(task, m)(key, data)._replace(assignment=group, active=active)

    def migrate(r: Round) -> tuple[State, Report]:
        state = r.state
        before, group = state.assignment, true_groups(r.data, m)
        moved = jnp.sum((before >= 0) & (group != before))
        state = found_groups(state, before, group)
        return state.replace(assignment=group), make_report(migrated=moved)

    system = as_system(system)
    system = system._replace(select=leave_out_unknown(system.select, m))
    method = Method(sgd(task, local), start=start, migrate=migrate, assign=keep_groups)
    return federated(task, local, system, method)._replace(check_data=partial(check_groups, m))


def found_groups(state: State, before: jax.Array, group: jax.Array) -> State:
    """Returns the state with a model for each group that appears: the mean of those that its
    clients, `group` [K] now, had in their groups `before` [K]; of clients without one it keeps its
    first.
    """
    numbers = jnp.arange(state.active.size)
    joins, left = group[:, None] == numbers, before[:, None] == numbers  # [K, m]
    share = joins.T.astype(jnp.float32) @ left  # [m, m], clients of each way
    new = joins.any(axis=0) & ~state.active
    share = jnp.where((new & (share.sum(1) > 0))[:, None], share, jnp.eye(numbers.size))
    share /= share.sum(1, keepdims=True)

    def move() -> Params:
        return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1), state.groups)

    groups = lax.cond(jnp.any(new), move, lambda: state.groups)
    return state.replace(groups=groups, active=state.active | new)


def true_groups(data: FederatedData, m: int) -> jax.Array:
    """Returns the true group [K] int32 of each client, -1 where it is not one of 0 .. m - 1."""
    return jnp.where(data.concept < m, data.concept, -1)


def leave_out_unknown(select: Selection, m: int) -> Selection:
    """Returns the selection with empty places for clients without a true group."""

    def known(key, memory, state: State, data: FederatedData) -> jax.Array:
        ids = select.select(key, memory, state, data)
        group = true_groups(data, m).at[ids].get(mode="fill", fill_value=-1)
        return jnp.where(group >= 0, ids, data.num_clients)

    return select._replace(select=known)


def check_groups(m: int, data: FederatedData) -> None:
    """Raises InputError for data without true groups, or with other ones than 0 .. m - 1."""
    known = int(np.max(np.asarray(data.concept))) + 1
    most = known if data.concepts is None else int(np.max(np.asarray(data.concepts))) + 1
    if known < 1:
        raise InputError(
            "algorithm=known_groups: the true groups of these data are not known, or a drift"
            " mixes them at once; use concept=rotate or permute_labels, a partition of groups,"
            " a file with concept, or another algorithm"
        )
    if most > m:
        raise InputError(f"algorithm.m={m}: the data have true groups up to {most - 1}; use {most}")
