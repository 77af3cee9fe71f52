"""What one client does in a round: mini-batch SGD, or one gradient.

`cohort.over_clients` applies it to a cohort.
"""

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_cfl.client import dual_sgd
from fedjax_cfl.client.cohort import (
    ClientFn,
    CostFn,
    client_range,
    cost_by_samples,
    make_int_array,
    pass_over_samples,
)
from fedjax_cfl.client.executor import Cases, Loop, Program, map_result, zip_loops
from fedjax_cfl.client.local import Local, Training, Work, plan_steps
from fedjax_cfl.client.objective import Objective, ObjectiveFn, erm, split
from fedjax_cfl.client.steps import StepChange, count_gradients, direct_loop
from fedjax_cfl.errors import InputError
from fedjax_cfl.tree import move_statistics, take_rows
from fedjax_cfl.types import FederatedData, Key, Params, Task, Upload


def sgd(task: Task, local: Local, objective: ObjectiveFn | None = None) -> ClientFn:
    """Trains one client by mini-batch SGD from the model of its group (FedAvg's
    ClientUpdate; FlexCFL, Algorithm 1).

    A client runs `local.epochs` reshuffled epochs, or `local.steps` mini-batch steps that
    cycle through reshuffled epochs. `objective` is the loss of the task unless given.
    Raises InputError for settings that are not allowed, and if `local.execution.first_layer` is
    dual and there is no sample-space form.
    """
    objective = objective or erm(task)
    if local.execution.first_layer == "dual" and not dual_sgd.has_dual_form(task, objective):
        raise InputError(
            "local.first_layer=dual: the model's first layer is not dense, or the objective is not"
            " plain; use auto or direct"
        )

    return Partial(LocalSGD(local, partial(choose_loop, task)), (), as_pytree(objective), local.lr)


class LocalSGD:
    """Trains one client by mini-batch steps from the model of its group: a `ClientFn`, once what
    layers change of its steps, its objective and its step size are bound.
    """

    def __init__(self, local: Local, make_loop: Callable[[Training, FederatedData], Program]):
        """`make_loop` makes the program of one client whose steps no layer changes."""
        self.local, self.make_loop = local, make_loop

    def __call__(self, changes, objective, lr, client, data, shared, work: Work) -> Program:
        local, (key, models) = self.local, shared
        key = jax.random.fold_in(key, client)
        start = take_rows(models, work.group)
        count, first = client_range(client, data)
        plan = plan_steps(local, count, work.step_fraction, jax.random.bits(key, (2,)))
        # written here, before the choice of a loop: else each of the loops would compile it
        table = plan.make_table(count, local, data.max_client_samples)
        training = Training(
            local=local,
            lr=lr * work.lr_scale,
            objective=objective,
            start=start,
            client_extra=work.client_extra,
            rows=work.rows,
            client=client,
            samples=count,
            first=first,
            key=key,
            plan=plan,
            table=table,
        )

        def upload(found: tuple[Params, jax.Array, Any]) -> Upload:
            delta, losses, rows = found
            losses = losses / jnp.maximum(plan.count_samples(count, local.batch_size), 1)
            first_loss, last_loss = losses + add_penalties(training, delta)
            return Upload(
                delta=delta,
                weight=count.astype(jnp.float32),
                loss=first_loss,
                last_loss=last_loss,
                steps=plan.steps * gradients,
                start_group=jnp.where(count > 0, work.group, 0),
                rows=rows,
                model_steps=plan.steps,
                inferred=plan.steps * local.batch_size * sum(predictions) if predictions else None,
            )

        gradients = 1
        asked = (change for change in changes if change.predictions)
        predictions = [change.predictions(work.rows[change.name]) for change in asked]
        if changes:
            gradients = count_gradients(training, data, changes)
            return map_result(direct_loop(training, data, changes), upload)
        return map_result(self.make_loop(training, data), upload)


def train_from(
    model: Params, solve: ClientFn, client: jax.Array, data: FederatedData, key: Key, work: Work
) -> Program:
    """Returns the program of `solve` that trains ONE client from `model` in place of its group's.

    Args: `model` is what it trains from; `key` is the round's; the others are those of a
    `ClientFn`.
    """
    start = jax.tree.map(lambda leaf: leaf[None], model)
    alone = work._replace(group=jnp.zeros_like(work.group))

    def relate(upload: Upload) -> Upload:
        return upload.replace(start_group=jnp.where(upload.weight > 0, work.group, 0))

    return map_result(solve(client, data, (key, start), alone), relate)


class ClientInputs(NamedTuple):
    """What ONE client has when it begins to train: the arguments of a `ClientFn`."""

    client: jax.Array  # [] int32
    data: FederatedData
    key: Key  # the round's
    models: Params  # [m, ...]
    work: Work

    @property
    def model(self) -> Params:
        """The model of the client's group."""
        return take_rows(self.models, self.work.group)


def change_training(
    solve: ClientFn,
    end: Callable[[ClientInputs, Any, Upload], Any],
    begin: Callable[[ClientInputs], tuple[Any, Work]] | None = None,
) -> ClientFn:
    """Returns `solve` with another result, or from another model.

    Args: `end` is (inputs, the model that `begin` gave, upload) -> what is returned for the client;
    `begin` is (inputs) -> (model to train from, None: its group's; work), None: with its work from
    its group's.
    """

    def run(solve, end, begin, client, data, shared, work) -> Program:
        inputs = ClientInputs(client, data, shared[0], shared[1], work)
        model, changed = begin(inputs) if begin else (None, work)
        if model is None:
            program = solve(client, data, shared, changed)
        else:
            program = train_from(model, solve, client, data, inputs.key, changed)
        return map_result(program, partial(end, inputs, model))

    return Partial(run, as_pytree(solve), as_pytree(end), begin and as_pytree(begin))


def train_both(
    solve: ClientFn,
    other: ClientFn,
    begin: Callable[[ClientInputs], tuple[Params, Work]],
    end: Callable[[ClientInputs, Upload, Upload], Upload],
) -> ClientFn:
    """Returns what trains the model of a client's group by `solve` and, step by step beside it,
    another model by `other`, whose steps count, too.

    Args: `other` never trains in sample space, see `own_local`; `begin` is (inputs) -> (the other
    model, its work); `end` is (inputs, upload, upload of the other model) -> upload.
    """

    def run(solve, other, begin, end, client, data, shared, work) -> Program:
        inputs = ClientInputs(client, data, shared[0], shared[1], work)
        model, changed = begin(inputs)
        second = train_from(model, other, client, data, inputs.key, changed)
        assert isinstance(second, Loop)

        def join(found: tuple[Upload, Upload]) -> Upload:
            upload, beside = found
            return end(inputs, upload.replace(steps=upload.steps + beside.steps), beside)

        return map_result(zip_loops(solve(client, data, shared, work), second), join)

    return Partial(run, *map(as_pytree, (solve, other, begin, end)))


def own_local(local: Local, epochs: int | None = None) -> Local:
    """Returns how a client trains a model of its own: `epochs` passes, None: as its group's; never
    in sample space, for which the steps of two models cannot be taken one by one.
    """
    direct = local.replace(execution=local.execution._replace(first_layer="direct"))
    return direct if epochs is None else direct.replace(epochs=epochs, steps=None)


def add_change(solve: ClientFn, change: StepChange) -> ClientFn:
    """Returns `solve` with its steps changed, on the same mini-batches. Raises InputError where it
    is no plain SGD, and where another layer changes the step already.
    """
    if not (isinstance(solve, Partial) and isinstance(solve.func, LocalSGD)):
        raise InputError(
            f"personal={option_of(change.name)}: changes the steps of the clients' SGD, but clients"
            " of this method, or with the layers before it, train in another way; name it first, or"
            " use personal=ditto, or another algorithm"
        )
    before, *rest = solve.args
    other = next((old.name for old in before if old.step and change.step), None)
    if other is not None:
        raise InputError(
            f"personal=[{option_of(other)},{option_of(change.name)}]: both say what a step of a"
            " client is; use one of the two"
        )
    functions = {
        name: as_pytree(function)
        for name in ("step", "objective", "keep", "predictions")
        if (function := getattr(change, name)) is not None
    }
    return Partial(solve.func, (*before, change.replace(**functions)), *rest)


def option_of(layer: str) -> str:
    """Returns the name of a layer as the command line has it."""
    return layer.lower().replace("-", "_")


def choose_loop(task: Task, training: Training, data: FederatedData) -> Program:
    """Returns the training of one client: in sample space, of one of a few sizes, or directly.

    Its result is that of `direct_loop`.
    """
    capacity = data.max_client_samples
    sizes = dual_sgd.dual_sizes(task, training.objective, training.local, capacity)
    cases: list[Callable[[], Loop]] = [
        lambda size=size: dual_sgd.dual_loop(task, training, data, size) for size in sizes
    ]
    if not sizes or sizes[-1] < capacity:
        cases.append(lambda: direct_loop(training, data))
    if len(cases) == 1:
        return cases[0]()
    bounds = sizes[: len(cases) - 1]  # the last case takes all larger clients
    return Cases(jnp.sum(training.samples > make_int_array(bounds)).astype(jnp.int32), cases)


def add_penalties(training: Training, delta: Params) -> jax.Array:
    """Returns the penalties [2] to add to the reported losses: that of the received model, and that
    of the trained one if the last epoch is not the first. They are added once, here, so that no
    step reads the whole model for them.
    """
    _, penalty = split(training.objective)
    if penalty is None:
        return jnp.zeros(2)
    start, plan = training.start, training.plan
    models = start, jax.tree.map(jnp.add, start, delta)
    first, last = (penalty(model, start, training.client_extra) for model in models)
    terms = jnp.stack([first, jnp.where(plan.last_epoch > 0, last, first)])
    return jnp.where(plan.steps > 0, terms, 0.0)


def client_cost(task: Task, local: Local, capacity: int) -> CostFn:
    """Returns what `make_cohort` balances by: about how long clients of at most `capacity`
    samples train.
    """
    sizes = list_loops(task, local, capacity)[:-1]
    return partial(dual_sgd.dual_client_cost, task, sizes, local) if sizes else cost_by_samples


def list_loops(task: Task, local: Local, capacity: int) -> list[int]:
    """Returns the sizes, ascending, that the training of clients of at most `capacity` samples is
    compiled for in sample space, with the largest in which clients are counted; [] where it is not.
    """
    sizes = dual_sgd.dual_sizes(task, erm(task), local, capacity)
    return [*sizes, dual_sgd.bucket_sizes(capacity)[-1]] if sizes else []


def gradient_step(task: Task, local: Local, objective: ObjectiveFn | None = None) -> ClientFn:
    """Takes one full-batch gradient step of one client: delta = -lr * gradient of its mean
    loss (FedSGD; gradient averaging of IFCA). Batch normalisation sees blocks of
    `cohort.SAMPLE_BLOCK` samples.
    """
    objective = objective or erm(task)

    def step_client(objective, lr, client, data, shared, work: Work) -> Loop:
        key, models = shared
        key = jax.random.fold_in(key, client)
        start = take_rows(models, work.group)
        count, _ = client_range(client, data)

        def add(total, x, y, owner, number):
            def block_loss(params):
                noise = jax.random.fold_in(key, number)
                each = objective(params, start, work.client_extra, x, y, noise, owner)
                return jnp.sum(jnp.where(owner >= 0, each, 0.0)) / count

            return jax.tree.map(jnp.add, total, jax.value_and_grad(block_loss)(start))

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, start))

        def end(total, count):
            loss, grad = total
            delta = jax.tree.map(lambda g: -lr * work.lr_scale * g, grad)
            delta = move_statistics(delta, zeros[1], grad)
            return Upload(
                delta=delta,
                weight=count.astype(jnp.float32),
                loss=loss,
                last_loss=loss,
                steps=(count > 0).astype(jnp.int32),
                start_group=jnp.where(count > 0, work.group, 0),
            )

        return pass_over_samples(client, data, zeros, add, end)

    return Partial(step_client, as_pytree(objective), local.lr)


def as_pytree(function: Callable[..., Any]) -> Any:
    """Returns an objective, a solver or any other function as a pytree. Its leaves are the arrays
    that the function closes over, in itself or in functions that it closes over: so the runs of a
    grid may differ in them.
    """
    if isinstance(function, Objective | Partial):
        return function
    inside = {
        place: as_pytree(value) if inspect.isfunction(value) else value
        for place, value in enumerate(list_cells(function))
        if isinstance(value, jax.Array) or (inspect.isfunction(value) and value is not function)
    }
    if not jax.tree.leaves(inside):
        return Partial(function)
    return Partial(partial(call_with, function), inside)


def list_cells(function: Any) -> list[Any]:
    """Returns the values that a function closes over; None in the place of one not set yet."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents if cell != types.CellType() else None for cell in cells]


def call_with(function: Any, inside: dict[int, Any], *given: Any) -> Any:
    """Calls a function that closes over the values `inside`, by place, in place of its own."""
    cells = enumerate(function.__closure__)
    closure = tuple(types.CellType(inside[n]) if n in inside else cell for n, cell in cells)
    rebuilt = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt(*given)
