"""The command line. Hydra lives here and nowhere else."""

__all__ = [
    "build",
    "choices",
    "conf",
    "doctor",
    "download",
    "extras",
    "flags",
    "launch",
    "main",
    "outputs",
    "overrides",
    "predict",
    "rules",
    "sweep",
]  # modules, imported by name
