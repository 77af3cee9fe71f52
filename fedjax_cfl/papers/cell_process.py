"""The process of one cell: `python -P cell_process.py MODULE ARGUMENTS` runs a module as
`python -m MODULE ARGUMENTS` does, and ends with its parent.

Standard input is a pipe whose other end only the parent holds. The operating system
closes that end when the parent ends, however it ends: the read below returns, and the
cell ends at once. What it has not saved is lost, as with any kill.
"""

import os
import runpy
import sys
import threading

EXIT_STATUS = 137  # as a shell names a process that was killed
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def end_with_parent() -> None:
    """Ends this process when its parent does. Standard input must be the parent's pipe."""

    def wait():
        while os.read(0, 1024):  # the parent writes nothing; only the pipe's end matters
            pass
        os._exit(EXIT_STATUS)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    if ROOT not in sys.path:  # of a checkout: the cell runs the code that its parent runs
        sys.path.insert(0, ROOT)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
