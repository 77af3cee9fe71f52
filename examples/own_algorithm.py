"""A method and a drift of one's own: python examples/own_algorithm.py"""

# %%
import jax
import jax.numpy as jnp

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.assign import every_round
from fedjax_cfl.data.drift import Drift
from fedjax_cfl.method import Method
from fedjax_cfl.round.engine import federated
from fedjax_cfl.round.start import random_groups
from fedjax_cfl.system.reports import make_report
from fedjax_cfl.system.select import current_groups

ROUNDS = 30
cfl.use_cpu_cores()


def sticky_ifca(task, local, system, *, m: int, gain: float = 0.1):
    """IFCA whose clients change groups only for a loss that is lower by the share `gain`."""
    losses = over_clients(training_loss(task), local.execution)

    def choose(r):
        loss = losses(r.cohort, r.data, r.state.groups)  # [S, m]: every client, every model
        best = jnp.argmin(loss, axis=1)  # [S]
        old = current_groups(r.state, r.cohort)  # [S], -1 for a newcomer
        old_loss = jnp.take_along_axis(loss, jnp.maximum(old, 0)[:, None], axis=1)[:, 0]
        stay = (old >= 0) & (loss.min(axis=1) > (1 - gain) * old_loss)
        return jnp.where(stay, old, best), make_report()

    hooks = Method(sgd(task, local), start=random_groups(task, m), assign=every_round(choose))
    return federated(task, local, system, hooks)


def rename_labels(at: int):
    """From round `at` on, the first half of the clients counts its classes backwards."""

    def init(key, data):
        return data, ()

    def apply(key, round, data, memory, warm):
        hit = (round == at) & (jnp.arange(data.num_clients) < data.num_clients // 2)  # [K]
        renamed = hit[jnp.maximum(data.owner, 0)]  # [N]
        y = jnp.where(renamed, data.num_classes - 1 - data.y, data.y)
        return data.replace(y=y), memory, hit

    return Drift(init, apply)


pool = cfl.datasets.digits()
data = cfl.federate(pool, cfl.partition.iid(pool, clients=40, seed=0))
task = cfl.as_task(cfl.models.MCLR(num_classes=10), pool.x.shape[1:], 10)
local = cfl.Local(lr=0.05, epochs=3, batch_size=10)
result = cfl.run(
    sticky_ifca(task, local, cfl.select.rr_then_random(20), m=2),
    task,
    data,
    jax.random.key(0),
    rounds=ROUNDS,
    drift=rename_labels(at=ROUNDS // 3),
    discard="none",
)
for row in result.rows:
    shifted = f", {row['shifted_clients']} clients shifted" if row["shifted_clients"] else ""
    print(f"round {row['round']}: {row['accuracy']:.3f}, {row['group_sizes']}{shifted}")
