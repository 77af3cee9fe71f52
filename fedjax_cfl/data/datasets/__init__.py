"""Data sets: each function returns a checked `Pool` of labelled samples, not yet dealt
to clients.
"""

from fedjax_cfl.data.datasets.digit_sources import multi_source_digits
from fedjax_cfl.data.datasets.files import from_arrays, npy, npz
from fedjax_cfl.data.datasets.huggingface import huggingface
from fedjax_cfl.data.datasets.image_folder import image_folder
from fedjax_cfl.data.datasets.images import (
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    femnist,
    mnist,
    rotated_mnist,
)
from fedjax_cfl.data.datasets.leaf_json import leaf
from fedjax_cfl.data.datasets.leaf_sets import celeba, sent140, shakespeare
from fedjax_cfl.data.datasets.synthetic import circle, sea, sine, synthetic
from fedjax_cfl.data.datasets.table import csv, elec2, from_frame, jsonl, parquet

__all__ = [
    "celeba", "cifar10", "cifar100", "circle", "csv", "digits", "elec2", "fashion_mnist",
    "femnist", "from_arrays", "from_frame", "huggingface", "image_folder",
    "jsonl", "leaf", "mnist", "multi_source_digits", "npy", "npz", "parquet", "rotated_mnist",
    "sea", "sent140", "shakespeare", "sine", "synthetic",
]  # fmt: skip
