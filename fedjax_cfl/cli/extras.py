"""What a run measures once, at its end: `evaluate.finetune` and `evaluate.new_clients`."""

import functools
from typing import Any

import jax
import numpy as np

from fedjax_cfl.cli import build
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


def measure_extras(config: dict[str, Any], setup: Setup, local: Local, result: Result) -> Extras:
    """Measures the extras that the settings `config` of a run ask for; `local` is how the clients
    of its `setup` train, `result` what it left.
    """
    found, task, name = Extras({}, {}, {}), setup.task, setup.task.targets.score.name
    state, epochs = result.state, config["evaluate"]["finetune"]

    def finetune(served: ServedModels, data: Any) -> ClientTable:
        key, at_once = next_key(config["seed"], state), config["clients_per_round"]
        scale = local.lr_scale(state.round)  # as in the round that would come next
        return finetune_clients(task, local, epochs, served, data, key, at_once, scale)

    if epochs:
        tuned = finetune(setup.algorithm.serve(state), result.data)
        found.columns[f"finetuned_{name}"] = getattr(tuned, name)
        found.numbers[f"finetuned_{name}"] = mean_score(task, tuned)
    if build.name_newcomers(config):
        new, population = add_newcomers(found, config, setup, result)
        if epochs:
            tuned = finetune(new.served, population)
            tuned = jax.tree.map(lambda leaf: leaf[-len(new.groups) :], tuned)
            found.tables[NEW_CLIENTS_FILE][f"finetuned_{name}"] = getattr(tuned, name)
            found.numbers[f"new_clients_finetuned_{name}"] = mean_score(task, tuned)
    return found


def add_newcomers(
    found: Extras, config: dict[str, Any], setup: Setup, result: Result
) -> tuple[NewClients, FederatedData]:
    """Assigns and tests the clients that were held out, and adds what they measure to `found`;
    returns also the data of all clients, those that were held out last.

    Args: `config` are all settings of the run, `setup` its parts, `result` what it left.
    """
    at_once = config["clients_per_round"]
    everybody = build.federate_samples(config, *build.deal_samples(config))
    kept, held = build.hold_out(config, everybody)
    population = take_clients(everybody, np.concatenate([kept, held]))
    population, _ = standardize(population, config["dataset"]["standardize"], kept.size)
    task, mesh = setup.task, setup.mesh
    local = build.build_local(config, task, population, mesh)
    make = functools.partial(build.build_algorithm, config, task, population, local)
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
    if build.name_newcomers(config) == "validation_clients":
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
