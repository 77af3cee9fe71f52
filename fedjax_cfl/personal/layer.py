"""`layer` makes a layer, what each client keeps and trains beside its group's model, from one step;
`chain` puts layers on a method.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.objective import erm
from fedjax_cfl.client.sgd import ClientInputs, add_change, own_local, sgd, train_both
from fedjax_cfl.client.steps import Step, StepChange
from fedjax_cfl.errors import InputError, suggest_options
from fedjax_cfl.method import Method
from fedjax_cfl.tree import has_statistics
from fedjax_cfl.types import Algorithm, Params, Task, Upload, Work


def layer(
    name: str,
    *,
    own: Callable[[Params], Any],
    step: Callable[[Step, Params, Any], tuple[Params, Any]] | None = None,
    own_step: Callable[[Step, Params], Params] | None = None,
    epochs: int | None = None,
    serve: Callable[[Any, Params], Params] | None = None,
) -> Method:
    """Makes a layer over any method: what each client keeps for itself, trains and is tested on.

    Write one of the two: `step`, where the client's own model or anything else is trained together
    with the group's model, or `own_step`, where the own model is trained beside it and the group's
    model is as without the layer.

    Both read a `Step`, c: `c.grad(model)` is the gradient of a model on this mini-batch, `c.sgd`
    the group's model after the step of SGD that it takes without the layer, `c.lr` the step size,
    `c.received` the model that the client received, `c.number` the step's number,
    `c.descend(model, gradient)` a step of SGD of the own model with the momentum of `cfl.Local`.
    `c.follow(gradient)` is `c.sgd` along another gradient. Each gradient that a step asks for
    counts as a step of the client: it takes time under a clock. What is kept is never sent, and
    clients that have not trained yet use their group's model. Running statistics of batch
    normalisation, in the group's model and in `own` where it is a model, are those that this model
    has after the mini-batch, whatever a step does.

    Args:
        name: of the layer, in messages, and of its rows in `State.rows`.
        own: (model of its group) -> what ONE client keeps at first, any pytree of arrays.
        step: (c, model of the group, own) -> (model of the group, own) after the step. Clients
            must train by SGD; other methods refuse the layer.
        own_step: (c, own model) -> own model after the step. Clients may train in any way, and the
            steps of the own model count as steps, too.
        epochs: passes of `own_step` over the client's samples; None: as many steps as the group's.
        serve: (own, model of its group) -> the model that a client uses and is tested on; None:
            its group's.

    Raises InputError where not exactly one of `step` and `own_step` is given, and for `epochs`
    without `own_step`.

    Example (Ditto, Li et al., ICML 2021, Algorithm 1):

        def ditto(lam=1.0):
            def step(c, w, v):
                pull = jax.tree.map(lambda g, v, r: g + lam * (v - r), c.grad(v), v, c.received)
                return c.sgd, c.descend(v, pull)
            return cfl.layer("Ditto", own=lambda w: w, step=step, serve=lambda v, w: v)
    """
    if (step is None) == (own_step is None):
        raise InputError(f"layer {name!r}: takes step or own_step, exactly one of the two")
    if epochs is not None and own_step is None:
        raise InputError(f"layer {name!r}: epochs are those of own_step; leave them out")

    def follow(c: Step, model: Params, row: Any) -> tuple[Params, Any]:
        assert step is not None
        return follow_batches(step, c, model, row)

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        if own_step is None:
            return add_change(solve, StepChange(name, step=follow))
        return train_beside(name, task, own_local(local, epochs), solve, own_step)

    return Method(name=name, rows=own, train=train, serve=serve)


def list_layers(task: Task, named: Sequence[str], setting: str) -> list[str]:
    """Returns the names of the model's layers, by its parameters. Raises InputError for one of
    `named`, of a `setting`, that it does not have.
    """
    names = list(jax.eval_shape(task.init, jax.random.key(0)))
    for layer in named:
        if layer not in names:
            near = suggest_options(layer, names)
            raise InputError(f"{setting}: the model has no {layer!r}{near}")
    return names


def chain(*parts: Any) -> Any:
    """Puts layers on a method, the first layer nearest to it.

    `chain(cfl.algorithms.ifca, cfl.personal.scaffold(), cfl.personal.ditto())` is a method, called
    as `ifca` is: (task, local, system, **settings). At most one layer of a chain may say what
    clients are tested on (Ditto, APFL, ...), and at most one may correct their training (SCAFFOLD,
    FedDyn). Raises InputError, when the method is built, for layers that do not fit.
    """
    method: Callable[..., Algorithm] | None = parts[0] if parts else None
    layers = parts[1:]
    rule = (
        "the first part is a method, such as cfl.algorithms.ifca, and layers follow, such as"
        " cfl.personal.ditto()"
    )
    if isinstance(method, Algorithm):
        raise InputError(f"chain: the method is built already; {rule}")
    if method is None or not callable(method):
        raise InputError(f"chain: {getattr(method, 'name', None) or method!r} is no method; {rule}")
    for part in layers:
        if not isinstance(part, Method):
            hint = f"; call it, {part.__name__}()" if inspect.isfunction(part) else ""
            raise InputError(f"chain: {part!r} is no layer{hint}; {rule}")

    def chained(task: Task, local: Local, system: Any, **settings: Any) -> Algorithm:
        return method(task, local.replace(personal=(*local.layers, *layers)), system, **settings)

    first: Any = getattr(method, "func", method)
    names = [getattr(first, "__name__", "method"), *(part.name for part in layers)]
    chained.__name__ = "+".join(names)  # what a run of it is called
    return chained


def follow_batches(step: Callable, c: Step, model: Params, own: Any) -> tuple[Params, Any]:
    """Takes a layer's `step`, with the running statistics of the models after their mini-batch.
    Raises InputError for a step that is none.
    """
    result = step(c, model, own)
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError("step: must return two values, (model of the group, own)")
    after, kept = result
    if after is model:
        raise InputError("step: returns the group's model as it was; return c.sgd in its place")
    if not has_statistics(model):
        return after, kept
    after = c.move_statistics(after, model)
    return after, c.move_statistics(kept, own) if has_statistics(kept) else kept


def train_beside(
    name: str, task: Task, local: Local, solve: ClientFn, own_step: Callable
) -> ClientFn:
    """Returns the `ClientFn` that trains one client's group model by `solve`, and beside it its own
    model by `own_step`, as `local` says; `name` is that of its rows.
    """

    def step(c: Step, v: Params, nothing: Any) -> tuple[Params, Any, jax.Array]:
        c.received = c.extra
        after, _ = follow_batches(lambda c, v, nothing: (own_step(c, v), ()), c, v, nothing)
        return after, nothing, jnp.zeros(())  # its loss is not reported

    train_own = add_change(sgd(task, local, erm(task)), StepChange(f"{name}'s own", step=step))

    def begin(c: ClientInputs) -> tuple[Params, Work]:
        # the model that it received is the extra of its own model's training
        return c.work.rows[name], c.work._replace(client_extra=c.model, rows={})

    def keep(c: ClientInputs, upload: Upload, own: Upload) -> Upload:
        row = jax.tree.map(jnp.add, c.work.rows[name], own.delta)
        return upload.replace(rows={**upload.rows, name: row})

    return train_both(solve, train_own, begin, keep)
