"""The process of one cell: `python -P cell_process.py ARGUMENTS` is `fedjax-cfl ARGUMENTS` that
ends with its parent.

Standard input is a pipe whose other end only the parent holds. The operating system
closes that end when the parent ends, however it ends: the read below returns, and the
cell ends at once. What it has not saved is lost, as with any kill.
"""

import os
import runpy
import threading


def end_with_parent() -> None:
    """Ends this process when its parent does. Standard input must be the parent's pipe."""

    def wait():
        while os.read(0, 1024):  # the parent writes nothing; only the pipe's end matters
            pass
        os._exit(137)  # as a shell names a process that was killed

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("fedjax_cfl", run_name="__main__", alter_sys=True)
