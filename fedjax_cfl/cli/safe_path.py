"""Where the processes that a command starts import from: not from the current folder."""

import contextlib
import os
from collections.abc import Iterator

from fedjax_cfl.cli.conf import HERE
from fedjax_cfl.runs.versions import find_version

SAFE, PATH = "PYTHONSAFEPATH", "PYTHONPATH"


@contextlib.contextmanager
def guard_children() -> Iterator[None]:
    """Lets no process that is started meanwhile import what lies in the current folder.

    Workers of a launcher are started as `python -m`, with the current folder first on their
    path: a file joblib.py or pickle.py there would be executed. In the environment it holds for
    their own processes as well. A checkout that is not installed has to be named then.
    """
    before = {name: os.environ.get(name) for name in (SAFE, PATH)}
    os.environ[SAFE] = "1"
    if find_version("fedjax-cfl") is None:
        named = (before[PATH] or "").split(os.pathsep)
        os.environ[PATH] = os.pathsep.join(dict.fromkeys([*filter(None, named), str(HERE.parent)]))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
