"""Clustering of updates and clients, and what follows from it: assignment, detection, migration."""
