"""A Flax module as a `Task`: all that an algorithm knows of it."""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.models.layers import flatten, mark_real
from fedjax_cfl.tasks import CLASSIFICATION, REGRESSION, Targets
from fedjax_cfl.tree import STATISTICS, as_variables, drop_statistics, pull_statistics
from fedjax_cfl.types import FirstLayer, Key, Params, Task
from fedjax_cfl.validation import NonNegativeFloat, checked


def as_float(x: jax.Array) -> jax.Array:
    """Reads uint8 pixels as x / 255; leaves any other type as it is."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


@checked()
def as_task(
    module: nn.Module,
    sample_shape: tuple[int, ...],
    num_classes: int,
    l2: NonNegativeFloat = 0.001,
    targets: Targets | None = None,
) -> Task:
    """Returns the Task of a Flax module: the loss of the task plus l2 * sum(kernel^2) over the
    layers that the module names in `decayed`.

    Every sample of `loss` carries the whole penalty, so that the mean over any batch
    carries it once. Dropout is active only with a key.

    Args: `module` maps [B, ...] to [B, C], and gets the number of outputs as its `num_classes`
    where it has a field of this name that is 0; `sample_shape` is that of one sample; `num_classes`
    is C, as in the data, and the loss cross-entropy; 0: there are none, and `targets` says what y
    are, `regression()` by default, with one output, [B, 1], or `multilabel()`, with an output a
    label, [B, T].
    Raises InputError if the module cannot take samples of this shape or does not return
    one logit per class.
    """
    if not isinstance(module, nn.Module):
        nnx = sys.modules.get("flax.nnx")  # a quarter of a second to import
        other = nnx is not None and isinstance(module, nnx.Module)
        shown = type(module).__name__ if other else repr(module)
        remedy = "; write this flax.nnx module with flax.linen" if other else ""
        raise InputError(f"model {shown}: a flax.linen.Module is allowed{remedy}")
    targets = targets or (CLASSIFICATION if num_classes else REGRESSION)
    if num_classes and targets.name != CLASSIFICATION.name:
        raise InputError(f"num_classes={num_classes}: y are classes, or `targets`: then it is 0")
    outputs = num_classes or targets.outputs
    if outputs and getattr(module, "num_classes", None) == 0:
        module = module.clone(num_classes=outputs)
    decayed: tuple[str, ...] = getattr(module, "decayed", ()) if l2 else ()
    # the sample-space form says nothing of owners
    first: str | None = None if _takes(module, "owner") else getattr(module, "first_layer", None)
    logits, measure = _logits_of(module), targets.loss

    def sample_loss(params, x, y, key=None, owner=None) -> jax.Array:
        out, pull = logits(params, x, key, owner)
        return measure(out, y) if pull is None else measure(out, y) + pull

    def loss(params: Params, *arguments: Any, **options: Any) -> jax.Array:
        return sample_loss(params, *arguments, **options) + penalty(params)

    def predict(params: Params, x: jax.Array, owner: jax.Array | None = None) -> jax.Array:
        return logits(params, x, None, owner)[0]

    penalty = _l2_of(l2, decayed)
    task = Task(
        _init_of(module, sample_shape), loss, predict, sample_loss, penalty, targets=targets
    )
    if not decayed:
        task = task._replace(loss=sample_loss, sample_loss=None, penalty=None)
    params = _check(task, type(module).__name__, sample_shape, outputs, decayed, first)
    if not first or STATISTICS in params:  # nor of statistics
        return task
    layer = _describe_first_layer(first, params, sample_shape, l2, decayed, logits, measure)
    return task._replace(first_layer=layer)


def _describe_first_layer(
    first: str,
    params: Params,
    sample_shape: tuple[int, ...],
    l2: float,
    decayed: tuple[str, ...],
    logits: Callable[..., tuple[jax.Array, jax.Array | None]],
    measure: Callable[[jax.Array, jax.Array], jax.Array],
) -> FirstLayer:
    """Returns what training in sample space needs of the dense layer `first`."""

    def loss(params: Params, z: jax.Array, y: jax.Array, key: Key | None) -> jax.Array:
        x = jnp.zeros((z.shape[0], *sample_shape))
        with nn.intercept_methods(_give_output(first, params, z)):
            out, _ = logits(params, x, key, None)
        return measure(out, y)

    return FirstLayer(
        first,
        params[first]["kernel"].shape,
        l2 if first in decayed else 0.0,
        lambda x: flatten(as_float(x)),
        loss,
        _l2_of(l2, tuple(name for name in decayed if name != first)),
    )


def _takes(module: nn.Module, name: str) -> bool:
    """Returns whether the module's call has an argument of this name."""
    return name in inspect.signature(module.__call__).parameters


def _init_of(module: nn.Module, sample_shape: tuple[int, ...]) -> Callable[[Key], Params]:
    """Returns f(key) -> initial parameters."""
    flags: dict[str, Any] = {"train": False} if _takes(module, "train") else {}

    def init(key: Key) -> Params:
        variables = cast(dict, module.init(key, jnp.zeros((1, *sample_shape)), **flags))
        if extra := sorted(set(variables) - {"params", STATISTICS}):
            raise ValueError(
                f"it keeps {extra} beside params and {STATISTICS}, which no client would train"
                " or send"
            )
        params = variables.get("params", {})
        return {**params, STATISTICS: variables[STATISTICS]} if STATISTICS in variables else params

    return init


def _logits_of(module: nn.Module) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    """Returns f(params, x [B, ...], key or None, owner [B] or None) -> (logits [B, C], None or a
    term [] of the loss that moves running statistics).
    """
    takes_train, takes_owner = _takes(module, "train"), _takes(module, "owner")

    def logits(
        params: Params, x: jax.Array, key: Key | None, owner: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        flags: dict[str, Any] = {"train": key is not None} if takes_train else {}
        if takes_owner:
            flags["owner"] = owner
        rngs = None if key is None else {"dropout": key}
        moves = key is not None and STATISTICS in params
        variables, x = as_variables(params), as_float(x)
        if not moves:
            return cast(jax.Array, module.apply(variables, x, rngs=rngs, **flags)), None
        with nn.intercept_methods(_leave_out_padding(owner)):
            found = module.apply(variables, x, rngs=rngs, mutable=[STATISTICS], **flags)
        out, changed = cast(tuple[jax.Array, dict], found)
        return out, pull_statistics(params, changed[STATISTICS])

    return logits


def _leave_out_padding(owner: jax.Array | None) -> Callable[..., Any]:
    """Returns an interceptor that lets Flax's batch normalisation count real samples alone, by
    `owner` [B] as in `Task`. Raises InputError where it cannot know them.
    """

    def instead(call: Any, arguments: tuple, options: dict, context: Any) -> Any:
        module = context.module
        if not isinstance(module, nn.BatchNorm) or context.method_name != "__call__":
            return call(*arguments, **options)
        x, mask = arguments[0] if arguments else options["x"], options.get("mask")
        if owner is not None and len(x) == len(owner):
            real = mark_real(owner, x)
            options = options | {"mask": real if mask is None else real & mask}
        elif owner is not None and mask is None:
            raise InputError(
                f"model: {module.name} receives {x.shape} of a batch of {len(owner)} samples, some"
                " of which may be padding; give it [B, ...], or a `mask` of your own by `owner`"
            )
        return call(*arguments, **options)

    return instead


def _give_output(first: str, params: Params, z: jax.Array) -> Callable[..., Any]:
    """Returns an interceptor that gives `z` [B, H] plus the bias as what the dense layer
    `first` computes.
    """

    def instead(call: Callable, arguments: tuple, options: dict, context: Any) -> Any:
        if context.module.path != (first,) or context.method_name != "__call__":
            return call(*arguments, **options)
        return z + (params[first].get("bias", 0.0) if first in params else 0.0)

    return instead


def _l2_of(l2: float, names: tuple[str, ...]) -> Callable[[Params], jax.Array | float]:
    """Returns f(params) -> l2 * sum(kernel^2) over these layers."""
    return lambda params: (
        l2 * sum((jnp.sum(jnp.square(params[name]["kernel"])) for name in names), 0.0)
    )


def _check(
    task: Task,
    name: str,
    sample_shape: tuple[int, ...],
    outputs: int | None,
    decayed: tuple[str, ...],
    first: str | None,
) -> Params:
    # Returns the parameters' shapes; nothing is computed. `outputs` None: any number of them.
    # What a foreign module may raise is unknown, hence the broad except.
    try:
        params = jax.eval_shape(task.init, jax.random.key(0))
        out = jax.eval_shape(
            task.predict, params, jax.ShapeDtypeStruct((2, *sample_shape), jnp.float32)
        )
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"model {name} cannot take samples of shape {tuple(sample_shape)}: {cause}"
        ) from error
    shape = getattr(out, "shape", type(out).__name__)
    any_number = outputs is None and len(shape) == 2
    if shape != (2, shape[1] if any_number else outputs):
        raise InputError(
            f"model {name} returns {shape} for 2 samples of shape {tuple(sample_shape)}: (2,"
            f" {outputs or 'T'}) is allowed"
        )
    if first and params.get(first, {}).get("kernel", out).shape[:1] != (math.prod(sample_shape),):
        allowed = (
            f"a Dense layer called on the flat sample is allowed{suggest_nearest(first, params)}"
        )
        raise InputError(f"model {name}: first_layer names {first!r}, {allowed}")
    for layer in decayed:
        if "kernel" not in params.get(layer, {}):
            raise InputError(
                f"model {name}: decayed names {layer!r}, a layer with a kernel is"
                f" allowed{suggest_nearest(layer, params)}"
            )
    return params


def count_params(params: Params) -> int:
    """Returns the number of parameters, of arrays or of their shapes; running statistics are
    none.
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(drop_statistics(params)))


def model_bytes(params: Params) -> int:
    """Returns the bytes one model takes, in memory and on the wire, with running statistics."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


@contextlib.contextmanager
def watch_inputs(holds: Callable[[nn.Module], bool]) -> Iterator[list[jax.Array]]:
    """Yields a list to which each call of a module for which `holds` is true adds what it receives,
    as [B, r].
    """
    seen = []

    def note(call: Any, arguments: tuple, options: dict, context: Any) -> Any:
        if context.method_name == "__call__" and holds(context.module):
            seen.append(arguments[0].reshape(len(arguments[0]), -1))
        return call(*arguments, **options)

    with nn.intercept_methods(note):
        yield seen
