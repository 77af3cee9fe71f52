"""The mini-batch steps of one client: plain SGD, and what layers change of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fedjax_cfl.client.executor import Loop
from fedjax_cfl.client.local import Local, Training
from fedjax_cfl.client.objective import split
from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.tree import has_statistics, move_statistics
from fedjax_cfl.types import FederatedData, Params


class StepChange(struct.PyTreeNode):
    """What one layer changes of the steps of a client."""

    name: str = struct.field(pytree_node=False)  # of the layer, and of its rows
    # (step: `Step`, model of the group, row) -> (model, row) after the step, and, where it is not
    # the loss of the group's model that is reported, the summed loss of each mini-batch; None:
    # plain SGD
    step: Callable[..., tuple] | None = None
    # (objective, model received, row) -> the objective of the group's model; None: the same
    objective: Callable[..., Any] | None = None
    # (training, row, trained - received) -> the row after the last step; None: that of `step`
    keep: Callable[[Training, Any, Params], Any] | None = None
    # (row) -> [] int32, how many models predict each mini-batch that are not trained; None: none
    predictions: Callable[[Any], jax.Array] | None = None
    # True: its row is added to every gradient of the group's model
    corrects: bool = struct.field(pytree_node=False, default=False)
    # mini-batches in a step: a client takes as many steps fewer
    batches: int = struct.field(pytree_node=False, default=1)
    # gradients that a client takes for each mini-batch; None: as many as `step` asks for
    gradients: int | None = struct.field(pytree_node=False, default=None)


class Step:
    """One step of one client, which a layer's `step` reads. A model is a pytree of parameters."""

    number: jax.Array  # [] int32, from 0
    lr: Any  # [] float32, the client's step size in this round
    received: Params  # the model of its group that the client received
    extra: Any  # what the method's `prepare` computed for the client

    def __init__(
        self,
        training: Training,
        slope: Callable[[Params, int], tuple[jax.Array, Params]],
        number: jax.Array,
        model: Params,
        velocities: tuple[Params, Params] = ((), ()),
        directions: tuple[Params, ...] = (),
    ):
        """Begins step `number` from the group's `model`.

        Args: `slope` is (model, number of the mini-batch) -> (summed loss, gradient); `velocities`
        are those of the group's model and of the client's own; `directions` are added to gradients
        of the group's model.
        """
        self.number, self.lr = number, training.lr
        self.received, self.extra = training.start, training.client_extra
        self.gradients = 0  # how many were asked for
        self.velocities = velocities
        self._slope = slope
        self._training, self._model, self._directions = training, model, directions
        self._sgd: tuple[jax.Array, Params] | None = None  # the summed loss before, the model after
        self._taken: set[str] = set()  # of `follow` and `descend`, what was called

    @property
    def epoch(self) -> jax.Array:
        """The pass over the client's samples that this step is part of, [] int32."""
        training = self._training
        return training.plan.locate_batch(self.number, training.local.batch_size)[0]

    @property
    def last_epoch(self) -> jax.Array:
        """The pass that the client's last step is part of, [] int32."""
        return self._training.plan.last_epoch

    @property
    def size(self) -> jax.Array:
        """How many samples this step's mini-batch has, [] int32."""
        training = self._training
        _, real = training.plan.draw_samples(
            self.number, training.samples, training.local, training.table
        )
        return jnp.sum(real)

    def slope(self, model: Params, batch: int = 0) -> tuple[jax.Array, Params]:
        """Returns the summed loss [] of a model on this step's mini-batch, and `grad` of it."""
        self.gradients += 1
        return self._slope(model, batch)

    def move_statistics(self, after: Params, before: Params) -> Params:
        """Returns the model `after` a step with the running statistics that the model `before` it
        has once it has seen this step's mini-batch.
        """
        return move_statistics(after, before, self._slope(before, 0)[1])

    def grad(self, model: Params, batch: int = 0) -> Params:
        """Returns the gradient of the mean loss of a model on this step's mini-batch, which counts
        as a step of the client. `batch` is the number of the mini-batch where there are several.
        """
        return self.slope(model, batch)[1]

    @property
    def sgd(self) -> Params:
        """The model of the group after this step of SGD."""
        if self._sgd is None:
            total, gradient = self.slope(self._model, 0)
            self._sgd = total, self.follow(gradient)
        return self._sgd[1]

    @property
    def loss(self) -> jax.Array:
        """The summed loss [] of the group's model on this step's mini-batch, before the step."""
        return self._sgd[0] if self._sgd else self._slope(self._model, 0)[0]

    def follow(self, gradient: Params) -> Params:
        """Returns the model of the group after a step of SGD along `gradient`, with the client's
        momentum, weight decay and corrections. Raises InputError where it or `sgd` was called.
        """
        self._take_once("follow")
        for direction in self._directions:
            gradient = jax.tree.map(jnp.add, gradient, direction)
        velocity, own = self.velocities
        model, velocity = take_step(self._training, self._model, velocity, gradient)
        self.velocities = velocity, own
        return model

    def descend(self, model: Params, gradient: Params) -> Params:
        """Returns a model of the client's own after a step of SGD along `gradient`, with the
        client's momentum and weight decay. Raises InputError where it is called again.
        """
        self._take_once("descend")
        velocity, own = self.velocities
        if not jax.tree.leaves(own):
            own = no_velocity(self._training.local, model)
        model, own = take_step(self._training, model, own, gradient)
        self.velocities = velocity, own
        return model

    @property
    def is_followed(self) -> bool:
        """Whether the group's model has taken its step of SGD, by `sgd` or `follow`."""
        return "follow" in self._taken

    def _take_once(self, name: str) -> None:
        if name in self._taken:
            used = "c.sgd or c.follow" if name == "follow" else "c.descend"
            raise InputError(f"step: takes {used} twice; a step of SGD is taken once")
        self._taken.add(name)


def direct_loop(
    training: Training, data: FederatedData, changes: tuple[StepChange, ...] = ()
) -> Loop:
    """Returns the steps of one client, SGD for any model, as layers change them. The result of the
    loop is (trained - received, loss sums [2] of the first and the last epoch, new rows by layer).

    Args: at most one of `changes` has a `step`; `training.rows` has the row of each layer.
    """
    training, stepping = change_objective(training, changes), find_step(training, changes)
    start, plan, batches = training.start, training.plan, stepping.batches
    take = make_take(training, data, changes)

    def body(number, carry):
        model, row, velocities, losses = carry
        model, row, velocities, totals = take(number, model, row, velocities)
        for batch, total in enumerate(totals):
            known = number * batches + batch < plan.steps  # else the mini-batch is one of the first
            total = jnp.where(known, total, 0.0) if batches > 1 else total
            at = locate_batch(training, number, batch, batches)
            losses = plan.add_loss(at, losses, total)
        return model, row, velocities, losses

    def end(carry):
        model, row, _, losses = carry
        delta = jax.tree.map(jnp.subtract, model, start)
        return delta, jnp.stack(losses), new_rows(training, changes, {stepping.name: row}, delta)

    row = training.rows.get(stepping.name, ())
    velocities = no_velocity(training.local, start), ()
    if training.local.momentum:  # that of the client's own model is as large as the step says
        shapes = jax.eval_shape(lambda: take(jnp.int32(0), start, row, velocities)[2])
        velocities = velocities[0], jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[1])
    begin = start, row, velocities, (jnp.zeros(()), jnp.zeros(()))
    return Loop(lax.div(plan.steps + batches - 1, batches), begin, body, end)


def find_step(training: Training, changes: tuple[StepChange, ...]) -> StepChange:
    """Returns the one of `changes` that says what a step is, or plain SGD."""
    accumulates = not changes and can_accumulate(training)
    plain = StepChange("", step=accumulate if accumulates else plain_step)
    return next((change for change in changes if change.step), plain)


def locate_batch(training: Training, number: jax.Array, batch: int, batches: int) -> jax.Array:
    """Returns the number of a mini-batch of step `number`, which has several of them; after the
    last one come the first.
    """
    at = number * batches + batch
    return lax.rem(at, jnp.maximum(training.plan.steps, 1)) if batches > 1 else at


def make_take(
    training: Training, data: FederatedData, changes: tuple[StepChange, ...]
) -> Callable[..., tuple]:
    """Returns (number, model, row, velocities, calls) -> (model, row, velocities, summed losses of
    the mini-batches) after a step. To the list `calls` it adds an entry for each gradient.
    """
    stepping, loss_of_step = find_step(training, changes), batch_losses(training, data)
    directions = tuple(training.rows[change.name] for change in changes if change.corrects)
    accumulates, advance = stepping.step is accumulate, stepping.step
    assert advance is not None

    def take(number, model, row, velocities, calls=None):
        at = [locate_batch(training, number, n, stepping.batches) for n in range(stepping.batches)]
        slope = make_slope(list(map(loss_of_step, at)), -training.lr if accumulates else None)
        step = Step(training, slope, number, model, velocities, directions)
        model, row, *totals = advance(step, model, row)
        if directions and not step.is_followed:
            correcting = next(change.name for change in changes if change.corrects)
            raise InputError(
                f"personal: {stepping.name} moves its group's model by itself, not by c.sgd or"
                f" c.follow, so that {correcting} cannot correct it; use one of the two"
            )
        if calls is not None:
            calls += range(step.gradients)
        return model, row, step.velocities, totals or [step.loss]

    return take


def count_gradients(
    training: Training, data: FederatedData, changes: tuple[StepChange, ...]
) -> int:
    """Returns how many gradients a client takes for each mini-batch: 1, or more where it also
    trains a model of its own.
    """
    training, stepping = change_objective(training, changes), find_step(training, changes)
    if stepping.gradients is not None:
        return stepping.gradients
    calls: list[int] = []
    take, row = make_take(training, data, changes), training.rows.get(stepping.name, ())
    velocities = no_velocity(training.local, training.start), ()
    jax.eval_shape(lambda: take(jnp.int32(0), training.start, row, velocities, calls)[:2])
    return max(len(calls) // stepping.batches, 1)


def change_objective(training: Training, changes: tuple[StepChange, ...]) -> Training:
    """Returns the training with the objective that layers make of the client's."""
    for change in changes:
        if change.objective is not None:
            row = training.rows[change.name]
            objective = change.objective(training.objective, training.start, row)
            training = training._replace(objective=objective)
    return training


def make_slope(losses: list[Callable[..., Any]], factor: Any) -> Callable[..., Any]:
    """Returns (model, number of a mini-batch) -> (summed loss, gradient of the mean loss, times
    `factor` unless None). `losses` are those of `batch_losses`, for each mini-batch of a step.
    """

    def slope(params: Params, batch: int = 0) -> tuple[jax.Array, Params]:
        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            mean, total = losses[batch](params)
            return mean if factor is None else factor * mean, total

        (_, total), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return total, gradient

    return slope


def new_rows(
    training: Training, changes: tuple[StepChange, ...], stepped: dict[str, Any], delta: Params
) -> dict[str, Any]:
    """Returns by layer the row of a client after its last step.

    Args: `stepped` has the row that the steps have made, by layer; `delta` is trained - received.
    """
    rows = training.rows
    kept = {change.name: rows[change.name] for change in changes if change.name in rows}
    kept |= {name: row for name, row in stepped.items() if name in kept}
    return kept | {
        change.name: change.keep(training, kept[change.name], delta)
        for change in changes
        if change.keep is not None
    }


def can_accumulate(training: Training) -> bool:
    """Returns whether a GPU can add the gradient of -lr times the loss to a kernel within its own
    product. On a CPU that is a fifth slower.
    """
    local, (_, penalty) = training.local, split(training.objective)
    plain = not (penalty or local.momentum or local.weight_decay or has_statistics(training.start))
    return plain and local.execution.executor == "lanes"


def accumulate(step: Step, model: Params, row: Any) -> tuple[Params, Any, jax.Array]:
    """Returns what `plain_step` does, and the loss, of slopes of -lr times the loss."""
    total, change = step.slope(model, 0)
    return jax.tree.map(jnp.add, model, change), row, total


def plain_step(step: Step, model: Params, row: Any) -> tuple[Params, Any]:
    """Returns the group's model after a step of SGD, and the row as it is."""
    return step.sgd, row


def batch_losses(training: Training, data: FederatedData) -> Callable[..., Any]:
    """Returns f(step) -> g(params) -> (mean objective, summed objective without penalties) on the
    mini-batch of that step of one client.
    """
    plan, start, extra = training.plan, training.start, training.client_extra
    each_loss, penalty = split(training.objective)

    def of_step(s):
        places, real = plan.draw_samples(s, training.samples, training.local, training.table)
        x, y = gather(data, data.train.order[training.first + places])
        owner = jnp.where(real, training.client, -1)
        noise = jax.random.fold_in(training.key, s)

        def batch_loss(params):
            each = each_loss(params, start, extra, x, y, noise, owner)
            if training.weights is not None:
                each = training.weights[places] * each
            total = jnp.sum(jnp.where(owner >= 0, each, 0.0))
            mean = total / jnp.sum(owner >= 0)
            return mean + penalty(params, start, extra) if penalty else mean, total

        return batch_loss

    return of_step


def no_velocity(local: Local, params: Params) -> Params:
    """Returns the velocity before a client's first step; () without momentum."""
    return jax.tree.map(jnp.zeros_like, params) if local.momentum else ()


def take_step(
    training: Training, params: Params, velocity: Params, gradient: Params
) -> tuple[Params, Params]:
    """Returns (params, velocity) after a step of SGD, with momentum and weight decay."""
    local, direction = training.local, gradient
    if local.weight_decay:
        direction = jax.tree.map(lambda g, p: g + local.weight_decay * p, direction, params)
    if local.momentum:
        direction = velocity = jax.tree.map(
            lambda v, g: local.momentum * v + g, velocity, direction
        )
    moved = jax.tree.map(lambda p, d: p - training.lr * d, params, direction)
    return move_statistics(moved, params, gradient), velocity
