"""Where does a round's time go: how much of it is local training?

1,000 power-law MNIST-sized clients (random pixels, a linear teacher for each true
group), MLP 784-128-10 with L2, K = 20, E = 10, B = 10; all test samples are evaluated
after every round. Medians over 20 rounds, each program compiled before:

- met: rounds 60 on, when every client has been met;
- cold: FlexCFL's first rounds, where the whole cohort is pre-trained and joins;
- swap_all: rounds 60 on, p = 0.05: some fifty clients a round swap their data, are
detected, pre-trained and join anew.

    python benchmarks/round_breakdown.py
    python benchmarks/round_breakdown.py --quick     fewer rounds, under two minutes

Measured 2026-11-23 on 2 CPU cores (AMD EPYC, AVX-512), Python 3.11, jax 0.10.2,
milliseconds:

    one product of all 6,167 test samples with the first layer: 6.0
                                round   training      other evaluation not training
    FedAvg, met                  21.3       14.6        0.8        5.9        31%
    IFCA, met                    31.1       14.8        5.6       10.7        52%
    FlexCFL, cold                39.5       19.3       11.6        8.6        51%
    FlexCFL, met                 29.1       14.7        3.7       10.7        49%
    FlexCFL, swap_all            68.9       15.6       41.8       11.5        77%

Training here is in sample space (`dual`), which takes about half the time of SGD on the
kernel and so doubles the share of the rest. What is left is arithmetic: a forward pass
over some 6,000 test samples, twice in clustered methods (their own models and the
auxiliary one), and 2,500 pre-training steps a round under swap_all, against 1,300 of
training. The two products of the first layer alone are 12 ms, as much as the
evaluation, and 44 % of 12 + 15: an evaluation of both every round leaves IFCA and
FlexCFL more than 25 % outside training however it is written.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from program import make_parser
from workloads import BATCH, CLASSES, CLIENTS, EPOCHS, FEATURES, LR, population

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.local import full_work
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.data import drift
from fedjax_cfl.keys import SELECT, TRAIN, derive_key
from fedjax_cfl.sharding import replicated_sharding
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.simulation.rounds import init_data_state, run_round

COHORT, GROUPS = 20, 3


def federation(mesh) -> cfl.FederatedData:
    """Returns the clients: every tenth sample is a test sample, labels follow the
    teacher of the client's group.
    """
    x, _, start = population()
    owner = np.repeat(np.arange(CLIENTS), np.diff(start)).astype(np.int32)
    drawn = np.random.RandomState(2).standard_normal((GROUPS, FEATURES, CLASSES))
    teacher = drawn.astype(np.float32)
    y = np.zeros(owner.size, np.int32)
    for group in range(GROUPS):
        mine = owner % GROUPS == group
        y[mine] = np.argmax(x[mine] @ teacher[group], axis=1)
    held = cfl.Partition(np.arange(y.size), owner, np.arange(y.size) % 10 == 9)
    return jax.device_put(cfl.federate(cfl.Pool(x, y, CLASSES), held), replicated_sharding(mesh))


def measured(
    name: str, algorithm, task, trains: cfl.Local, data, shift, first: int, rounds: int
) -> None:
    """Prints one line: a round with evaluation, its parts, and the share of local training."""
    key, mesh = jax.random.key(0), trains.execution.mesh
    data = drift.bound_client_samples(data, shift)
    solve = over_clients(sgd(task, trains), trains.execution)
    draw = cfl.select.rr_then_random(COHORT).draw

    @jax.jit
    def start(key, data):
        return algorithm.init(key, data), init_data_state(shift, key, data)

    @jax.jit
    def step(key, state, data_state, data):
        return run_round(algorithm, shift, key, state, data_state, data)

    @jax.jit
    def score(state, data_state, data):
        now = data_state.apply_to(data)
        return evaluate.evaluate_all(algorithm, task, mesh, state, now, True)[0]

    @jax.jit
    def train(key, state, data_state, data):
        now, round = data_state.apply_to(data), state.round
        ids = draw(derive_key(key, SELECT, round), round, np.ones(CLIENTS))
        cohort = make_cohort(ids, now, trains.execution)
        work = full_work(jnp.maximum(state.assignment[cohort.ids], 0))
        return solve(cohort, now, (derive_key(key, TRAIN, round), state.groups), work)

    def timed(function, *arguments):
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        return result, time.perf_counter() - began

    carry, seconds = start(key, data), []
    for number in range(first + rounds):
        before = carry
        (*carry, _), whole = timed(step, key, *before, data)
        if number < first:
            continue
        seconds.append((whole, timed(score, *carry, data)[1], timed(train, key, *before, data)[1]))
    whole, scored, trained = 1000 * np.median(np.array(seconds[2:]), axis=0)
    share = 1 - trained / (whole + scored)
    print(
        f"{name:24s} {whole + scored:8.1f} {trained:10.1f} {whole - trained:10.1f} {scored:10.1f}"
        f" {share:10.0%}",
        flush=True,
    )


def product(data) -> float:
    """Returns the milliseconds of one NumPy product of all test samples with the first
    layer: no forward pass takes less.
    """
    x, kernel = np.asarray(data.x[data.test.order]), np.ones((FEATURES, 128), np.float32)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        x @ kernel
        seconds.append(time.perf_counter() - began)
    return 1000 * float(np.median(seconds[2:]))


def main() -> None:
    """Prints the table."""
    quick = make_parser(__doc__, "5 rounds, one line").parse_args().quick
    cfl.use_cpu_cores()
    mesh = cfl.make_mesh()
    data = federation(mesh)
    task = cfl.as_task(cfl.models.MLP(num_classes=CLASSES), (FEATURES,), CLASSES)
    trains = cfl.Local(LR, EPOCHS, BATCH, execution=cfl.make_execution(mesh))
    select, zoo = cfl.select.rr_then_random(COHORT), cfl.algorithms
    flexcfl = zoo.flexcfl(task, trains, select, m=GROUPS)
    lines = [
        ("FedAvg, met", zoo.fedavg(task, trains, select), drift.none(), 60),
        ("IFCA, met", zoo.ifca(task, trains, select, m=GROUPS), drift.none(), 60),
        ("FlexCFL, cold", flexcfl, drift.none(), 10),
        ("FlexCFL, met", flexcfl, drift.none(), 60),
        ("FlexCFL, swap_all", flexcfl, drift.swap_all(), 60),
    ]
    print(f"jax {jax.__version__}, {mesh.size} x {jax.devices()[0].device_kind}; milliseconds")
    print(
        f"one product of all {data.test.order.size:,} test samples with the first layer:"
        f" {product(data):.1f}"
    )
    print(
        f"{'':24s} {'round':>8s} {'training':>10s} {'other':>10s} {'evaluation':>10s}"
        f" {'not training':>12s}"
    )
    for name, algorithm, shift, first in lines[:1] if quick else lines:
        measured(
            name, algorithm, task, trains, data, shift, 2 if quick else first, 5 if quick else 22
        )


if __name__ == "__main__":
    main()
