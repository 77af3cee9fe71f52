"""What a run's session reads: its own settings, each with a type, and all of them to record. And
what makes two runs the same: their settings and their data.
"""

import hashlib
import json
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fedjax_cfl.formatting import flatten_settings
from fedjax_cfl.runs.labels import is_execution
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.types import FederatedData
from fedjax_cfl.validation import PositiveFloat, PositiveInt

# Settings, in addition to those of `is_execution`, that a continuation of a run may change:
# they do not change what has been computed already.
RESUME_MAY_CHANGE = ("rounds", "eval_every", "eval_auxiliary", "eval_distance", "evaluate.finetune")


class CheckpointSettings(NamedTuple):
    """When checkpoints are saved, and how many of them stay."""

    every: PositiveInt  # rounds
    minutes: PositiveFloat
    keep: PositiveInt


class RunSettings(NamedTuple):
    """What the session of a run reads; `everything` is only recorded, compared and shown."""

    seed: int
    plan: Plan
    data_digest: str  # see `digest_data`
    choices: dict[str, str]  # the option chosen in each group of the configuration
    everything: dict[str, Any]  # every setting, nested as in the configuration
    clients_per_round: int | None = None  # None: not known
    width: int = 1  # lanes, see `Execution`
    # those of conf/config.yaml
    assignments: int = 10_000  # clients whose groups are kept at every evaluation
    checkpoint: CheckpointSettings = CheckpointSettings(100, 5, 2)
    resume: Literal["auto", "must", "never"] = "auto"
    choose: Literal["last", "best_validation"] = "last"  # the round that is reported
    patience: int = 0  # tests without a better validation score after which it ends, 0: never


def run_identity(settings: RunSettings, data: FederatedData) -> dict[str, Any]:
    """Returns what a continuation must repeat: every setting that bears on the numbers, and the
    data.
    """
    # a refusal lists the first
    named = sorted(
        flatten_settings(settings.everything),
        key=lambda leaf: not leaf[0].endswith((".name", "seed")),
    )
    kept = {
        name: value
        for name, value in named
        if not is_execution(name) and not name.startswith(RESUME_MAY_CHANGE)
    }
    return kept | {
        "clients": data.num_clients,
        "samples": len(data.y),
        "capacity": data.max_client_samples,
        "data": settings.data_digest,
    }


def digest_identity(identity: dict[str, Any]) -> str:
    """Returns a digest of what `run_identity` returns: what a run's own files share."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def digest_data(data: FederatedData) -> str:
    """Returns a digest of the samples, their labels, who holds which, and the true groups; and of
    the names of clients, classes and features, which results and predictions go by.
    """
    digest = hashlib.sha256()  # the fastest of the standard library, where the CPU helps
    for leaf in jax.tree.leaves(data):
        array = np.ascontiguousarray(leaf)  # no copy, also of a file in memory
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    clients, columns = (each and each.names for each in (data.client_names, data.columns))
    if any(names := [clients, data.class_names, columns]):
        digest.update(json.dumps(names, default=str).encode())
    return digest.hexdigest()
