"""Numbers instead of classes, the next hour by site: python examples/regress_series.py

Hourly load of 24 sites, half of them offices with a peak by day, half of them homes with two peaks;
generated, so that it runs anywhere. A sample is a day of 24 hours, its target the hour that
follows; the last quarter of each site is for testing.
"""

# %%
import jax
import numpy as np

import fedjax_cfl as cfl

ROUNDS, SITES, HOURS = 40, 24, 24
cfl.use_cpu_cores()

rng = np.random.default_rng(0)
hour = np.arange(40 * HOURS)
day = 2 * np.pi * hour / HOURS
shapes = -np.cos(day), -np.cos(2 * day + 0.5)  # offices, homes; about the mean of each site
x, y, client, split = [], [], [], []
for site in range(SITES):
    noise = np.zeros(hour.size)
    for t in hour[1:]:  # what is above the daily shape at offices stays, at homes swings back
        noise[t] = (0.8, -0.8)[site % 2] * noise[t - 1] + rng.normal()
    load = rng.uniform(0.8, 1.2) * shapes[site % 2] + noise
    windows = np.lib.stride_tricks.sliding_window_view(load, HOURS + 1)[::5]
    x.append(windows[:, :-1])
    y.append(windows[:, -1])
    client.append(np.full(len(windows), site))
    split.append(np.arange(len(windows)) >= 3 * len(windows) // 4)

arrays = [np.concatenate(part) for part in (x, y, client, split)]
pool = cfl.datasets.from_arrays(*arrays, concept=np.arange(SITES) % 2, num_classes=0)
data, _ = cfl.standardize(cfl.federate(pool, cfl.partition.by_user(pool)), "pool")

# %%
task = cfl.as_task(cfl.models.MLP(1, hidden=(32,)), (HOURS,), data.num_classes, l2=0.0)
local = cfl.Local(lr=0.02, epochs=2, batch_size=20)
everybody = cfl.select.uniform(SITES)
methods = {
    "FedAvg": cfl.algorithms.fedavg(task, local, everybody),
    "FlexCFL": cfl.algorithms.flexcfl(task, local, everybody, m=2),
}
for name, algorithm in methods.items():
    result = cfl.run(
        algorithm, task, data, jax.random.key(0), rounds=ROUNDS, eval_every=ROUNDS, discard="none"
    )
    last = result.rows[-1]
    print(
        f"{name}: RMSE {last['rmse']:.3f}, MAE {last['mae']:.3f}, R2 {last['r2']:.3f}, RMSE of the"
        f" worst tenth of sites {last['worst10_rmse']:.3f}, ARI {last['ari']:.2f}"
    )
