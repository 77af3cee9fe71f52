"""Published tables and figures, reproduced cell by cell."""

__all__ = [
    "cell_process",
    "cells",
    "figures",
    "processes",
    "records",
    "report",
    "report_plot",
    "runner",
]  # modules, imported by name
