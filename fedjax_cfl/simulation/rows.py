"""One row of metrics.jsonl: what an evaluation and the rounds before it measured."""

import math
from typing import Any

import jax
import numpy as np

from fedjax_cfl.errors import NonFiniteUpdate, RunError
from fedjax_cfl.round import traffic
from fedjax_cfl.round.counts import count_to_int
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.simulation.compilation import Program
from fedjax_cfl.simulation.rounds import Plan
from fedjax_cfl.types import Algorithm, Params

TIMES = ("compile_s", "train_s", "eval_s")
COUNTERS = {"client_updates": 0, "local_steps": 0} | dict.fromkeys(("wall_s", *TIMES), 0.0)


def make_row(
    program: Program, plan: Plan, member: int, measured: tuple, counters: dict[str, Any]
) -> dict[str, Any]:
    """Returns a member's row of an evaluation, of what was `measured`: (rounds done,
    (traffic, clock_ms), (count, infos) of the blocks since the last one, `Program.test`'s).

    Raises NonFiniteUpdate, as neither row nor checkpoint may lead past it, and RunError for a
    client of a group that does not exist.
    """
    place, algorithm, state = program.places[member], program.algorithm, program.shapes[member][0]
    done, ledger, blocks, tested = measured
    parts = [
        jax.tree.map(lambda leaf, count=count: leaf[place][:count], infos)
        for count, infos in blocks
    ]
    ledger, tested = jax.tree.map(lambda leaf: leaf[place], (ledger, tested))
    infos = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    raise_if_nonfinite(algorithm, state.groups, done, infos)
    index, table, counts, concept = tested
    num_models = evaluate.count_models(jax.eval_shape(algorithm.serve, state).models)
    raise_if_unknown_group(done, index, num_models)
    found = evaluate.finalize(index, num_models, table, counts, concept)
    row = metrics_row(done, ledger, state.groups, infos, found, counters)
    if algorithm.clustered and discards_accuracy(
        plan.discard, row, int(infos.selected.max()), program.data[member].num_clients
    ):
        row["accuracy"] = None
    return row


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
    """Returns whether the accuracy of a clustered method's row does not count yet."""
    if discard == "rounds":
        # a round in which everybody is offline selects nobody
        done = (row["round"] - 1) * selected if selected else row["client_updates"]
        return done < num_clients
    return discard == "met" and row["evaluated_clients"] < num_clients


def raise_if_nonfinite(algorithm: Algorithm, groups: Params, done: int, infos: Any) -> None:
    """Raises NonFiniteUpdate for the first update of the rounds up to `done` that was
    not finite, if that is the policy.
    """
    if algorithm.nonfinite != "raise":
        return
    culprits = np.asarray(infos.fault_counts.first_nonfinite)
    for place in np.flatnonzero(culprits[:, 0] >= 0):
        client, leaf = culprits[place]
        layer = jax.tree_util.keystr(
            jax.tree_util.tree_leaves_with_path(groups)[leaf][0], simple=True, separator="/"
        )
        raise NonFiniteUpdate(
            f"round {done - len(culprits) + place + 1}: client {client} sent a"
            f" non-finite update of {layer}"
        )


def raise_if_unknown_group(done: int, index: np.ndarray, num_models: int) -> None:
    """Raises RunError for the first client whose model number, `index` [K], there is not."""
    unknown = np.flatnonzero(index >= num_models)
    if unknown.size:
        raise RunError(
            f"round {done}: client {unknown[0]} is in group {index[unknown[0]]}; the method has"
            f" {num_models}, and its hooks must name one of 0 to {num_models - 1}"
        )


def mean_of_rounds(values: jax.Array) -> float:
    """Returns the mean of a block's rounds [n]; of those with updates, NaN if there are none."""
    with_updates = np.asarray(values)[~np.isnan(values)]
    return float(with_updates.mean()) if with_updates.size else math.nan


def metrics_row(
    done: int,
    ledger: tuple,
    groups: Params,
    infos: Any,
    found: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:
    """Returns one row of metrics.jsonl in plain Python: the last round's losses, the
    block's mean discrepancy, everything sent so far. `ledger`: (Traffic, clock_ms).
    """
    sent, clock_ms = ledger
    model_bytes = sum(
        leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(groups)
    )
    down, up = traffic.count_bytes(sent, model_bytes)
    row = {name: value.tolist() for name, value in found.items()}
    return {
        "round": done,
        **row,
        "train_loss": float(infos.loss[-1]),
        "train_loss_last": float(infos.last_loss[-1]),
        "discrepancy": mean_of_rounds(infos.discrepancy),
        "group_discrepancy": infos.group_discrepancy[-1].tolist(),
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
