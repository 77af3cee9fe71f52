"""What the benchmarks of local training train: clients, cohorts, batches and first
models, the same in every process. Needs only NumPy.

- W1: MLP 784-128-10, W2: multinomial logistic regression 784-10. 1,000 clients with
FedProx's power-law sizes (9 .. 1,707 training
  samples, median 22), E = 10.
- W3: two 5x5 convolutions (32 and 64 filters), each followed by relu and 2x2
max-pooling, and a dense layer. 200 clients of 86 .. 106
  samples, E = 1.

All of them: plain SGD 0.03, B = 10 with the short last batch kept, random pixels and
labels, 20 clients a round.
"""

import time
from typing import NamedTuple

import numpy as np

FEATURES, SIDE, CLASSES, BATCH, LR, COHORT = 784, 28, 10, 10, 0.03, 20
CLIENTS, EPOCHS = 1000, 10  # of W1 and W2


class Workload(NamedTuple):
    """Who trains what, and how."""

    name: str
    what: str
    model: str  # mlp | mclr | cnn
    clients: int  # K
    epochs: int  # E
    batch: int = BATCH  # B

    def check(self) -> "Workload":
        """Returns the same with two epochs of full batches: what the order of samples
        cannot change, so that results can be compared.
        """
        return self._replace(epochs=2, batch=int(sizes(self.model).max()))


WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", "MLP 784-128-10, power-law sizes, E=10", "mlp", CLIENTS, EPOCHS),
        Workload("W2", "MCLR 784-10, power-law sizes, E=10", "mclr", CLIENTS, EPOCHS),
        Workload("W3", "CNN 5x5x32, 5x5x64, 10, like sizes, E=1", "cnn", 200, 1),
    )
}


def sizes(model: str = "mlp") -> np.ndarray:
    """Returns the training samples of each client: FedProx's MNIST recipe for two
    digits a client (FlexCFL, section 5), or W3's.
    """
    if model == "cnn":
        return np.random.RandomState(3).randint(86, 107, WORKLOADS["W3"].clients)
    rng = np.random.RandomState(0)
    counts = np.array([6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
    props = rng.lognormal(0, 2.0, (10, 100, 2))
    props = np.array([[[v]] for v in counts - 1000]) * props / props.sum((1, 2), keepdims=True)
    held = [
        10 + sum(int(props[(u + j) % 10, u // 10, j]) for j in range(2)) for u in range(CLIENTS)
    ]
    return (0.9 * np.array(held)).astype(int)


def population(model: str = "mlp"):
    """Returns (x [N, 784], or [N, 28, 28, 1] for the CNN, y [N] int32, start [K + 1]):
    client k holds start[k] : start[k + 1].
    """
    size = sizes(model)
    rng = np.random.RandomState(1)
    x = rng.standard_normal((size.sum(), FEATURES)).astype(np.float32)
    y = rng.randint(0, CLASSES, size.sum()).astype(np.int32)
    x = x.reshape(-1, SIDE, SIDE, 1) if model == "cnn" else x
    return x, y, np.concatenate([[0], np.cumsum(size)])


def cohorts(work: Workload, rounds: int, count: int = COHORT) -> np.ndarray:
    """Returns the clients [rounds, count] of each round; the first two meet a last
    batch of every length, for those who compile each.
    """
    each = [np.random.RandomState(100 + number) for number in range(rounds)]
    return np.stack([rng.choice(work.clients, count, replace=False) for rng in each])


def initial(model: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (kernel, bias) of each layer, first to last: kernels [in, out] or [5, 5,
    in, out], channels last, Glorot-uniform; no bias.
    """
    shapes = {
        "mlp": [(FEATURES, 128), (128, CLASSES)],
        "mclr": [(FEATURES, CLASSES)],
        "cnn": [(5, 5, 1, 32), (5, 5, 32, 64), (SIDE // 4 * SIDE // 4 * 64, CLASSES)],
    }
    rng = np.random.RandomState(4)

    def layer(*shape):
        area = int(np.prod(shape[:-2]))
        limit = np.sqrt(6 / (area * (shape[-2] + shape[-1])))
        return rng.uniform(-limit, limit, shape).astype(np.float32), np.zeros(shape[-1], np.float32)

    return [layer(*shape) for shape in shapes[model]]


def products(model: str) -> list[tuple[int, int, int, int]]:
    """Returns (rows per sample, depth, columns, uses) of each layer's matrix product;
    uses: forward, and one or two in the gradient.
    """
    return {
        "mlp": [(1, FEATURES, 128, 2), (1, 128, CLASSES, 3)],
        "mclr": [(1, FEATURES, CLASSES, 2)],
        "cnn": [
            (SIDE**2, 25, 32, 2),
            (SIDE**2 // 4, 25 * 32, 64, 3),
            (1, SIDE**2 // 16 * 64, CLASSES, 3),
        ],
    }[model]


def flops(model: str) -> int:
    """Returns the floating-point operations of the matrix products of one sample's gradient."""
    return sum(2 * rows * depth * columns * uses for rows, depth, columns, uses in products(model))


def gemm_peak(work: Workload, seconds: float = 1.0) -> dict[str, float]:
    """Returns GFLOP/s of NumPy's sgemm at the shapes of a step of this workload and at
    a large square.
    """
    rng = np.random.default_rng(0)
    own = []
    for rows, depth, columns, uses in products(work.model):
        m, k, n = work.batch * rows, depth, columns
        # forward, gradient of the kernel, gradient of the input
        own += [(m, k, n), (k, m, n), (m, n, k)][:uses]
    best = {}
    for name, shapes in (("own shapes", own), ("2048^3", [(2048, 2048, 2048)])):
        pairs = [
            [rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n))]
            for m, k, n in shapes
        ]
        work_done = 2 * sum(m * k * n for m, k, n in shapes)
        ends, fastest = time.perf_counter() + seconds, np.inf
        while time.perf_counter() < ends:
            began = time.perf_counter()
            for a, b in pairs:
                a @ b
            fastest = min(fastest, time.perf_counter() - began)
        best[name] = work_done / fastest / 1e9
    return best
