"""Which model a client without labels gets, by the rule of a method that needs none: FLUX's, which
compares a description of its inputs with those of the groups.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cfl.algorithms.flux import Descriptions, describe_clients, nearest_center
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local
from fedjax_cfl.data.federated import federate
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.callbacks import CHECKPOINTS
from fedjax_cfl.runs.load import LoadedRun, SavedModels
from fedjax_cfl.runs.regular_files import explain
from fedjax_cfl.runs.saved_models import nest_arrays
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.types import Partition, Pool

FLUX = "fedjax_cfl.algorithms.flux"
MEMORY = "[0].memory."  # how leaves of a checkpoint begin that are the method's own


def can_place(run: LoadedRun, saved: SavedModels) -> bool:
    """Returns whether the method of a run places clients without labels, and its `saved` models
    are those of the groups that it has found.
    """
    own = run.settings["algorithm"]
    by_inputs = own["_target_"] == FLUX and own["newcomers"] == "inputs"
    return by_inputs and not run.settings["personal"] and saved.round > own["warm_up"]


def place_clients(
    run_dir: str | Path, run: LoadedRun, x: np.ndarray, owner: np.ndarray
) -> np.ndarray:
    """Returns the groups [U] of new clients by their samples x [N, ...], as `run.scale` returns
    them; `owner` [N] is the client of each, from 0 on.

    Raises InputError as `read_descriptions` does.
    """
    memory, active = read_descriptions(Path(run_dir).expanduser() / CHECKPOINTS, run)
    pool = Pool(x, np.zeros(len(owner), np.int32), run.num_classes)  # all for training, of class 0
    holdings = Partition(np.arange(len(owner)), owner, np.zeros(len(owner), bool))
    local = Local(0.1, 1, 1, execution=make_execution(make_mesh(1)))
    describe = describe_clients(run.task, local, run.settings["algorithm"]["latent"])
    described = describe(
        memory.extractor, federate(pool, holdings), jnp.ones(owner.max() + 1, bool)
    )
    return np.asarray(nearest_center(memory, described[:, :2], active))


def read_descriptions(folder: Path, run: LoadedRun) -> tuple[Descriptions, jax.Array]:
    """Returns what newcomers are described with and compared with, and the groups in use [m] bool,
    of the last checkpoint in a folder. Raises InputError where it is not there or damaged.
    """
    try:
        stored = checkpoint.load_arrays(folder)
        parts = {name.removeprefix(MEMORY): jnp.asarray(value) for name, value in stored.items()}
        extractor = {name: parts[name] for name in parts if name.startswith("extractor")}
        memory = Descriptions(
            nest_arrays(extractor), *(parts[name] for name in ("low", "high", "centers"))
        )
        expected = jax.eval_shape(run.task.init, jax.random.key(0))
        shapes = jax.tree.map(lambda leaf: (1, *leaf.shape), expected)
        if shapes != jax.tree.map(lambda leaf: leaf.shape, memory.extractor):
            raise ValueError("it has another model")
        return memory, parts["[0].active"]
    except Exception as error:  # whatever damage does to a reader
        raise InputError(
            f"{folder}: the last checkpoint, by which clients without labels are placed, cannot be"
            f" read: {explain(error)}; give y"
        ) from None
