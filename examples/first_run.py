"""One method from Python, with a row per round: python examples/first_run.py"""

# %%
import jax

import fedjax_cfl as cfl

ROUNDS = 30
cfl.use_cpu_cores()  # one JAX device per core; call it before anything else

pool = cfl.datasets.digits()
parts = cfl.partition.power_law(pool, clients=60, classes_per_client=2, seed=0)
data = cfl.federate(pool, parts)
task = cfl.as_task(cfl.models.MCLR(num_classes=10), pool.x.shape[1:], 10)
local = cfl.Local(lr=0.05, epochs=5, batch_size=10)
algorithm = cfl.algorithms.flexcfl(task, local, cfl.select.rr_then_random(10), m=3)


class Show(cfl.Callback):
    """Prints a row as soon as it is known; a method that returns True would end the run."""

    def on_rows(self, row, grouping, take):
        print(f"round {row['round']}: accuracy {row['accuracy']:.3f}, groups {row['group_sizes']}")


key = jax.random.key(0)
result = cfl.run(algorithm, task, data, key, rounds=ROUNDS, discard="none", callbacks=[Show()])
worst = result.rows[-1]["worst10_accuracy"]
print(f"worst tenth of clients {worst:.3f}; {result.rows[-1]['bytes_up'] / 1e6:.2f} MB sent up")
