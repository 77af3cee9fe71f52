"""Who is in which group, against the truth: python examples/known_groups.py"""

# %%
import jax
import numpy as np

import fedjax_cfl as cfl

ROUNDS = 30
cfl.use_cpu_cores()

pool = cfl.datasets.digits()


def rename(*arrays):
    """Each of four groups of clients has its own names for the ten classes."""
    return cfl.concept.permute_labels(*arrays, groups=4)


data = cfl.federate(pool, cfl.partition.iid(pool, clients=40, seed=0), rename)
task = cfl.as_task(cfl.models.MCLR(num_classes=10), pool.x.shape[1:], 10)
local = cfl.Local(lr=0.05, epochs=5, batch_size=10)
algorithm = cfl.algorithms.flexcfl(task, local, cfl.select.rr_then_random(20), m=4)
result = cfl.run(algorithm, task, data, jax.random.key(0), rounds=ROUNDS, discard="none")

found = np.asarray(algorithm.serve(result.state).model_index)  # [K], -1: never met
truth = np.asarray(data.concept)  # [K]
table = np.zeros((4, 4), int)
np.add.at(table, (found[found >= 0], truth[found >= 0]), 1)
print("clients of each found group (rows) in each true group (columns):")
print(table)
last = result.rows[-1]
print(f"adjusted Rand index {last['ari']:.2f}, accuracy {last['accuracy']:.3f}")
