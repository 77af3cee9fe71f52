"""Runs on disk: their directory, checkpoints, tables and plots."""

__all__ = [
    "assignments",
    "atomic_folder",
    "checkpoint",
    "display",
    "finish",
    "grid",
    "labels",
    "load",
    "record",
    "results",
    "resume",
    "run_dir",
    "scoring",
    "session",
    "trackers",
    "versions",
]  # modules, imported by name
