"""One process of a peer in a whole job: `python -m peers MODULE FOLDER RANK PROCESSES`.

Prints what it measured as one line of JSON.
"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import torch

from peers import job


def main() -> None:
    """Trains the job of a folder."""
    module, folder, rank, processes = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    held = job.load(folder, rank, processes)
    timed = importlib.import_module(f"peers.{module}").train(held, processes)
    packages = ["torch", *(["pfl"] if module.startswith("pfl") else [])]
    found = {name: importlib.metadata.version(name) for name in packages}
    gpu = torch.cuda.is_available()
    print(
        json.dumps(
            timed._asdict()
            | {"versions": found | {"python": sys.version.split()[0]}}
            | {"device": torch.cuda.get_device_name() if gpu else "cpu"}
            | {"threads": torch.get_num_threads()}
        )
    )


if __name__ == "__main__":
    main()
