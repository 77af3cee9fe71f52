"""How clients train: the settings of local work, and the work of each client."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fedjax_cfl.client.execution import Execution, make_execution
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import shorten
from fedjax_cfl.keys import permute, write_table
from fedjax_cfl.method import Method
from fedjax_cfl.types import Key, Params, Work
from fedjax_cfl.validation import (
    BelowOne,
    Epochs,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_settings,
)

Size = TypeVar("Size", int, jax.Array)


@dataclasses.dataclass(frozen=True)
class Local:
    """How clients train: SGD over reshuffled epochs, by default as the command line's for files of
    your own. Raises InputError for a value that is not allowed.
    """

    lr: PositiveFloat | jax.Array = 0.03  # step size
    epochs: Epochs = 5  # E, passes over the client's samples
    batch_size: PositiveInt = 10  # B; the short last batch is kept
    # v <- momentum v + gradient, w <- w - lr v; v is 0 before every round
    momentum: BelowOne = 0.0
    # mini-batch steps of every client, cycling through reshuffled epochs; None: E epochs
    steps: PositiveInt | None = None
    # True: the short last batch of a pass is filled up from the next one (the pre-training of the
    # FlexCFL code, see `StepPlan.draw_samples`)
    fill_batches: bool = False
    weight_decay: NonNegativeFloat = 0.0  # added to every gradient, times the parameters
    # (round [] int32) -> factor of lr in that round, as an optax schedule; None: 1
    schedule: Callable[[jax.Array], jax.Array] | None = None
    # layers: what each client keeps and trains beside its group's model, the first one nearest to
    # it; None: nothing
    personal: Method | Sequence[Method] | None = None
    execution: Execution = dataclasses.field(default_factory=make_execution)  # where, and by whom

    def __post_init__(self) -> None:
        """Checks the values."""
        for part in self.layers:
            if not isinstance(part, Method) or part.solve is not None:
                raise InputError(
                    "local.personal: takes what functions of cfl.personal or cfl.layer return, such"
                    f" as cfl.personal.ditto(), one or a list of them, or None; not {shorten(part)}"
                )
        check_settings(Local, vars(self), "local")

    @property
    def layers(self) -> tuple[Method, ...]:
        """The layers, the first one nearest to the group's model."""
        given = self.personal
        if isinstance(given, Sequence) and not isinstance(given, Method):
            return tuple(given)
        return () if given is None else (given,)

    def replace(self, **changes: Any) -> "Local":
        """Returns the settings with some of them changed."""
        return dataclasses.replace(self, **changes)

    def lr_scale(self, round: jax.Array) -> jax.Array:
        """Returns the factor [] of the step size in a round [] int32."""
        return jnp.ones(()) if self.schedule is None else jnp.asarray(self.schedule(round))


def add_layer(local: Local, layer: Method) -> Local:
    """Returns how clients train with one layer more, the nearest to the group's model."""
    return local.replace(personal=(layer, *local.layers))


class StepPlan(NamedTuple):
    """The steps of one client."""

    steps: jax.Array  # [] int32, steps to take
    per_epoch: jax.Array  # [] int32
    last_epoch: jax.Array  # [] int32, the epoch of the last step
    random_words: jax.Array  # [2] uint32, the seed of its permutations

    def locate_batch(self, step: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
        """Returns (epoch, position of the step's first sample within the epoch)."""
        return lax.div(step, self.per_epoch), lax.rem(step, self.per_epoch) * batch

    def draw_samples(
        self, step: jax.Array, count: jax.Array, local: Local, table: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns which of the client's `count` samples a step takes [B], and which of them are
        real [B]. `table` is that of `make_table`.

        With filled batches the last one of a pass over n samples goes on with the first
        (B ceil(n / B) mod n) samples of the next pass, which then begins with them again.
        """
        epoch, place = self.locate_batch(step, local.batch_size)
        inside = place + jnp.arange(local.batch_size)
        if not local.fill_batches:
            if table is None:
                return permute(self.random_words, count, epoch, inside), inside < count
            at = lax.dynamic_slice(table, (epoch, place), (1, local.batch_size))[0]
            return jnp.minimum(at, jnp.maximum(count - 1, 0)), inside < count
        beyond = inside - count
        more = lax.rem(self.per_epoch * local.batch_size, jnp.maximum(count, 1))
        turn, where = epoch + (beyond >= 0), jnp.where(beyond < 0, inside, beyond)
        if table is None:
            return permute(self.random_words, count, turn, where), beyond < more
        return table[turn, where], beyond < more

    def add_loss(
        self, step: jax.Array, losses: tuple[jax.Array, jax.Array], total: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds a step's `total` to the sums of the first and of the last epoch, if it is of
        them.
        """
        early, late = losses
        epoch = lax.div(step, self.per_epoch)
        return (
            early + jnp.where(epoch == 0, total, 0.0),
            late + jnp.where(epoch == self.last_epoch, total, 0.0),
        )

    def make_table(self, count: jax.Array, local: Local, capacity: int) -> jax.Array | None:
        """Returns the order of all passes of a client of up to `capacity` samples, where one
        client trains after another and the number of passes is known; elsewhere None.
        """
        if local.execution.executor != "sequential" or local.steps is not None:
            return None
        passes = local.epochs + local.fill_batches
        return write_table(self.random_words, count, passes, capacity + local.batch_size)

    def count_samples(self, count: jax.Array, batch: int) -> jax.Array:
        """Returns the samples [2], of `count`, that the first and the last epoch reach."""
        last = self.steps - self.last_epoch * self.per_epoch
        return jnp.stack([jnp.minimum(self.steps * batch, count), jnp.minimum(last * batch, count)])


def count_steps(local: Local, size: Size) -> Size:
    """Returns the most steps that a client of `size` samples takes."""
    per_epoch = -(-size // local.batch_size)
    # of an array of sizes as many
    return local.epochs * per_epoch if local.steps is None else 0 * per_epoch + local.steps


def plan_steps(
    local: Local, count: jax.Array, fraction: jax.Array, random_words: jax.Array
) -> StepPlan:
    """Plans the steps of a client of `count` samples that completes `fraction` of its steps."""
    per_epoch = jnp.maximum(lax.div(count + local.batch_size - 1, local.batch_size), 1)
    planned = local.epochs * per_epoch if local.steps is None else local.steps
    steps = jnp.where(count > 0, jnp.ceil(fraction * planned - 1e-3).astype(jnp.int32), 0)
    return StepPlan(steps, per_epoch, lax.div(steps - 1, per_epoch), random_words)


class Training(NamedTuple):
    """What the training of one client needs."""

    local: Local
    lr: jax.Array  # [] float32, this client's step size, `local.lr` times `Work.lr_scale`
    objective: Any  # see `objective`
    start: Params  # the model it received
    client_extra: Any  # what `prepare` computed for it
    rows: dict[str, Any]  # by layer, what it keeps
    client: jax.Array  # [] int32
    samples: jax.Array  # [] int32, how many it trains on
    first: jax.Array  # [] int32, position of the first of them in `train.order`
    key: Key  # of this client and round; folded with the step, for dropout
    plan: StepPlan
    table: jax.Array | None  # the order of its samples, see `StepPlan.make_table`
    # [>= samples] float32, what each of its samples counts in the loss; None: all count 1
    weights: jax.Array | None = None


def full_work(group: jax.Array, lr_scale: ArrayLike = 1.0) -> Work:
    """Returns the work of clients that complete all their steps, with nothing extra."""
    return Work(group, jnp.ones(group.shape), jnp.full(group.shape, lr_scale, jnp.float32))
