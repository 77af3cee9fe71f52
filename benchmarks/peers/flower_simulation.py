"""Flower: its `FedAvg` strategy and its Ray simulation, one worker with one PyTorch
thread per core, the plain loop as client.

20 virtual clients stand for the cohort, and the one with number p trains the p-th
client of the round. The data are loaded once by each worker, because the client is a
function of this module, which Ray imports; a client defined in a script would take its
data along.
"""

import functools
import os
import time
from pathlib import Path

# both before the imports that read them
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
# where the workers find this module
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workloads import COHORT, WORKLOADS, Workload, cohorts

from peers import Trained
from peers.torch_loop import epochs
from peers.torch_model import Counted, clients, from_torch, net


@functools.cache
def loaded(name: str):
    """Returns what a worker keeps between rounds: the data of all clients, and a model."""
    torch.set_num_threads(1)
    return clients(WORKLOADS[name]), net(WORKLOADS[name].model)


def train_one(message: Message, context) -> Message:
    """Trains one client of the cohort."""
    config, arrays = message.content["config"], message.content["arrays"]
    held, module = loaded(config["workload"])
    work = WORKLOADS[config["workload"]]._replace(epochs=config["epochs"], batch=config["batch"])
    client = cohorts(work, config["server-round"])[-1][int(context.node_config["partition-id"])]
    module.load_state_dict(arrays.to_torch_state_dict())
    before = Counted.steps
    epochs(module, *held[client], work)
    metrics = MetricRecord({"num-examples": len(held[client][1]), "steps": Counted.steps - before})
    return Message(
        RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


class Timed(FedAvg):
    """Flower's FedAvg that notes seconds and steps of a round and the first round's model."""

    def configure_train(self, server_round, arrays, config, grid):
        """Begins a round."""
        self.began = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        """Ends a round; a round with a failed client has no time."""
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.began)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != COHORT:
            raise RuntimeError(
                f"{len(replies)} of {COHORT} clients answered, {len(failed)} failed: {failed[:1]}"
            )
        self.steps.append(sum(reply.content["metrics"]["steps"] for reply in replies))
        self.first = self.first or from_torch(arrays.to_torch_state_dict().values())
        return arrays, metrics


def train(work: Workload, rounds: int) -> Trained:
    """Runs FedAvg; nothing is evaluated."""
    strategy = Timed(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=COHORT,
        min_available_nodes=COHORT,
    )
    strategy.seconds, strategy.steps, strategy.first = [], [], None
    client, server = ClientApp(), ServerApp()
    client.train()(train_one)

    @server.main()
    def main(grid, context):
        config = ConfigRecord({"workload": work.name, "epochs": work.epochs, "batch": work.batch})
        strategy.start(
            grid, ArrayRecord(net(work.model).state_dict()), num_rounds=rounds, train_config=config
        )

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    backend = {
        "init_args": {"num_cpus": cores, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client, COHORT, backend_config=backend)
    if len(strategy.seconds) != rounds:
        raise RuntimeError(f"{len(strategy.seconds)} of {rounds} rounds were finished")
    return Trained(strategy.seconds, strategy.steps, strategy.first)
