"""Is local training faster than FedJAX's `for_each_client` on the same machine, in the same run?

FedAvg local training of the same cohorts of 1,000 power-law MNIST-sized clients (random pixels), SGD 0.03, B = 10, E = 10.
FedJAX runs with its `jit` backend, the fastest it has on a current JAX, in a virtual environment of its own.

    python benchmarks/versus_fedjax.py --fedjax PYTHON      PYTHON: the interpreter of that environment
    python benchmarks/versus_fedjax.py --quick              only ours, two rounds

Measured 2026-11-21 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2 on both sides, FedJAX 0.0.17; 9 rounds of 20 clients, the
first two dropped as compilation, 3 alternating repetitions, least..most:

    model                ours, client updates/s   FedJAX jit   ratio (median)
    MLP 784-128-10       522..578                 106..129     4.06..5.45 (4.51)
    MCLR 784-10          979..1105                153..266     3.88..7.20 (5.42)

The environment: pip install jax==0.10.2 dm-haiku optax chex msgpack absl-py numpy pandas tqdm requests, then pip install --no-deps fedjax.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CLIENTS, FEATURES, CLASSES, BATCH, EPOCHS, LR = 1000, 784, 10, 10, 10, 0.03
HIDDEN = {"mlp": [128], "mclr": []}


def sizes() -> np.ndarray:
    """Training samples of each client: FedProx's MNIST recipe for two digits a client, as FlexCFL's section 5 uses it."""
    rng = np.random.RandomState(0)
    counts = np.array([6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
    props = rng.lognormal(0, 2.0, (10, 100, 2))
    props = np.array([[[v]] for v in counts - 1000]) * props / props.sum((1, 2), keepdims=True)
    held = [10 + sum(int(props[(u + j) % 10, u // 10, j]) for j in range(2)) for u in range(CLIENTS)]
    return (0.9 * np.array(held)).astype(int)


def population():
    """Returns (x [N, 784], y [N], start [K + 1]); the same in every process."""
    size = sizes()
    rng = np.random.RandomState(1)
    x = rng.standard_normal((size.sum(), FEATURES)).astype(np.float32)
    return x, rng.randint(0, CLASSES, size.sum()).astype(np.int32), np.concatenate([[0], np.cumsum(size)])


def cohort(number: int, count: int) -> np.ndarray:
    """Returns the clients of one round."""
    return np.random.RandomState(100 + number).choice(CLIENTS, count, replace=False)


def ours(model: str, count: int, rounds: int) -> list[float]:
    """Returns seconds per round, the first ones included, of this package's FedAvg."""
    import jax

    import fedjax_cfl as cfl

    cfl.use_cpu_cores()
    mesh = cfl.mesh_of()
    x, y, start = population()
    owner = np.repeat(np.arange(CLIENTS), np.diff(start)).astype(np.int32)
    held = cfl.Holdings(np.arange(y.size), owner, np.zeros(y.size, bool))
    data = jax.device_put(cfl.federate(cfl.Pool(x, y, CLASSES), held), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    module = cfl.models.MLP(num_classes=CLASSES, hidden=tuple(HIDDEN[model]))
    task = cfl.as_task(module, (FEATURES,), CLASSES, l2=0.0)
    table = np.stack([cohort(number, count) for number in range(rounds)])
    algorithm = cfl.algorithms.fedavg(task, cfl.Local(LR, EPOCHS, BATCH, None, mesh), cfl.select.listed(table))
    key = jax.random.key(0)
    state, step = jax.jit(algorithm.init)(key, data), jax.jit(algorithm.round)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        state, _ = jax.block_until_ready(step(key, state, data))
        seconds.append(time.perf_counter() - started)
    return seconds


def fedjax(model: str, count: int, rounds: int) -> list[float]:
    """Returns seconds per round of FedJAX's for_each_client with the jit backend, aggregation included."""
    import haiku as hk
    import jax
    import jax.numpy as jnp

    jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls a name that JAX has dropped
    import fedjax

    x, y, start = population()
    data = [fedjax.ClientDataset({"x": x[a:b], "y": y[a:b]}) for a, b in itertools.pairwise(start)]
    network = hk.transform(lambda batch: hk.nets.MLP([*HIDDEN[model], CLASSES])(batch["x"]))
    params = network.init(jax.random.PRNGKey(0), {"x": x[:1]})

    def loss(params, batch, rng):
        logits = network.apply(params, rng, batch)
        return jnp.mean(-jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1))

    def client_init(shared, rng):
        return {"params": shared, "rng": rng}

    def client_step(state, batch):
        rng, used = jax.random.split(state["rng"])
        grads = jax.grad(loss)(state["params"], batch, used)
        return {"params": jax.tree_util.tree_map(lambda p, g: p - LR * g, state["params"], grads), "rng": rng}

    def client_final(shared, state):
        return jax.tree_util.tree_map(jnp.subtract, state["params"], shared)

    fedjax.set_for_each_client_backend("jit")
    train = fedjax.for_each_client(client_init, client_step, client_final)
    seconds = []
    for number in range(rounds):
        ids = cohort(number, count)
        started = time.perf_counter()
        shuffled = [
            (int(i), data[i].shuffle_repeat_batch(batch_size=BATCH, num_epochs=EPOCHS, seed=number), jax.random.PRNGKey(i)) for i in ids
        ]
        total, weight = jax.tree_util.tree_map(jnp.zeros_like, params), 0
        for client, delta in train(params, shuffled):
            n = len(data[client])
            total = jax.tree_util.tree_map(lambda t, d, n=n: t + n * d, total, delta)
            weight += n
        params = jax.block_until_ready(jax.tree_util.tree_map(lambda p, t, w=weight: p + t / w, params, total))
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(python: str, who: str, model: str, count: int, rounds: int) -> list[float]:
    """Runs one side in its own process and returns its seconds per round."""
    command = [python, __file__, "--side", who, "--model", model, "--count", str(count), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints client updates per second of both sides, round by round over the same cohorts, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fedjax", metavar="PYTHON", help="interpreter of the environment that has fedjax")
    parser.add_argument("--side", choices=("ours", "fedjax"))
    parser.add_argument("--model", choices=tuple(HIDDEN), default="mlp")
    parser.add_argument("--count", type=int, default=20, help="clients per round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3, help="alternating repetitions")
    parser.add_argument("--quick", action="store_true", help="only ours, two rounds")
    given = parser.parse_args()
    if given.side:
        print(json.dumps({"ours": ours, "fedjax": fedjax}[given.side](given.model, given.count, given.rounds)))
        return
    if given.quick:
        print(f"ours, {given.model}: {given.count / measure(sys.executable, 'ours', given.model, given.count, 3)[-1]:.0f} client updates/s")
        return
    if not given.fedjax:
        parser.error("--fedjax PYTHON is needed, or --quick")
    for model in HIDDEN:
        speed = {"ours": [], "fedjax": []}
        for _ in range(given.repeats):
            for who, python in (("ours", sys.executable), ("fedjax", given.fedjax)):
                seconds = measure(python, who, model, given.count, given.rounds)[2:]  # the first rounds compile
                speed[who].append(given.count * len(seconds) / sum(seconds))
        ratios = [a / b for a, b in zip(speed["ours"], speed["fedjax"], strict=True)]
        text = ", ".join(f"{who} {min(v):.0f}..{max(v):.0f}" for who, v in speed.items())
        print(
            f"{model}, K={given.count}: client updates/s {text}; ratio {min(ratios):.2f}..{max(ratios):.2f}, median {np.median(ratios):.2f}"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
