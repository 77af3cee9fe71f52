"""Runs on disk: their directory, checkpoints, tables and plots."""

__all__ = [
    "assignments",
    "atomic_folder",
    "checkpoint",
    "display",
    "finish",
    "grid",
    "identity",
    "labels",
    "load",
    "record",
    "results",
    "resume",
    "run_dir",
    "scoring",
    "session",
    "signals",
    "trackers",
    "versions",
]  # modules, imported by name
