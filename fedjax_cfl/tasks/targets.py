"""The type of a task: what y are, and how models of them are trained, asked and scored."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_cfl.scores import Score


class Predictions(NamedTuple):
    """What models predict of N test samples."""

    guess: Any  # [N] class or number, or [N, T] labels, 0 or 1
    loss: Any  # [N]
    y: Any  # in the shape of `guess`, what is true
    owner: Any  # [N] int32, whose sample each is; one of -1 counts nowhere


class Measure(NamedTuple):
    """One measure of every client."""

    values: Any  # [K]
    known: Any  # [K] bool, whether the client has one
    higher: bool = True  # the higher the better


class Targets(NamedTuple):
    """A task: what y are, and how models of them are trained, asked and scored.

    Outputs [B, C] are what a model returns, y [B] or [B, T] what is true, and a guess, in the shape
    of y, what outputs say of it. A table is a dataclass of what every client measures, with
    `samples` [K] int32 and `loss` [K]. But for losses and `measure`, arrays are NumPy's or JAX's.
    """

    name: str  # task=... of the command line
    score: Score
    loss: Callable[[Any, Any], Any]  # (outputs, y) -> [B]: what SGD minimises
    loss_value: Callable[[Any, Any], Any]  # the same numbers, where no gradient is taken
    guess: Callable[[Any], Any]  # (outputs) -> what they say
    chances: Callable[[Any], Any]  # (outputs) -> [B, C] probabilities, None: there are none
    # (Predictions, K, C) -> (table, counts [2, C] over all clients, which add up)
    measure: Callable[[Predictions, int, int], tuple[Any, Any]]
    # (table, groups [K], m) -> measures and loss [m] over all test samples of each group's clients,
    # NaN for a group without samples; clients of other groups do not count
    by_group: Callable[[Any, Any, int], dict[str, Any]]
    # (table, counts) -> one number [] per measure, and loss, over all clients with test samples;
    # NaN if there are none
    summarize: Callable[[Any, Any], dict[str, Any]]
    # (guess, y, held [N] bool) -> (sum, number) of the samples held, of which `rate` makes the
    # score; those of parts add up
    sums: Callable[[Any, Any, Any], tuple[Any, Any]]
    rate: Callable[[Any, Any], Any]
    needs: str  # what y must be, in words
    describe: Callable[[Any], str]  # (pool, or data of clients) -> what y are, in words
    outputs: int | None = None  # of a model; None: as many as there are classes or labels
    # as the settings of a run name it: `_target_` and its arguments; (): they do not
    settings: tuple[tuple[str, Any], ...] = ()
