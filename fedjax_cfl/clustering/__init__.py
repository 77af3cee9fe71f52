"""Clustering of updates and clients, and what follows from it: assignment, detection, migration."""

__all__ = [
    "assign",
    "distances",
    "features",
    "hierarchical",
    "kmeans",
    "metric_kmeans",
    "migrate",
    "recluster",
]  # modules, imported by name
