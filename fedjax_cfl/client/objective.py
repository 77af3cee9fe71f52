"""What a client minimises, and losses of models on its samples.

An Objective is called as (params, start, client_extra, x [B, ...], y [B], key, owner [B]) -> [B].
`owner` is as in `Task`, `start` is the model the client received, `client_extra` what
`prepare` computed for it. The same function serves gradient and metric. Any function of
these arguments can be used. An Objective also says which part of it depends on the model alone:
so SGD need not read the whole model for the loss that it reports, and training has a form in
sample space (`dual_sgd`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from fedjax_cfl.client.cohort import mean_over_samples, pass_over_samples
from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.tree import drop_statistics
from fedjax_cfl.types import FederatedData, Key, Params, Task
from fedjax_cfl.validation import is_number

ObjectiveFn = Callable[..., jax.Array]  # (params, start, client_extra, x, y, key, owner) -> [B]
PenaltyFn = Callable[..., ArrayLike]  # (params, start, client_extra) -> []


def pull_back(mu: float | jax.Array, params: Params, start: Params) -> float | jax.Array:
    """Returns mu / 2 * ||params - start||^2, []."""
    squares = jax.tree.map(
        lambda p, s: jnp.sum((p - s) ** 2), drop_statistics(params), drop_statistics(start)
    )
    return 0.5 * mu * jax.tree.reduce(jnp.add, squares)


class Objective(struct.PyTreeNode):
    """A loss of samples, L2, and a pull back to the received model."""

    # (params, x [B, ...], y [B], key, owner [B]) -> [B], without L2
    loss: Callable[..., jax.Array] = struct.field(pytree_node=False)
    # (params) -> [], the L2 penalty; None: there is none
    l2: Callable[[Params], ArrayLike] | None = struct.field(pytree_node=False, default=None)
    mu: float | jax.Array | None = None  # [] weight of the proximal term; None: there is none
    # (client_extra) -> mu, where clients differ
    mu_of: Callable[[Any], jax.Array] | None = struct.field(pytree_node=False, default=None)
    # (client_extra) -> model that the proximal term pulls to; None: to the received one
    center: Callable[[Any], Params] | None = struct.field(pytree_node=False, default=None)
    # (client_extra) -> direction, a pytree like params, that is added to every gradient by the
    # linear term <direction, params - start> (FedDANE), which has no sample-space form; None: none
    direction: Callable[[Any], Params] | None = struct.field(pytree_node=False, default=None)

    def weight(self, client_extra: Any) -> float | jax.Array | None:
        """Returns the weight [] of a client's proximal term; None if there is no such term."""
        return self.mu_of(client_extra) if self.mu_of else self.mu

    def penalty(self, params: Params, start: Params, client_extra: Any) -> ArrayLike:
        """Returns what depends on the model alone, []: L2, the proximal and the linear term."""
        total, mu = self.l2(params) if self.l2 else 0.0, self.weight(client_extra)
        if mu is not None:
            center = self.center(client_extra) if self.center else start
            total = total + pull_back(mu, params, center)
        if self.direction:
            total = total + project(self.direction(client_extra), params, start)
        return total

    def __call__(
        self,
        params: Params,
        start: Params,
        client_extra: Any,
        x: jax.Array,
        y: jax.Array,
        key: Key | None,
        owner: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the objective [B] of each sample; each one has the whole penalty."""
        return self.loss(params, x, y, key, owner) + self.penalty(params, start, client_extra)


def erm(task: Task) -> Objective:
    """Returns the empirical risk: the loss of the task."""
    return Objective(task.sample_loss or task.loss, task.penalty)


def find_objective(solve: Any) -> Any:
    """Returns what a client minimises that trains by `solve`, of `sgd` or `change_steps`."""
    return solve.args[1]


def split(objective: ObjectiveFn) -> tuple[ObjectiveFn, PenaltyFn | None]:
    """Returns the two parts of an objective: what depends on samples, a function as the
    objective itself, and the penalty, (params, start, client_extra) -> [], None if there is none.
    A function that is no Objective is taken to depend on samples.
    """
    if not isinstance(objective, Objective):
        return objective, None

    def each(params, start, client_extra, x, y, key, owner):
        return objective.loss(params, x, y, key, owner)

    parts = objective.l2, objective.mu, objective.mu_of, objective.direction
    return each, None if all(part is None for part in parts) else objective.penalty


def proximal(
    mu: float | jax.Array | Callable[[Any], jax.Array],
    objective: Objective,
    center: Callable[[Any], Params] | None = None,
) -> Objective:
    """Adds mu / 2 * ||params - start||^2 to every sample, that is mu * (params - start) to
    every gradient (FedProx, eq. 2). With `center`, a function of the client's `client_extra`, the
    term pulls to that model instead of `start`.

    `mu` is a number, or a function of the client's `client_extra`. A plain 0 adds no
    term, and costs nothing.
    """
    if callable(mu):
        return objective.replace(mu_of=mu, center=center)
    if is_number(mu) and mu == 0:
        return objective
    return objective.replace(mu=mu, center=center)


def check_pull(name: str, weight: float | jax.Array, lr: float | jax.Array) -> None:
    """Raises InputError for a step size of 1 / weight or more: steps of that size turn back from
    the model that a term of this `weight` pulls to. `name` is that of the setting; values that are
    traced are not looked at.
    """
    if is_number(weight) and is_number(lr) and lr * weight >= 1:
        raise InputError(
            f"{name}={weight}: times local.lr={lr} it is {lr * weight:g}, and must be below 1; use"
            " a smaller one of the two"
        )


def project(direction: Params, params: Params, start: Params) -> jax.Array:
    """Returns <direction, params - start>, []."""
    terms = jax.tree.map(
        lambda d, p, s: jnp.sum(d * (p - s)),
        *(drop_statistics(tree) for tree in (direction, params, start)),
    )
    return jax.tree.reduce(jnp.add, terms)


def find_selection_layer(local: Local) -> Method | None:
    """Returns the layer with which clients choose a group by models that have parts of their own;
    None: they choose by the models of groups as they are.
    """
    return next((part for part in local.layers if part.selection_model is not None), None)


def check_selection_model(local: Local, name: str) -> None:
    """Raises InputError where clients choose by models that have parts of their own: `name` tests
    the models of groups as they are.
    """
    if find_selection_layer(local) is not None:
        raise InputError(
            f"personal.judge=own: {name} tests the models of groups as they are; use template"
        )


def training_loss(
    task: Task, with_l2: bool = False, local: Local | None = None
) -> Callable[..., Loop]:
    """Returns a function of one client: the mean loss [m] of each model over the client's
    whole training set.

    It is (client, data, models [m, ...], rows) -> a Loop with the result [m], for `over_clients`.
    The loss is `Targets.loss_value` without dropout; `with_l2` adds the model's L2 penalty, as the
    FlexCFL code does (D10). A layer of `local` may say that a client puts parts of its own, from
    its `rows` by layer, into the models.
    """
    own = None if local is None else find_selection_layer(local)

    def sample_loss(model, x, y, owner):
        if with_l2:
            return task.loss(model, x, y, None, owner)
        return task.targets.loss_value(task.predict(model, x, owner), y)

    def client_loss(client, data: FederatedData, models, client_inputs):
        if own is not None and own.selection_model is not None:
            models = jax.vmap(own.selection_model, (None, 0))(client_inputs[own.name], models)

        def add(total, x, y, owner, number):
            each = jax.vmap(sample_loss, in_axes=(0, None, None, None))(models, x, y, owner)
            return total + jnp.sum(jnp.where(owner >= 0, each, 0.0), axis=1)

        zeros = jnp.zeros(len(jax.tree.leaves(models)[0]))
        return pass_over_samples(client, data, zeros, add, mean_over_samples)

    return client_loss
