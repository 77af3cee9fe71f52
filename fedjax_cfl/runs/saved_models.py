"""The models of one round of a run, final.npz and best.npz: NumPy's own format, no pickle.

An array each: `['models'][...]` [M, ...], the parameters of every model that a client may be
served, and `['index']` [K] int32, which of them each client uses, -1: none. A run whose clients mix
all models also has `['weights']` [K, M], see `ServedModels`, and may have `['label_shares']`
[M, C]. One whose samples were standardised has `['scaling']` in final.npz, see `data.scaling`.
`facts` is a JSON object: the round, the run, and in final.npz what samples look like: sample_shape,
num_classes, whether they were pixels (uint8), the names of their columns, if they have any, and, of
labels, how many they are.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from fedjax_cfl.errors import RunError
from fedjax_cfl.runs.checkpoint import name_leaves, to_plain_array
from fedjax_cfl.runs.regular_files import explain, open_regular
from fedjax_cfl.runs.results import atomic_write

FINAL_FILE, BEST_FILE = "final.npz", "best.npz"
PART = re.compile(r"\['([^']+)'\]")  # of a leaf's name


def save_arrays(path: Path, tree: Any, facts: dict[str, Any]) -> None:
    """Writes a pytree of arrays and a JSON object to an .npz file. Raises RunError where it cannot
    be written.
    """
    arrays = {name: to_plain_array(name, leaf) for name, leaf in name_leaves(tree).items()}
    try:
        with atomic_write(path) as temporary, temporary.open("wb") as handle:
            np.savez(handle, allow_pickle=False, facts=np.array(json.dumps(facts)), **arrays)
    except OSError as error:
        raise RunError(f"{path} could not be written: {explain(error)}") from None


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the arrays of such a file, by leaf name, and its JSON object. Raises KeyError,
    ValueError, OSError or an error of zip files where it is damaged: each array has a checksum.
    """
    with open_regular(path) as handle, np.load(handle, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("facts")))


def nest_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of leaves that are named ['a']['b']."""
    return unflatten_dict({tuple(PART.findall(name)): leaf for name, leaf in arrays.items()})
