"""Builds what a run measures once, at its end: `evaluate.finetune` and `evaluate.new_clients`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_cfl.cli.build import (
    build_local,
    deal_samples,
    federate_samples,
    hold_out,
    name_newcomers,
    with_selection,
)
from fedjax_cfl.client.local import Local
from fedjax_cfl.data.federated import take_clients
from fedjax_cfl.data.scaling import standardize
from fedjax_cfl.runs.finish import Extras
from fedjax_cfl.runs.results import NEW_CLIENTS_FILE
from fedjax_cfl.simulation.driver import Result
from fedjax_cfl.simulation.evaluate import ClientTable
from fedjax_cfl.simulation.personalize import (
    NewClients,
    assign_newcomers,
    finetune_clients,
    next_key,
)
from fedjax_cfl.simulation.rounds import Setup
from fedjax_cfl.tasks.sums import average
from fedjax_cfl.types import FederatedData, ServedModels, Task


def build_extras(config: dict[str, Any], setup: Setup, local: Local) -> Callable[[Result], Extras]:
    """Returns what measures the extras that the settings of a run ask for; `local` is how its
    clients train.
    """
    epochs = config["evaluate"]["finetune"]
    algorithm, task = setup.algorithm, setup.task
    at_once = config["clients_per_round"]

    name = task.targets.score.name

    def finetune(served: ServedModels, data: Any, result: Result) -> ClientTable:
        key = next_key(config["seed"], result.state)
        scale = local.lr_scale(result.state.round)  # as in the round that would come next
        return finetune_clients(task, local, epochs, served, data, key, at_once, scale)

    def measure(result: Result) -> Extras:
        found = Extras({}, {}, {})
        if epochs:
            tuned = finetune(algorithm.serve(result.state), result.data, result)
            found.columns[f"finetuned_{name}"] = getattr(tuned, name)
            found.numbers[f"finetuned_{name}"] = mean_score(task, tuned)
        if name_newcomers(config):
            new, population = add_newcomers(found, config, setup, result)
            if epochs:
                tuned = finetune(new.served, population, result)
                tuned = jax.tree.map(lambda leaf: leaf[-len(new.groups) :], tuned)
                columns = found.tables[NEW_CLIENTS_FILE]
                columns[f"finetuned_{name}"] = getattr(tuned, name)
                found.numbers[f"new_clients_finetuned_{name}"] = mean_score(task, tuned)
        return found

    return measure


def add_newcomers(
    found: Extras, config: dict[str, Any], setup: Setup, result: Result
) -> tuple[NewClients, FederatedData]:
    """Assigns and tests the clients that were held out, and adds what they measure to `found`;
    returns also the data of all clients, those that were held out last.

    Args: `config` are all settings of the run, `setup` its parts, `result` what it left.
    """
    at_once = config["clients_per_round"]
    everybody = federate_samples(config, *deal_samples(config))
    kept, held = hold_out(config, everybody)
    population = take_clients(everybody, np.concatenate([kept, held]))
    population, _ = standardize(population, config["dataset"]["standardize"], kept.size)
    task, mesh = setup.task, setup.mesh
    make = with_selection(config, task, population, build_local(config, task, population, mesh))
    key = jax.random.key(config["seed"])
    new = assign_newcomers(make, task, mesh, result.state, population, key, at_once)
    names, score = everybody.client_names, task.targets.score.name
    found.tables[NEW_CLIENTS_FILE] = {
        "client": held if names is None else [names.names[k] for k in held.tolist()],
        "group": new.groups,
        "concept": np.asarray(everybody.concept)[held],
        "train_samples": np.asarray(everybody.train.size)[held],
        "test_samples": np.asarray(everybody.test.size)[held],
        score: getattr(new.metrics, score),
    }
    found.numbers["new_clients"] = len(held)
    found.numbers["new_clients_assigned"] = int((new.groups >= 0).sum())
    found.numbers[f"new_clients_{score}"] = mean_score(task, new.metrics)
    if name_newcomers(config) == "validation_clients":
        values = np.asarray(getattr(new.metrics, score))
        mean = average(values, np.isfinite(values))
        found.numbers[f"validation_clients_macro_{score}"] = float(mean)
    return new, population


def mean_score(task: Task, table: ClientTable) -> float:
    """Returns the score over all test samples of the clients that have a model, added up as that of
    the run itself; NaN where there are none.
    """
    row = task.targets.summarize(jax.tree.map(np.asarray, table), np.zeros((2, 0), int))
    return float(row[task.targets.score.name])
