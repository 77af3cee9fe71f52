"""Clustering of updates and clients, and what follows from it: assignment, detection, migration."""

__all__ = [
    "assign",
    "distances",
    "features",
    "hierarchical",
    "kmeans",
    "metric_kmeans",
    "migrate",
    "model_distance",
    "recluster",
    "represent",
    "shift_detection",
    "synthesis",
]  # modules, imported by name
