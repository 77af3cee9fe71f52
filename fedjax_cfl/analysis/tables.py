"""The measures of runs, and tables of them as people read them."""

import math
import sys
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

# name in the CSV -> heading, factor and decimals of the printed table, None: four digits
MEASURES: dict[str, tuple[str, float, int | None]] = {
    "best_accuracy": ("best %", 100, 2),
    "evaluations": ("of so many tests", 1, 0),
    "shared_best_accuracy": ("best % of shared tests", 100, 2),
    "shared_evaluations": ("shared tests", 1, 0),
    "final_accuracy": ("final %", 100, 2),
    "last10_evals_accuracy": ("last 10 tests %", 100, 2),
    "chosen_round": ("round chosen on validation", 1, 1),
    "macro_accuracy": ("macro %", 100, 2),
    "worst10_accuracy": ("worst 10 %", 100, 2),
    "best_rmse": ("best RMSE", 1, None),
    "shared_best_rmse": ("best RMSE of shared tests", 1, None),
    "final_rmse": ("final RMSE", 1, None),
    "last10_evals_rmse": ("last 10 tests RMSE", 1, None),
    "macro_rmse": ("macro RMSE", 1, None),
    "worst10_rmse": ("worst 10 % RMSE", 1, None),
    "mae": ("MAE", 1, None),
    "r2": ("R2", 1, 3),
    "best_micro_f1": ("best micro-F1 %", 100, 2),
    "shared_best_micro_f1": ("best micro-F1 % of shared tests", 100, 2),
    "final_micro_f1": ("final micro-F1 %", 100, 2),
    "last10_evals_micro_f1": ("last 10 tests micro-F1 %", 100, 2),
    "macro_micro_f1": ("mean of clients' micro-F1 %", 100, 2),
    "worst10_micro_f1": ("worst 10 % micro-F1 %", 100, 2),
    "label_f1": ("macro-F1 %", 100, 2),
    "exact_match": ("exact match %", 100, 2),
    "ari": ("ARI", 1, 3),
    "rounds_to_target": ("rounds to target", 1, 1),
    "accuracy_gain": ("gain %", 100, 2),
    "rmse_reduction": ("RMSE lower by", 1, None),
    "f1_gain": ("micro-F1 gain %", 100, 2),
    "speedup": ("speed-up", 1, 2),
    "units": ("models down + up", 1, 0),
    "sim_time_s": ("simulated s", 1, 1),
    "wall_s": ("wall s", 1, 1),
}


def list_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the rows of a frame as dicts, with None where a value is missing."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def format_number(value: float, factor: float, digits: int | None, sign: str = "") -> str:
    """Returns a number in a measure's units, see `MEASURES`; a `sign` of "+" is always shown."""
    return f"{factor * value:{sign},.{digits}f}" if digits is not None else f"{value:{sign}.4g}"


def format_mean(
    estimate: tuple[float, float, int], runs: int, measure: str, plus: str = " ± "
) -> str:
    """Returns a mean of (mean, sd, number of values) with its sd, - where there is no value; of
    fewer values than `runs` it says so, for it would flatter a method. Both numbers have the same
    decimals: where those of `measure` are None, those of four digits of the mean. One value has no
    sd, and a number of tests only one above 0.
    """
    (mean, sd, values), (_, factor, digits) = estimate, MEASURES[measure]
    if not values:
        return "-"
    several = values > 1 and (sd > 0 or "evaluations" not in measure)
    if several and digits is None and 1e-4 <= abs(mean) < 1e4:
        digits = 3 - math.floor(math.log10(abs(mean)))
    shown = (mean, sd) if several else (mean,)
    text = plus.join(format_number(value, factor, digits) for value in shown)
    return text + (f" ({values}/{runs})" if values < runs else "")


def print_table(title: str, header: list[str], *lines: list[str]) -> None:
    """Prints a table on the terminal, of texts in rich's markup."""
    table = Table(title=title, title_justify="left")
    label = max(len(line[0]) for line in lines)
    table.add_column(header[0], min_width=min(36, label), overflow="fold")
    for heading in header[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    # redirected output has no width of its own
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def format_markdown(header: list[str], *lines: list[str]) -> str:
    """Returns a table in Markdown, of texts that are escaped already."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *lines])
