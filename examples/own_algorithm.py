"""A method and a drift of one's own: python examples/own_algorithm.py"""

# %%
import functools

import jax.numpy as jnp

import fedjax_cfl as cfl
from fedjax_cfl.data.drift import Drift

ROUNDS = 30
cfl.use_cpu_cores()


def sticky_ifca(task, local, system, *, m, gain=0.1):
    """IFCA whose clients change groups only for a loss that is lower by the share `gain`."""

    def choose(loss, old):  # [S, m]: the losses of all models; [S]: the present group, -1 if none
        best = loss.argmin(1)
        kept = jnp.take_along_axis(loss, old.clip(0)[:, None], 1)[:, 0]
        return jnp.where((old >= 0) & (loss.min(1) > (1 - gain) * kept), old, best)

    return cfl.clustered(task, local, system, m=m, choose=choose)


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


data = cfl.federate(cfl.datasets.digits(), cfl.partition.iid(clients=40))
result = cfl.run(
    functools.partial(sticky_ifca, m=2),
    data,
    local=cfl.Local(lr=0.05, epochs=3),
    system=cfl.select.rr_then_random(20),
    rounds=ROUNDS,
    drift=rename_labels(at=ROUNDS // 3),
    discard="none",
)
for row in result.rows:
    shifted = f", {row['shifted_clients']} clients shifted" if row["shifted_clients"] else ""
    print(f"round {row['round']}: {row['accuracy']:.3f}, {row['group_sizes']}{shifted}")
