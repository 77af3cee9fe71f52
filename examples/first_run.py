"""One method from Python, with a row per round: python examples/first_run.py"""

# %%
import fedjax_cfl as cfl

ROUNDS = 30
cfl.use_cpu_cores()  # one JAX device per core; call it before anything else

data = cfl.federate(
    cfl.datasets.digits(), cfl.partition.power_law(clients=60, classes_per_client=2)
)


class Show(cfl.Callback):
    """Prints a row as soon as it is known; a method that returns True would end the run."""

    def on_rows(self, row, grouping, take):
        print(f"round {row['round']}: accuracy {row['accuracy']:.3f}, groups {row['group_sizes']}")


result = cfl.run(
    cfl.algorithms.flexcfl(m=3),
    data,
    local=cfl.Local(lr=0.05),
    system=cfl.select.rr_then_random(10),
    rounds=ROUNDS,
    discard="none",
    callbacks=[Show()],
)
worst = result.rows[-1]["worst10_accuracy"]
print(f"worst tenth of clients {worst:.3f}; {result.rows[-1]['bytes_up'] / 1e6:.2f} MB sent up")
