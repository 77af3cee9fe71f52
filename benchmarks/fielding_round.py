"""What does a round of Fielding cost beside one of FedAvg?

1,000 clients of MNIST's size whose labels drift gradually, new data every ten rounds, 20
clients a round, 20 steps of 20 samples with FedProx's pull; softmax regression and the MLP
784-128-10. Both methods train on the same stream with the same quotas, and take turns round by
round; nothing is evaluated. A round without arrivals is one of training alone (quiet); in the
round of an arrival (event) clients report, move and are perhaps all clustered again, for K = 2
to 10. All programs are compiled before.

    python benchmarks/fielding_round.py
    python benchmarks/fielding_round.py --quick     12 rounds of softmax regression

Measured 2026-11-25 on 2 CPU cores (AMD EPYC), Python 3.11, jax 0.10.2, with nothing beside
it, milliseconds; FedAvg, then Fielding:

                   quiet  ratio               event  all, ratio
    MCLR        4.5      4.8   1.07        5.5      6.1        1.13
    MLP        15.7     21.9   1.35       16.8     22.9        1.40

The goal of 1.1 is reached by MCLR and missed by the MLP, where the server has ten models of 101,770
parameters, 4 MB, for FedAvg's one, beside only 20 steps of 20 clients. The parts alone, one model
against ten, milliseconds: averaging 0.5 against 1.7, of which adding up over the devices is 1; the
server's step 0.3 and 0.8; comparing each update with its group's step, for what a round reports,
0.5 and 3.2. The last, a loop over clients that reads only their own group's models would do in 1.9
whatever their number, which FedAvg would pay for, and not reach the goal. The other 2 ms are
the training itself, from ten models where one stays in the cache.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from program import make_parser
from workloads import CLASSES, CLIENTS, COHORT, FEATURES, population

import fedjax_cfl as cfl
from fedjax_cfl.data import drift, stream
from fedjax_cfl.sharding import replicated_sharding
from fedjax_cfl.simulation.rounds import init_data_state, run_round
from fedjax_cfl.system import select

PERIOD, MU = 10, 0.01


def federation(mesh) -> cfl.FederatedData:
    """Returns the clients: random pixels and labels, every tenth sample a test sample."""
    x, y, start = population()
    owner = np.repeat(np.arange(CLIENTS), np.diff(start)).astype(np.int32)
    held = cfl.Partition(np.arange(y.size), owner, np.arange(y.size) % 10 == 9)
    pool = cfl.Pool(x, y.astype(np.int32), CLASSES)
    return jax.device_put(cfl.federate(pool, held), replicated_sharding(mesh))


class Side(NamedTuple):
    """One method: (carry, data) -> (carry, info) in a program of its own, and what it carries."""

    step: Callable
    carry: tuple


def begin(algorithm: cfl.Algorithm, shift, data: cfl.FederatedData) -> Side:
    """Returns a method after its start."""
    key = jax.random.key(0)
    start = jax.jit(lambda data: (algorithm.init(key, data), init_data_state(shift, key, data)))

    def step(carry, data):
        return run_round(algorithm, shift, key, *carry, data)

    # as a run has it: models are updated in place
    return Side(jax.jit(step, donate_argnums=0), start(data))


def compare(name: str, model, data: cfl.FederatedData, mesh, rounds: int) -> None:
    """Prints one line: medians of both methods' quiet rounds and events, and their ratios."""
    shift = stream.gradual(epsilon=0.4, intervals=rounds, period=PERIOD, retained=3 * PERIOD)
    data = drift.bound_client_samples(data, shift)
    task = cfl.as_task(model, (FEATURES,), CLASSES)
    local = cfl.Local(0.05, 1, 20, steps=20, execution=cfl.make_execution(mesh))
    by_group, zoo = select.by_group(COHORT), cfl.algorithms
    sides = [
        begin(zoo.fedprox(task, local, by_group, mu=MU), shift, data),
        begin(zoo.fielding(task, local, by_group, m=10, mu=MU), shift, data),
    ]
    table = np.empty((rounds, 2))  # milliseconds
    for round in range(rounds):
        for place in (0, 1) if round % 4 < 2 else (1, 0):  # events are odd rounds
            side, began = sides[place], time.perf_counter()
            *carry, _ = jax.block_until_ready(side.step(side.carry, data))
            table[round, place] = 1000 * (time.perf_counter() - began)
            sides[place] = side._replace(carry=tuple(carry))
    number = np.arange(rounds)
    event, warm = (number + 1) % PERIOD == 0, number > 1
    quiet, events = (np.median(table[warm & rows], axis=0) for rows in (~event, event))
    whole = table[warm].mean(axis=0)
    ratio = np.median(table[warm & ~event, 1] / table[warm & ~event, 0])
    print(
        f"{name:6s} {quiet[0]:8.1f} {quiet[1]:8.1f} {ratio:6.2f} {events[0]:10.1f}"
        f" {events[1]:8.1f} {whole[1] / whole[0]:11.2f}",
        flush=True,
    )


def main() -> None:
    """Prints the table."""
    quick = make_parser(__doc__, "12 rounds of softmax regression").parse_args().quick
    cfl.use_cpu_cores()
    mesh = cfl.make_mesh()
    data = federation(mesh)
    print(f"jax {jax.__version__}, {mesh.size} x {jax.devices()[0].device_kind}; milliseconds")
    print(f"{'':6s} {'quiet':>17s} {'ratio':>6s} {'event':>19s} {'all, ratio':>11s}")
    models = {"MCLR": cfl.models.MCLR(CLASSES), "MLP": cfl.models.MLP(num_classes=CLASSES)}
    for name, model in list(models.items())[:1] if quick else models.items():
        compare(name, model, data, mesh, 12 if quick else 120)


if __name__ == "__main__":
    main()
