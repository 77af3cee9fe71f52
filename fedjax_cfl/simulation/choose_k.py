"""Choosing the number of groups by short trials (Xie et al., "Multi-Center Federated
Learning", https://arxiv.org/abs/2005.01026, 5.2).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_cfl.data.drift import none as no_drift
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.errors import InputError
from fedjax_cfl.keys import SELECT, derive_key
from fedjax_cfl.scores import choose_score
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.simulation.driver import run_setup
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.simulation.setup import Setup
from fedjax_cfl.types import Algorithm, FederatedData, Key, Task
from fedjax_cfl.validation import check_value, one_of

CRITERIA = {"accuracy": max, "rmse": min, "micro_f1": max, "distance": min}


class Choice(NamedTuple):
    """What the trials found."""

    m: int  # the best number of groups, the least of several that are equally good
    # per candidate: m, accuracy (fraction), of a regression rmse, of labels micro_f1, distance (L2)
    table: list[dict[str, Any]]


def choose_k(
    make: Callable[[int], Algorithm],
    task: Task,
    data: FederatedData,
    key: Key,
    candidates: Iterable[int],
    *,
    rounds: int = 3,
    clients: int = 100,
    by: str = "accuracy",
    mesh: Mesh | None = None,
) -> Choice:
    """Tries several numbers of groups on the same randomly drawn clients for a few rounds and
    returns the best of them.

    Args: `make(m)` -> Algorithm, which selects from the drawn clients alone:
    `select.uniform(10)` means 10 of them; `candidates` are the numbers of groups; `rounds` is
    the length of a trial; `clients` are drawn, all if there are no more; `by` is accuracy on
    their test samples, the higher the better | rmse, of a regression | micro_f1, of labels |
    distance, the mean L2 distance of the models trained in the last round from their center, the
    lower the better; `mesh` of None: every device JAX shows. Distances shrink with every further
    center, also where there is no further group: look for the bend in the table.
    Raises InputError for an unknown criterion or no candidate.
    """
    check_value("by", by, one_of(*CRITERIA))
    score = choose_score(data.num_classes, data.y)
    if by not in (score.name, "distance"):
        raise InputError(f"by={by}: these data are scored by {score.words}; use {score.name}")
    candidates = sorted(candidates)
    if not candidates:
        raise InputError("candidates=[]: at least one number of groups is allowed")
    few = draw_clients(derive_key(key, SELECT), data, clients)
    table = []
    for m in candidates:
        setup = Setup(make(m), task, few, no_drift(), mesh or make_mesh())
        last = run_setup(setup, Plan(rounds, discard="none"), key).rows[-1]
        table.append({"m": m, score.name: last[score.name], "distance": last["discrepancy"]})
    return Choice(pick_best(table, by), table)


def pick_best(table: list[dict[str, Any]], by: str) -> int:
    """Returns the number of groups of the first row that is as good as any."""
    value = CRITERIA[by](row[by] for row in table)
    return next(row["m"] for row in table if row[by] == value)


def draw_clients(key: Key, data: FederatedData, clients: int) -> FederatedData:
    """Returns the data of randomly drawn clients, renumbered 0, 1, ... in their old
    order; of all if there are no more.
    """
    drawn = np.sort(np.asarray(jax.random.permutation(key, data.num_clients)[:clients]))
    few = take_clients(data, drawn)
    return few.replace(time=None, max_client_samples=int(few.train.size.max()))
