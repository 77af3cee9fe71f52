"""The command line. Hydra lives here and nowhere else."""
