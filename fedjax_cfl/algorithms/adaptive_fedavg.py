"""Canonaco, Bergamasco, Mongelluzzo, Roveri, "Adaptive Federated Learning in Presence of Concept
Drift", IJCNN 2021, https://doi.org/10.1109/IJCNN52387.2021.9533710.

FedAvg whose server picks the clients' step size by how the global model moves: with moving means of
the model, of its squared distance from that mean, and of the ratio of two such distances in turn.
The ratio rises when the model begins to move, as after a drift, and falls when it settles.

Differs from the paper: its body could not be read, so that the recursion is that of a public
rewrite, without a correction fed back into it; a ratio over less than `LEAST_SPREAD` counts as 1.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_cfl.client.local import Local, Work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import FinishFn, Method, Round
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import no_clients
from fedjax_cfl.system.reports import make_bill, make_report
from fedjax_cfl.system.system import SystemLike
from fedjax_cfl.tree import drop_statistics
from fedjax_cfl.types import Algorithm, FederatedData, Params, Report, State, Task
from fedjax_cfl.validation import BelowOne, checked

LEAST_SPREAD = 1e-12


class Movement(struct.PyTreeNode):
    """What the server remembers of how the model moves."""

    updates: jax.Array  # [] int32, t: rounds with an update
    mean: Params  # [1, ...] M, the moving mean of the model
    spread: jax.Array  # [] s, that of its mean squared distance from the mean before
    ratio: jax.Array  # [] q, that of the ratio of two spreads in turn
    scale: jax.Array  # [] step size of the next round, as a part of `local.lr`


@checked("algorithm")
def adaptive_fedavg(
    task: Task, local: Local, system: SystemLike, *, beta: BelowOne = 0.5, harmonic: bool = True
) -> Algorithm:
    """Adaptive-FedAvg.

    After update t clients train with `local.lr` times the corrected ratio q, and divided by t if
    `harmonic` (the paper's convergence analysis), but never with more than `local.lr`. They receive
    the step size, one word.

    `beta` weighs the past in all three moving means. Raises InputError for a value that is not
    allowed, and for a schedule of the step size.
    """
    if local.schedule is not None:
        raise InputError(
            "schedule: the server of Adaptive-FedAvg picks the step sizes itself; use constant"
        )
    method = Method(
        sgd(task, local),
        memory=start_still,
        prepare=scale_steps,
        finish=follow_model(beta, harmonic),
        start_clients=no_clients,
    )
    return federated(task, local, system, method)


def start_still(groups: Params, data: FederatedData) -> Movement:
    """Returns what is remembered of a model [1, ...] that has not moved."""
    zero, nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, drop_statistics(groups))
    return Movement(jnp.zeros((), jnp.int32), nothing, zero, zero, jnp.ones(()))


def scale_steps(r: Round) -> tuple[Work, Report]:
    """Gives the cohort the server's step size (a `PrepareFn`)."""
    work = r.work._replace(lr_scale=r.work.lr_scale * r.state.memory.scale)
    return work, make_report(make_bill(words_down=r.real))


def follow_model(beta: float, harmonic: bool) -> FinishFn:
    """Follows the global model where a round has changed it. The arguments are those of
    `adaptive_fedavg`.
    """

    def finish(r: Round) -> State:
        state = r.state
        moved = move_on(state.memory, drop_statistics(state.groups), beta, harmonic)
        used = jnp.any(r.upload.weight > 0)
        memory = jax.tree.map(lambda new, old: jnp.where(used, new, old), moved, state.memory)
        return state.replace(memory=memory)

    return finish


def move_on(memory: Movement, model: Params, beta: float, harmonic: bool) -> Movement:
    """Returns what is remembered once the server has the next `model` [1, ...]; `beta` and
    `harmonic` are those of `adaptive_fedavg`.
    """
    updates = memory.updates + 1

    def correct(value, count):  # of a moving mean that began at 0
        return value / jnp.maximum(1 - beta**count, 1e-30)

    past = jax.tree.map(lambda leaf: correct(leaf, memory.updates), memory.mean)
    mean = jax.tree.map(lambda old, new: beta * old + (1 - beta) * new, memory.mean, model)
    gaps = [jnp.sum(gap**2) for gap in jax.tree.leaves(jax.tree.map(jnp.subtract, model, past))]
    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    spread = beta * memory.spread + (1 - beta) * sum(gaps) / size
    now, last = correct(spread, updates), correct(memory.spread, memory.updates)
    known = (memory.updates > 0) & (last >= LEAST_SPREAD)
    turn = jnp.where(known, now / jnp.where(known, last, 1.0), 1.0)
    ratio = beta * memory.ratio + (1 - beta) * turn
    scale = correct(ratio, updates) / (updates if harmonic else 1)
    return Movement(updates, mean, spread, ratio, jnp.minimum(scale, 1.0))
