"""What makes two runs the same: their settings and their data."""

import hashlib
import json
from typing import Any

import jax
import numpy as np

from fedjax_cfl.runs.labels import is_execution
from fedjax_cfl.runs.settings import RunSettings
from fedjax_cfl.types import FederatedData
from fedjax_cfl.validation import flatten_settings

# Settings, in addition to those of `is_execution`, that a continuation of a run may change:
# they do not change what has been computed already.
RESUME_MAY_CHANGE = ("rounds", "eval_every", "eval_auxiliary", "eval_distance")
RESUME_MAY_CHANGE += ("evaluate.finetune", "evaluate.similarity")


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
        "samples": int(data.y.size),
        "capacity": data.max_client_samples,
        "data": settings.data_digest,
    }


def digest_identity(identity: dict[str, Any]) -> str:
    """Returns a digest of what `run_identity` returns: what a run's own files share."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def digest_data(data: FederatedData) -> str:
    """Returns a digest of the samples, their labels, who holds which, and the true groups."""
    digest = hashlib.sha256()  # the fastest of the standard library, where the CPU helps
    for leaf in jax.tree.leaves(data):
        array = np.ascontiguousarray(leaf)  # no copy, also of a file in memory
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
