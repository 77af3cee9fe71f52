"""One file per peer: `train(work, rounds)` trains the cohorts of a workload round by
round and returns a `Trained`.
"""

from typing import NamedTuple

import numpy as np


class Trained(NamedTuple):
    """What a side has to show."""

    seconds: list[float]  # per round, aggregation included; the first ones compile
    steps: list[int]  # per round, local SGD steps taken by all clients
    # the global model after the first round, as `workloads.initial` has it
    model: list[tuple[np.ndarray, np.ndarray]]
