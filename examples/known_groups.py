"""Who is in which group, against the truth: python examples/known_groups.py"""

# %%
import numpy as np

import fedjax_cfl as cfl

ROUNDS = 30
cfl.use_cpu_cores()


def rename(*arrays):
    """Each of four groups of clients has its own names for the ten classes."""
    return cfl.concept.permute_labels(*arrays, groups=4)


data = cfl.federate(cfl.datasets.digits(), cfl.partition.iid(clients=40), rename)
local = cfl.Local(lr=0.05)
method = cfl.algorithms.flexcfl(m=4)
result = cfl.run(method, data, local=local, rounds=ROUNDS, discard="none")

found = np.asarray(result.state.assignment)  # [K], -1: never met
truth = np.asarray(data.concept)  # [K]
table = np.zeros((4, 4), int)
np.add.at(table, (found[found >= 0], truth[found >= 0]), 1)
print("clients of each found group (rows) in each true group (columns):")
print(table)
last = result.rows[-1]
print(f"adjusted Rand index {last['ari']:.2f}, accuracy {last['accuracy']:.3f}")
