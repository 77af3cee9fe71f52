# %% [markdown]
# # A run read back: its models, and a client that it never met
#
# A run from the command line leaves its models in its directory. `load_run` reads them. Nothing
# that the directory names is imported, and there is no pickle.

# %%
import subprocess
import sys
from pathlib import Path

import numpy as np

import fedjax_cfl as cfl

ROUNDS, RUN_DIR = 30, "digits_run"
command = [sys.executable, "-m", "fedjax_cfl", "algorithm=ifca", "algorithm.m=4"]
command += ["partition=iid", "concept=rotate", "dataset.clients=40", "clients_per_round=20"]
command += [f"rounds={ROUNDS}", f"run_dir={RUN_DIR}"]
if not Path(RUN_DIR).exists():
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

# %%
run = cfl.load_run(RUN_DIR)
print(run.settings["algorithm"]["name"], "of", len(run.table["client"]), "clients")
print(f"accuracy {run.rows[-1]['accuracy']:.3f} after round {run.final.round}")
print("clients of each group:", np.bincount(run.table["group"] + 1)[1:].tolist())

# %% [markdown]
# A client of the run has a model.

# %%
digits = cfl.datasets.digits()
x, y = digits.x, digits.y
client = int(run.table["client"][0])
print(f"client {client} says", run.predict(client, x[:8]), "of", y[:8])

# %% [markdown]
# A client that the run never met takes the model of lowest loss on samples of its own. This one
# holds its images upside down.

# %%
own = np.rot90(x[:200], 2, axes=(1, 2))
model = run.find_model(own[:100], y[:100])
for number in range(4):
    right = np.mean(run.predict_with(number, own[100:]) == y[100:200])
    chosen = " (chosen)" if number == model else ""
    print(f"model {number}: accuracy {right:.2f} on its other samples{chosen}")
