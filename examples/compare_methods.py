# %% [markdown]
# # Six methods on your own data
#
# `FILE` is an `.npz` with `x` [N, ...], `y` [N] and `client` [N]; `split` [N] and `concept` [K] are
# used if they are there. Where there is no such file, the next cell makes one: digits, held by 24
# clients of four kinds that turn their images differently.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedjax_cfl as cfl

FILE, ROUNDS, GROUPS, COHORT = "my.npz", 40, 4, 12
cfl.use_cpu_cores()

if not Path(FILE).exists():
    digits = cfl.datasets.digits()
    client = np.arange(len(digits.y)) % 24
    x = np.stack([np.rot90(image, k % 4) for image, k in zip(digits.x, client, strict=True)])
    np.savez(FILE, x=x, y=digits.y, client=client, concept=np.arange(24) % 4)

# %% [markdown]
# Every method trains the same model on the same clients, with the same step size. A fifth of each
# client's samples is for testing.

# %%
data = cfl.federate(cfl.datasets.npz(FILE), cfl.partition.by_user(test_fraction=0.2))
common = {"local": cfl.Local(lr=0.05, epochs=3), "system": cfl.select.rr_then_random(COHORT)}
methods = {
    "FedAvg": cfl.algorithms.fedavg(),
    "FedProx": cfl.algorithms.fedprox(mu=0.1),
    "NonFed": cfl.algorithms.nonfed(),
    "IFCA": cfl.algorithms.ifca(m=GROUPS),
    "FeSEM": cfl.algorithms.fesem(m=GROUPS),
    "FlexCFL": cfl.algorithms.flexcfl(m=GROUPS, alpha=3),  # founders per group
}
results = {
    name: cfl.run(method, data, **common, rounds=ROUNDS, discard="none")
    for name, method in methods.items()
}

# %% [markdown]
# ## The table
#
# Accuracy of all test samples, of the worst tenth of clients, the adjusted Rand index of the groups
# (where the true ones are known), and what was sent both ways.

# %%
print(f"{'':8} {'accuracy':>9} {'worst 10%':>10} {'ARI':>6} {'MB sent':>8}")
for name, result in results.items():
    last = result.rows[-1]
    sent = (last["bytes_up"] + last["bytes_down"]) / 1e6
    ari = "-" if last["ari"] is None else f"{last['ari']:.2f}"
    print(f"{name:8} {last['accuracy']:9.3f} {last['worst10_accuracy']:10.3f} {ari:>6} {sent:8.2f}")

# %% [markdown]
# ## Accuracy over rounds, and over what was sent

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for name, result in results.items():
    accuracy = [100 * row["accuracy"] for row in result.rows]
    sent = [(row["bytes_up"] + row["bytes_down"]) / 1e6 for row in result.rows]
    left.plot([row["round"] for row in result.rows], accuracy, label=name)
    right.plot(sent, accuracy, label=name)
left.set(xlabel="round", ylabel="test accuracy, %", ylim=(0, 100))
right.set(xlabel="megabytes sent, both ways")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
left.legend(frameon=False)
figure.savefig("compare_methods.png", dpi=110)

# %% [markdown]
# ## Paired differences
#
# The same clients are tested under every method, so that differences can be taken client by client.
# The interval holds the mean difference in 95 % of 2,000 bootstrap samples of clients. It does not
# know of other seeds: repeat the runs with other keys before you claim anything.

# %%
table = {name: np.asarray(result.clients.accuracy) for name, result in results.items()}
tested = np.isfinite(np.stack(list(table.values()))).all(axis=0)
rng = np.random.default_rng(0)
drawn = rng.integers(tested.sum(), size=(2000, tested.sum()))
print(f"{'against FedAvg':15} {'mean':>7}   95 % interval      better worse")
for name in list(methods)[1:]:
    difference = 100 * (table[name] - table["FedAvg"])[tested]
    low, high = np.percentile(difference[drawn].mean(axis=1), (2.5, 97.5))
    better, worse = (difference > 0).sum(), (difference < 0).sum()
    print(
        f"{name:15} {difference.mean():+7.2f}   [{low:+6.2f}, {high:+6.2f}]   {better:6} {worse:5}"
    )
