"""Published tables and figures, reproduced cell by cell."""

__all__ = [
    "cell_process",
    "cells",
    "fedgroup_fig5",
    "fesem_fig3",
    "fielding_server",
    "figures",
    "md_icfl_figs",
    "processes",
    "records",
    "report",
    "report_plot",
    "runner",
]  # modules, imported by name
