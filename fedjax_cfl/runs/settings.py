"""What a run's session is told: its own settings, each with a type, and all of them to record."""

from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_cfl.runs.assignments import sample_clients
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.validation import PositiveFloat, PositiveInt


class CheckpointSettings(NamedTuple):
    """When checkpoints are saved, and how many of them stay."""

    every: PositiveInt  # rounds
    minutes: PositiveFloat
    keep: PositiveInt


class RunSettings(NamedTuple):
    """What the session of a run reads; `everything` is only recorded, compared and shown."""

    seed: int
    plan: Plan
    clients_per_round: int | None  # None: not known
    width: int  # lanes, see `Execution`
    faults: Faults
    assignments: int  # clients whose groups are kept at every evaluation
    checkpoint: CheckpointSettings
    resume: Literal["auto", "must", "never"]
    data_digest: str  # see `identity.digest_data`
    names: dict[str, str]  # of the algorithm and the data set
    choices: dict[str, str]  # the option chosen in each group of the configuration
    everything: dict[str, Any]  # every setting, nested as in the configuration

    def draw_recorded_clients(self, num_clients: int) -> np.ndarray:
        """Returns the clients [S], of K = `num_clients`, whose groups the run keeps."""
        return sample_clients(num_clients, self.assignments, self.seed)
