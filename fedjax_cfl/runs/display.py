"""What a run prints: progress, and the final table."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Table

from fedjax_cfl.formatting import escape_markup, format_bytes
from fedjax_cfl.runs.results import to_plain
from fedjax_cfl.runs.settings import RunSettings
from fedjax_cfl.scores import ERRORS, SCORES, find_score
from fedjax_cfl.types import Algorithm

Item = TypeVar("Item")
# of scores, as curves and glossary call them
NAMES = {"accuracy": "accuracy", "rmse": "RMSE", "mae": "MAE", "r2": "R2"}
NAMES |= {"micro_f1": "micro-F1", "label_f1": "macro-F1", "exact_match": "exact match"}
# of a summary's numbers
WORDS = {
    f"{part}_{name}": f"{short}, {words}"
    for name, short in NAMES.items()
    for part, words in (
        ("last10_evals", "mean of last 10 tests"),
        ("last10_evals_best", "best of last 10 tests"),
        ("macro", "mean over clients"),
        ("worst10", "worst 10 % of clients"),
    )
} | {
    **{
        f"validation_macro_{score.name}": f"validation {score.words}, mean over clients"
        for score in SCORES
    },
    **{name: NAMES[name] for score in SCORES[1:] for name in score.measured},
    **{
        f"{part}_{score.name}": f"{part.replace('_', ' ')} {score.words}"
        for score in SCORES[1:]
        for part in ("best", "final", "finetuned", "new_clients", "new_clients_finetuned")
    },
    "weighted_macro_f1": "macro-F1, by test samples",
    "macro_f1": "macro-F1, mean over clients",
    "ari": "ARI, found and true groups",
}


def _cell(name: str, summary: dict[str, Any]) -> str:
    value = summary[name]
    if isinstance(value, str):
        return value
    score = find_score(summary)
    if name == f"best_{score.name}":
        said = score.format(value)
        where = f"in round {summary.get('best_round')}"
        if "chosen_round" in summary:
            return f"{said} {where}, the best on validation samples"
        return f"{said} {where}, of {summary.get('best_of')} tests"
    if "accuracy" in name or name.endswith(("_f1", "exact_match")):
        return f"{value:.2%}"
    if name.endswith("_per_s"):
        return f"{value:,.1f} /s"
    if name.endswith("_s"):
        return f"{value:,.1f} s"
    if "bytes" in name:
        return format_bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith(ERRORS):
        return f"{value:.4g}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def final_table(summary: dict[str, Any]) -> Table:
    """Builds the table a run ends with; what is null is left out."""
    summary = to_plain(summary)
    table = Table(title=escape_markup(title(summary)), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    headline = {
        "algorithm",
        "dataset",
        "partition",
        "model",
        "preset",
        "seed",
        "best_round",
        "best_of",
        "versions",
        "overrides",
    }
    for name, value in summary.items():
        if name not in headline and value is not None:
            words = WORDS.get(name, name.replace("_", " "))
            if "chosen_round" in summary and name.startswith("best_"):
                words = words.removeprefix("best ")
            table.add_row(words, escape_markup(_cell(name, summary)))
    return table


def title(summary: dict[str, Any]) -> str:
    parts = [
        str(summary[name])
        for name in ("algorithm", "dataset", "partition", "model")
        if summary.get(name) is not None
    ]
    return ", ".join(parts) + (
        f" (seed {summary['seed']})" if summary.get("seed") is not None else ""
    )


LOG_SECONDS = 30  # between two lines about progress


@contextlib.contextmanager
def progress(
    total_rounds: int, start: int = 0, verbose: bool = True
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields `show(row)`, which moves a progress bar on stderr to a metrics row; a plain
    line every LOG_SECONDS where stderr is not a terminal; nothing unless `verbose`.
    """
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    terminal, shown = verbose and sys.stderr.isatty(), time.monotonic()
    # the pace is a mean over an hour, because the default of 30 s is empty where evaluations
    # are further apart
    bar = Progress(
        *columns, console=Console(stderr=True), disable=not terminal, speed_estimate_period=3600
    )
    with bar:
        task = bar.add_task("compiling", total=total_rounds, completed=start)

        def show(row: dict[str, Any]) -> None:
            nonlocal shown
            bar.update(task, completed=row["round"])
            speed = bar.tasks[0].speed
            pace = f", {speed:.1f} rounds/s" if speed else ""
            bar.update(task, description=format_progress(row) + pace)
            if verbose and not terminal and time.monotonic() - shown >= LOG_SECONDS:
                shown = time.monotonic()
                line = f"fedjax-cfl: round {row['round']} of {total_rounds}, {format_progress(row)}"
                print(line, file=sys.stderr, flush=True)

        yield show


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


MOST_SHOWN = 16  # groups whose scores are in the final table


# shown as they are, with the scores
SUMMARY_FIELDS = (
    "algorithm",
    "dataset",
    "partition",
    "model",
    "drift",
    "seed",
    "rounds",
    "chosen_round",
    "ended_early",
    "best_round",
    "best_of",
    "ari",
)


def print_summary(
    settings: RunSettings, run_dir: Path, algorithm: Algorithm, summary: dict, console: Console
) -> None:
    """Prints the final table of a run, and notes about what it may hide.

    Args: `settings` are those of the run; `run_dir` is where its files are; `algorithm`
    says whether it is clustered; `summary` is that of summary.json.
    """
    console.print(final_table(format_summary(summary)))
    sizes = summary["group_sizes"] or []
    if summary["nonfinite_clients"]:
        zeroed = settings.faults.nonfinite == "zero"
        console.print(
            f"{summary['nonfinite_clients']:,} updates were not finite and were "
            + ("used, with 0 in those places" if zeroed else "left out")
            + f"; {summary['client_updates']:,} were used in all"
            + ("" if settings.faults.nan else "; a smaller step size may help")
        )
    if summary["nonfinite_model_clients"]:
        console.print(
            f"in the last evaluation {summary['nonfinite_model_clients']} clients have a model that"
            f" is not finite, so that there is no {find_score(summary).words}; a smaller step size"
            " may help"
        )
    elif algorithm.clustered and len(sizes) > 1 and sum(size > 0 for size in sizes) == 1:
        console.print(f"all clients ended in one group of {len(sizes)}: nothing was split")
    if summary["groupless_clients"]:
        console.print(
            f"{summary['groupless_clients']:,} clients have no training samples to choose a group"
            " by: they have no model, and are not scored"
        )
    if algorithm.clustered and summary["best_of"] == 0 and not summary["nonfinite_model_clients"]:
        console.print(
            f"no {find_score(summary).words} yet: discard={settings.plan.discard} waits until every"
            " client has taken part; more rounds, or discard=none"
        )
    console.print(f"written to {run_dir}", markup=False)


def format_summary(summary: dict) -> dict:
    """Returns a summary as its reader wants it: scores, then counts beside their rates
    and sizes with their units.
    """
    sizes = {
        name: format_bytes(summary[name])
        for name in ("bytes_up", "bytes_down", "peak_memory_bytes")
    }
    words = {
        name: f"{value:,}" for name, value in summary.items() if isinstance(value, int)
    } | sizes
    simulated = summary["sim_time_s"]
    score = find_score(summary)
    named = {
        f"{score.words} per group": f"group_{score.name}",
        f"{score.words} per true group": f"concept_{score.name}",
    }
    scored = {words: to_plain(summary.get(name)) or [] for words, name in named.items()}
    hidden = {f"final_{score.name}", f"last10_evals_best_{score.name}"}  # said, or chosen by tests
    hidden = hidden if "chosen_round" in summary else set()
    return {
        name: summary[name]
        for name in summary
        if name in SUMMARY_FIELDS
        or (name.endswith((*score.measured, "_f1")) and not isinstance(summary[name], list))
        if name not in hidden
    } | {
        "clients per group": ", ".join(map(str, summary["group_sizes"])),
        **{
            words: ", ".join(score.format(value, 1) for value in values)
            for words, values in scored.items()
            if 1 < len(values) <= MOST_SHOWN
        },
        "models sent": "{units_up} up, {units_down} down".format(**words),
        "data sent": "{bytes_up} up, {bytes_down} down".format(**words),
        "client updates": "{client_updates} ({client_updates_per_s:,.0f} /s)".format(
            **summary | words
        ),
        "local steps": "{local_steps} ({local_steps_per_s:,.0f} /s)".format(**summary | words),
        "seconds": (
            "compiling {compile_s:.2f} ({programs_from_cache} of {programs} programs were compiled"
            " before), training {train_s:.2f}, evaluating {eval_s:.2f}".format(**summary)
        ),
        **({"simulated seconds": f"{simulated:,.1f}"} if simulated else {}),
        "peak memory": words["peak_memory_bytes"],
        "devices": summary["devices"],
    }
