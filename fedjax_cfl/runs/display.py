"""What a run prints: progress, and the final table."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedjax_cfl.formatting import escape_markup, format_bytes
from fedjax_cfl.runs.results import to_plain
from fedjax_cfl.scores import ERRORS, find_score

if TYPE_CHECKING:  # JAX is not needed to compare what has run
    from fedjax_cfl.runs.settings import RunSettings

Item = TypeVar("Item")
# of scores, as curves and glossary call them
NAMES = {"accuracy": "accuracy", "rmse": "RMSE", "mae": "MAE", "r2": "R2"}
NAMES |= {"micro_f1": "micro-F1", "label_f1": "macro-F1", "exact_match": "exact match"}
PARTS = {  # of fields, before the name of a score
    "last10_evals": "mean of last 10 tests",
    "last10_evals_best": "best of last 10 tests",
    "macro": "mean over clients",
    "worst10": "worst 10 % of clients",
}
WORDS = {  # of other fields
    "weighted_macro_f1": "macro-F1, by test samples",
    "macro_f1": "macro-F1, mean over clients",
    "ari": "ARI, found and true groups",
}
# a final table shows them beside the scores
SHOWN_FIELDS = ("drift", "rounds", "chosen_round", "ended_early", "ari")
MOST_SHOWN = 16  # groups whose scores are in the final table


def final_table(summary: dict[str, Any]) -> Table:
    """Builds the table a run ends with: scores, then counts beside their rates and sizes with
    their units; what is null is left out.
    """
    summary = to_plain(summary)
    table = Table(title=escape_markup(title(summary)), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for words, text in (_list_scores(summary) | _list_work(summary)).items():
        table.add_row(words, escape_markup(text))
    return table


def _list_scores(summary: dict[str, Any]) -> dict[str, str]:
    score, chosen = find_score(summary), "chosen_round" in summary
    # said already, or chosen by tests
    hidden = (f"final_{score.name}", f"last10_evals_best_{score.name}") if chosen else ()
    found = {}
    for name, value in summary.items():
        scored = name.endswith((*score.measured, "_f1")) and not isinstance(value, list)
        if value is None or name in hidden or not (scored or name in SHOWN_FIELDS):
            continue
        words = name_field(name)
        if chosen and name.startswith("best_"):
            words = words.removeprefix("best ")
        found[words] = _format_score(name, summary)
    return found


def name_field(field: str) -> str:
    """Returns what a number of a summary is called."""
    name = next((name for name in NAMES if field.endswith(name)), "")
    part = field.removesuffix(name).rstrip("_")
    if field in WORDS or not name:
        return WORDS.get(field, field.replace("_", " "))
    if part in PARTS:
        return f"{NAMES[name]}, {PARTS[part]}"
    words = f"{part.replace('_', ' ')} {NAMES[name]}".strip()
    return words.replace(" macro ", " ") + ", mean over clients" * ("macro" in part)


def _format_score(name: str, summary: dict[str, Any]) -> str:
    value, score = summary[name], find_score(summary)
    if isinstance(value, str):
        return value
    if name == f"best_{score.name}":
        said = f"{score.format(value)} in round {summary.get('best_round')}"
        if "chosen_round" in summary:
            return f"{said}, the best on validation samples"
        return f"{said}, of {summary.get('best_of')} tests"
    if "accuracy" in name or name.endswith(("_f1", "exact_match")):
        return f"{value:.2%}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if name.endswith(ERRORS) else f"{value:.3f}"


def _list_work(summary: dict[str, Any]) -> dict[str, str]:
    words = {name: f"{value:,}" for name, value in summary.items() if isinstance(value, int)}
    for name in ("bytes_up", "bytes_down", "peak_memory_bytes"):
        words[name] = format_bytes(summary[name])
    words = summary | words
    simulated, score = summary["sim_time_s"], find_score(summary)
    scored = {}
    for heading, part in (("per group", "group"), ("per true group", "concept")):
        values = summary.get(f"{part}_{score.name}") or []
        if 1 < len(values) <= MOST_SHOWN:
            shown = ", ".join(score.format(value, 1) for value in values)
            scored[f"{score.words} {heading}"] = shown
    return {
        "clients per group": ", ".join(map(str, summary["group_sizes"])),
        **scored,
        "models sent": "{units_up} up, {units_down} down".format(**words),
        "data sent": "{bytes_up} up, {bytes_down} down".format(**words),
        "client updates": "{client_updates} ({client_updates_per_s:,.0f} /s)".format(**words),
        "local steps": "{local_steps} ({local_steps_per_s:,.0f} /s)".format(**words),
        "seconds": (
            "compiling {compile_s:.2f} ({programs_from_cache} of {programs} programs were compiled"
            " before), training {train_s:.2f}, evaluating {eval_s:.2f}".format(**summary)
        ),
        **({"simulated seconds": f"{simulated:,.1f}"} if simulated else {}),
        "peak memory": words["peak_memory_bytes"],
        "devices": summary["devices"],
    }


def title(summary: dict[str, Any]) -> str:
    named = map(summary.get, ("algorithm", "dataset", "partition", "model"))
    seed = "" if summary.get("seed") is None else f" (seed {summary['seed']})"
    return ", ".join(str(name) for name in named if name is not None) + seed


LOG_SECONDS = 30  # between two lines about progress


def follow(items: Sequence[Item], what: str) -> Iterable[Item]:
    """Returns the items; where stderr is a terminal, a bar says how many are done meanwhile, and
    `what` is done with them.
    """
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


def format_progress(row: dict[str, Any]) -> str:
    """Returns where a run stands, in words."""
    row, score = to_plain(row), find_score(row)
    groups = sum(size > 0 for size in row.get("group_sizes") or [])
    said = f"{score.words} {score.format(row.get(score.name))}"
    if row.get("nonfinite_model_clients"):
        said = "models are not finite"
    return f"{said}, {'1 group' if groups == 1 else f'{groups} groups'}"


def print_summary(
    settings: "RunSettings", run_dir: Path, clustered: bool, summary: dict, console: Console
) -> None:
    """Prints the final table of a run, of a `clustered` method or not, and notes about what it may
    hide; its files are in `run_dir`, and `summary` is that of summary.json.
    """
    console.print(final_table(summary))
    sizes = summary["group_sizes"] or []
    if summary["nonfinite_clients"]:
        faults = settings.everything.get("faults", {})
        zeroed = faults.get("nonfinite") == "zero"
        what = "updates, or own models," if settings.everything.get("personal") else "updates"
        console.print(
            f"{summary['nonfinite_clients']:,} {what} were not finite and were"
            f" {'used, with 0 in those places' if zeroed else 'left out'};"
            f" {summary['client_updates']:,} were used in all"
            + ("" if faults.get("nan") else "; a smaller step size may help")
        )
    if summary["nonfinite_model_clients"]:
        console.print(
            f"in the last evaluation {summary['nonfinite_model_clients']} clients have a model that"
            f" is not finite, so that there is no {find_score(summary).words}; a smaller step size"
            " may help"
        )
    elif clustered and len(sizes) > 1 and sum(size > 0 for size in sizes) == 1:
        console.print(f"all clients ended in one group of {len(sizes)}: nothing was split")
    if summary["groupless_clients"]:
        console.print(
            f"{summary['groupless_clients']:,} clients have no training samples to choose a group"
            " by: they have no model, and are not scored"
        )
    if clustered and summary["best_of"] == 0 and not summary["nonfinite_model_clients"]:
        console.print(
            f"no {find_score(summary).words} yet: discard={settings.plan.discard} waits until every"
            " client has taken part; more rounds, or discard=none"
        )
    console.print(f"written to {run_dir}", markup=False)


def chance_all_met(clients: int, cohort: int, rounds: int) -> float:
    """Returns the chance that cohorts drawn at random have included every client after
    `rounds`, with clients taken as independent (about right for many).
    """
    missed = max(0.0, 1 - cohort / clients) ** rounds  # one client, in all rounds
    return (1 - missed) ** clients


def describe_met_rule(clients: int, cohort: int, rounds: int) -> str:
    """Returns a line about discard=met: when the accuracies of a run will count."""
    half = robin = math.ceil(clients / cohort)
    if cohort < clients:  # the round by which `chance_all_met` is a half
        missed = math.log1p(-(0.5 ** (1 / clients))) / math.log1p(-cohort / clients)
        half = max(robin, math.ceil(missed))
    return (
        "discard=met: accuracies count once every client has taken part. Cohorts drawn at random"
        f" (preset=paper) do so within {rounds} rounds in about"
        f" {chance_all_met(clients, cohort, rounds):.2g} of all runs, and in half of them by round"
        f" {half}; with round robin it is round {robin}. discard=rounds or discard=none count"
        " sooner"
    )
