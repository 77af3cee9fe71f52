"""Reads run directories, and compares, draws and reports what is in them."""

__all__ = [
    "compare",
    "compare_inputs",
    "compare_outputs",
    "flows",
    "plot",
    "plot_costs",
    "plot_found",
    "plot_groups",
    "relative",
    "report",
    "statistics",
]  # modules, imported by name
