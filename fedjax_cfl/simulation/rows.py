"""One row of metrics.jsonl: what an evaluation and the rounds before it measured."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cfl.errors import NonFiniteUpdate, RunError
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.simulation.program import Program
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.system import reports
from fedjax_cfl.system.reports import count_to_int
from fedjax_cfl.tree import take_rows
from fedjax_cfl.types import Algorithm, FederatedData, Info, Params, Traffic

MOST_CONCEPTS = 256  # whose scores a row has
TIMES = ("compile_s", "train_s", "eval_s")
COUNTERS = {"client_updates": 0, "local_steps": 0} | dict.fromkeys(("wall_s", *TIMES), 0.0)


class Measured(NamedTuple):
    """What an evaluation, and the rounds before it, measured of all members of a program."""

    done: int  # rounds
    traffic: Traffic  # so far
    clock_ms: np.ndarray  # so far, as in `State`
    blocks: list[tuple[int, Info]]  # (rounds, their infos) since the last evaluation
    tested: evaluate.Tested


def make_row(
    program: Program, plan: Plan, member: int, measured: Measured, counters: dict[str, Any]
) -> dict[str, Any]:
    """Returns a member's row of an evaluation.

    Args: `member` is its number in the program; `counters` are those before, see `COUNTERS`.
    Raises NonFiniteUpdate, as neither row nor checkpoint may lead past it, and RunError for a
    client of a group that does not exist.
    """
    place, algorithm, state = program.places[member], program.algorithm, program.shapes[member][0]
    done = measured.done
    parts = [
        jax.tree.map(lambda leaf, count=count: leaf[place][:count], infos)
        for count, infos in measured.blocks
    ]
    of_all = measured.traffic, measured.clock_ms, measured.tested
    sent, clock_ms, tested = take_rows(of_all, place)
    infos = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    raise_if_nonfinite(algorithm, state.groups, done, infos)
    num_models = program.num_models[member]
    check_groups_exist(done, tested.index, num_models)
    targets, concepts = program.targets, count_concepts(program.data[member])
    found = evaluate.finalize(targets, tested, num_models, concepts)
    part = algorithm.sent_part(state.groups) if algorithm.sent_part else state.groups
    row = metrics_row(done, sent, clock_ms, part, infos, found, counters)
    for name in targets.score.beside:
        row.setdefault(name, None)  # of true groups that are not known
    seen = score_validation(program, tested, num_models)
    if algorithm.clustered and discards_accuracy(
        plan.discard, row, int(infos.selected.max()), program.data[member].num_clients
    ):
        row[targets.score.name] = None
        seen = dict.fromkeys(seen)
    return row | seen


def score_validation(program: Program, tested: evaluate.Tested, num_models: int) -> dict[str, Any]:
    """Returns the scores on the samples to choose a round by; {} without any."""
    if tested.validation is None:
        return {}
    apart = tested._replace(evaluation=tested.validation, validation=None)
    seen = evaluate.finalize(program.targets, apart, num_models)
    name = program.targets.score.name
    return {f"validation_{part}{name}": seen[part + name].tolist() for part in ("", "macro_")}


def count_concepts(data: FederatedData) -> int:
    """Returns how many true groups the clients of a run have, numbered 0, 1, ...; 0 if they are not
    known or more than `MOST_CONCEPTS`. A drift moves clients between them, or between those of all
    stages.
    """
    every = data.concept if data.concepts is None else data.concepts
    count = int(np.max(jax.device_get(every), initial=-1)) + 1
    return count if count <= MOST_CONCEPTS else 0


def update_counters(
    counters: dict[str, Any], row: dict[str, Any], train_s: float, eval_s: float
) -> dict[str, Any]:
    """Returns the counters and seconds after a block of rounds, and gives its row the
    seconds so far.
    """
    spent = {"wall_s": train_s + eval_s, "train_s": train_s, "eval_s": eval_s}
    counters = counters | {name: counters[name] + value for name, value in spent.items()}
    row["wall_s"] = counters["wall_s"]
    return counters | {name: row[name] for name in ("client_updates", "local_steps")}


def discards_accuracy(discard: str, row: dict[str, Any], selected: int, num_clients: int) -> bool:
    """Returns whether the score of a clustered method's row does not count yet."""
    if discard == "rounds":
        # a round in which all clients are offline selects none
        done = (row["round"] - 1) * selected if selected else row["client_updates"]
        return done < num_clients
    settled = row["evaluated_clients"] + row["groupless_clients"]
    return discard == "met" and settled < num_clients


def raise_if_nonfinite(algorithm: Algorithm, groups: Params, done: int, infos: Any) -> None:
    """Raises NonFiniteUpdate for the first update of the rounds up to `done` that was
    not finite, if that is the policy.
    """
    if algorithm.nonfinite != "raise":
        return
    culprits = np.asarray(infos.fault_counts.first_nonfinite)
    for place in np.flatnonzero(culprits[:, 0] >= 0):
        client, leaf = culprits[place]
        layers = jax.tree_util.tree_leaves_with_path(groups)
        what = "numbers beside its model that are not finite"
        if leaf < len(layers):
            layer = jax.tree_util.keystr(layers[leaf][0], simple=True, separator="/")
            what = f"a non-finite update of {layer}"
        raise NonFiniteUpdate(
            f"round {done - len(culprits) + place + 1}: client {client} sent {what}"
        )


def check_groups_exist(done: int, index: np.ndarray, num_models: int) -> None:
    """Raises RunError if a client is served a model that does not exist, and names the first
    such client.

    Args: `done` rounds have ended; `index` [K] int32 is the model that each client is served,
    -1: none; `num_models` is how many there are.
    """
    unknown = np.flatnonzero(index >= num_models)
    if unknown.size:
        raise RunError(
            f"round {done}: client {unknown[0]} is in group {index[unknown[0]]}; the method has"
            f" {num_models}, and its functions must name one of 0 to {num_models - 1}"
        )


def mean_of_rounds(values: jax.Array) -> float:
    """Returns the mean over the rounds [n] of a block that used an update; NaN if none did."""
    with_updates = np.asarray(values)[~np.isnan(values)]
    return float(with_updates.mean()) if with_updates.size else math.nan


def metrics_row(
    done: int,
    sent: Traffic,
    clock_ms: np.ndarray,
    groups: Params,
    infos: Any,
    found: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:
    """Returns one row of metrics.jsonl in plain Python: the last round's losses, the block's
    mean discrepancy, all that has been sent so far.

    Args: `done` rounds have ended; `sent` and `clock_ms` are those so far; `groups` [m, ...]
    are what is sent of the group models, or its shapes; `infos` [n] are those of the rounds since
    the last evaluation; `found` are the metrics of this one; `before` are the counters before,
    see `COUNTERS`.
    """
    model_bytes = sum(
        leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(groups)
    )
    down, up = reports.count_bytes(sent, model_bytes)
    row = {name: value.tolist() for name, value in found.items()}
    unknown = [math.nan] * len(row["group_sizes"])  # of models that are no group's
    return {
        "round": done,
        **row,
        "train_loss": float(infos.loss[-1]),
        "train_loss_last": float(infos.last_loss[-1]),
        "discrepancy": mean_of_rounds(infos.discrepancy),
        # as many as models that clients can be served
        "group_discrepancy": [*infos.group_discrepancy[-1].tolist(), *unknown][: len(unknown)],
        "dissimilarity": mean_of_rounds(infos.dissimilarity),
        "cold_clients": int(infos.cold.sum()),
        "shifted_clients": int(infos.shifted.sum()),
        "migrated_clients": int(infos.migrated.sum()),
        "reclusterings": int(infos.reclustered.sum()),
        "dropped_clients": int(infos.fault_counts.dropped.sum()),
        "nonfinite_clients": int(infos.fault_counts.nonfinite.sum()),
        "hostile_clients": int(infos.fault_counts.byzantine.sum()),
        "idle_groups": int(infos.idle_groups.sum()),
        "late_clients": int(infos.late.sum()),
        "units_down": count_to_int(sent.units_down),
        "units_up": count_to_int(sent.units_up),
        "bytes_down": down,
        "bytes_up": up,
        "client_updates": before["client_updates"] + int(infos.clients.sum()),
        "local_steps": before["local_steps"] + sum(map(count_to_int, infos.steps)),
        # groups with clocks of their own: when the last one has come so far
        "sim_time_s": max(map(count_to_int, clock_ms.reshape(-1, 2))) / 1000,
    }
