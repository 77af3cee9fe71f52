"""Runs on disk: their directory, checkpoints, tables and plots."""
