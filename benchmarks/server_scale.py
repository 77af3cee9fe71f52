"""What does clustering cost the server with 1,000 to 10,000 updates, and is any of it copied?

Seconds of the second call, and the memory that the compiled program takes besides its
input, as XLA plans it. The updates [S, P] of a size class have 4 GB at most; a copy of
them would show as `x input` of 1.

    python benchmarks/server_scale.py
    python benchmarks/server_scale.py --quick     small sizes, under a minute

Measured 2026-11-25 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2, seconds,
and MB of work space in brackets:

    updates x parameters          1,000 x 1e6     3,000 x 3e5    10,000 x 1e5
    EDC, randomized                4.2    (60)     3.4    (18)     3.9     (7)
    cosines with the groups        0.41    (0)     0.34    (0)     0.33    (0)
    K-means++, 10 seedings         0.002 (0.5)     0.007 (1.5)     0.013 (4.8)
    Gram matrix                   11.9     (0)    32.1     (0)
    EDC of the Gram matrix         0.06    (4)     1.1    (36)
    MADC of the Gram matrix        0.34    (9)    17.8    (81)
    complete linkage               0.04    (8)     0.62   (72)

Nothing copies the updates. Randomized EDC, measured apart, is within 2e-5 of the exact one for 1,000
updates x 1e5. What costs is the Gram matrix, at 168 GFLOP/s, and MADC, which
is cubic in S; from some thousand updates on, `measure=edc_randomized` needs neither. Not
measured: several devices, for both cores share these products already.
"""

import csv
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from program import make_parser

from fedjax_cfl.clustering import distances
from fedjax_cfl.clustering.features import edc, edc_randomized, madc
from fedjax_cfl.clustering.hierarchical import agglomerate
from fedjax_cfl.clustering.kmeans import kmeans

SIZES = (1_000, 1_000_000), (3_000, 300_000), (10_000, 100_000)
QUICK = (100, 10_000), (300, 3_000)
GROUPS = 5
MAX_CUBIC = 3_000  # updates: EDC and MADC of a Gram matrix cost 37 times as much for 10,000


def draw_updates(key: jax.Array, clients: int, parameters: int) -> jax.Array:
    """Returns updates [S, P] of `GROUPS` groups."""
    keys = jax.random.split(key, 2)
    centers = jax.random.normal(keys[0], (GROUPS, parameters))
    noise = jax.random.normal(keys[1], (clients, parameters))
    return noise + centers[jnp.arange(clients) % GROUPS]


def measure(function: Callable, *arguments: Any) -> tuple[Any, float, float, float]:
    """Returns (result, seconds, MB of work space, that relative to the arguments)."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    began = time.perf_counter()
    result = jax.block_until_ready(compiled(*arguments))
    seconds = time.perf_counter() - began
    work = compiled.memory_analysis().temp_size_in_bytes
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "nbytes"))
    return result, seconds, work / 1e6, work / held


def measure_server(clients: int, parameters: int, write: Callable) -> None:
    """Measures every step of a clustering of `clients` updates of `parameters` numbers."""

    def step(name: str, function: Callable, *arguments: Any) -> Any:
        result, *numbers = measure(function, *arguments)
        write([clients, parameters, name, *(f"{number:.3g}" for number in numbers)])
        return result

    key = jax.random.key(0)
    delta = {"w": draw_updates(key, clients, parameters)}
    points = step("EDC, randomized", lambda k, d: edc_randomized(k, d, GROUPS), key, delta)
    step("cosines with the groups", distances.cosine, delta, {"w": delta["w"][:GROUPS]})
    labels = step(
        "K-means++, 10 seedings", lambda k, x: kmeans(k, x, GROUPS, 10).labels, key, points
    )
    check_groups(labels)
    if clients <= MAX_CUBIC:
        gram = step("Gram matrix", distances.gram, delta)
        del delta
        points = step("EDC of the Gram matrix", partial(edc, m=GROUPS), gram)
        check_groups(kmeans(key, points, GROUPS, 10).labels)
        apart = step("MADC of the Gram matrix", madc, gram)
        check_groups(step("complete linkage", lambda d: agglomerate(d, GROUPS), apart))


def check_groups(labels: jax.Array) -> None:
    """Stops if the drawn groups were not found."""
    pairs = {(int(found), place % GROUPS) for place, found in enumerate(labels)}
    if len(pairs) > GROUPS:
        sys.exit("the drawn groups were not found")


def main() -> None:
    """Writes the table as CSV."""
    parser = make_parser(__doc__, "small sizes")
    table = csv.writer(sys.stdout)
    table.writerow(["updates", "parameters", "step", "seconds", "work space, MB", "x input"])

    def write(row: list) -> None:
        table.writerow(row)
        sys.stdout.flush()

    for clients, parameters in QUICK if parser.parse_args().quick else SIZES:
        measure_server(clients, parameters, write)


if __name__ == "__main__":
    main()
