"""Published tables and figures, reproduced cell by cell."""

__all__ = [
    "cell_process",
    "cells",
    "figures",
    "processes",
    "report",
    "runner",
]  # modules, imported by name
