"""The measures that runs are compared by, and tables of them as people read them."""

import math
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedjax_cfl.scores import SCORES

UNITS = {"accuracy": "%", "rmse": "RMSE", "micro_f1": "micro-F1 %"}


class Measure(NamedTuple):
    """How a measure is shown."""

    heading: str
    factor: float = 1
    digits: int | None = None  # decimals, None: see `fit_digits`
    cost: bool = False  # the smallest is best, and a spread of 0 is not shown
    words: str = ""  # in a caption, "": its heading


def list_scores(name: str, words: str) -> dict[str, Measure]:
    """Returns a measure of every score, as final_accuracy and final_rmse, by its field."""
    return {
        f"{name}_{score.name}": Measure(
            f"{words} {UNITS[score.name]}".replace("% %", "%"),
            100 if score.percent else 1,
            2 if score.percent else None,
            words=f"test {score.words}{' in %' if score.percent else ''}, {words}",
        )
        for score in SCORES
    }


# by field of compare.csv, the most important first: a narrow terminal shows no more than fit
MEASURES: dict[str, Measure] = {
    **list_scores("final", "final"),
    "mae": Measure("MAE"),
    "r2": Measure("R2", 1, 3),
    "label_f1": Measure("macro-F1 %", 100, 2),
    "exact_match": Measure("exact match %", 100, 2),
    **list_scores("worst10", "worst 10 %"),
    "ari": Measure("ARI", 1, 3),
    "accuracy_gain": Measure("gain %", 100, 2),
    "rmse_reduction": Measure("RMSE lower by"),
    "f1_gain": Measure("micro-F1 gain %", 100, 2),
    "speedup": Measure("speed-up", 1, 2),
    "rounds_to_target": Measure("rounds to target", 1, 1, cost=True),
    "chosen_round": Measure("round chosen on validation", 1, 1, cost=True),
    "units": Measure("models down + up", 1, 0, cost=True),
    "megabytes": Measure("MB down + up", 1, 1, cost=True),
    "local_steps": Measure("local steps", 1, 0, cost=True),
    "sim_time_s": Measure("simulated s", 1, 1, cost=True),
    **list_scores("macro", "mean over clients"),
    **list_scores("last10_evals", "last 10 tests"),
    **list_scores("best", "best over tests"),
    "evaluations": Measure("tests that count", 1, 0, cost=True),
    "wall_s": Measure("wall s", 1, 1, cost=True),
}
# as papers write them: of "CFL-GP" the name here is cfl_gp; other names stay as they are
NAMES = """
Adaptive-FedAvg, APFL, Auxo, CelebA, CFL, CFL-GP, CLoVE, Ditto, Fashion-MNIST, FedAdagrad, FedAdam,
FedALA, FedAvg, FedAvgM, FedBABU, FedBN, FedClust, FedCluster, FedDANE, FedDist, FedDrift,
FedDrift-Eager, FedDWS, FedDyn, FedEM, FedFomo, FedGroup, FedGrouProx, FedGWC, FedNova, FedPer,
FedProx, FedRC, FedRep, FedSGD, FedSoft, FedYogi, FEMNIST, FeSEM, FeSEM-MA, Fielding,
Fielding-Global, Fielding-Individual, Fielding-Selected, Fielding-Static, FL+HC, FLASH, FlexCFL,
FLUX, IFCA, IFCA-Gradient, IFCA-Restarts, Known groups, LG-FedAvg, MD-ICFL, MNIST, MOON, PACFL,
Per-FedAvg, pFedMe, RAC, RCC, SCAFFOLD, Sent140, Shakespeare, StoCFL, TKM, WeCFL
"""
PAPER_NAMES = {re.sub(r"[-+ ]", "_", n.lower()): n for n in re.split(r",\s", NAMES.strip())}
PAPER_NAMES |= {
    "centralised": "Central", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fesem_mig": "FeSEM+",
    "fine_tune": "Fine-tuning", "hypocluster": "HypCluster", "ifca_mig": "IFCA+",
    "nonfed": "Local", "qfedavg": "q-FedAvg",
}  # fmt: skip


def list_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the rows of a frame as dicts, with None where a value is missing."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def fit_digits(measure: Measure, column: Iterable[float]) -> Measure:
    """Returns a measure with the decimals of all numbers of a column, where it has none of its own:
    those of four digits of the middle one by size, the lower of two, which neither a run that
    diverged nor a difference near 0 moves. Of a middle below 1e-4 each number has four digits.
    """
    sizes = sorted(abs(value) for value in column if value and math.isfinite(value))
    if measure.digits is not None or not sizes or (middle := sizes[(len(sizes) - 1) // 2]) < 1e-4:
        return measure
    return measure._replace(digits=max(0, 3 - math.floor(math.log10(middle))))


def format_number(value: float, measure: Measure, sign: str = "") -> str:
    """Returns a number in a measure's units; a `sign` of "+" is always shown."""
    if measure.digits is None or abs(value) >= 1e12:
        return f"{measure.factor * value:{sign}.4g}"
    return f"{measure.factor * value:{sign},.{measure.digits}f}"


def format_mean(
    estimate: tuple[float, float, int],
    runs: int,
    measure: Measure,
    plus: str = " ± ",
    sign: str = "",
) -> str:
    """Returns a mean of (mean, sd, number of values) with its sd, - where there is no value; of
    fewer values than `runs` it says so, for it would flatter a method. One value has no sd, and a
    cost that is the same for all runs shows none.
    """
    mean, sd, values = estimate
    if not values:
        return "-"
    several = values > 1 and (not measure.cost or round(measure.factor * sd, measure.digits) > 0)
    text = format_number(mean, measure, sign)
    text += plus + format_number(sd, measure) if several else ""
    return text + (f" ({values}/{runs})" if values < runs else "")


def print_table(title: str, header: list[str], *lines: list[str], where: str = "") -> None:
    """Prints a table of texts in rich's markup. A terminal that is too narrow gets the first
    columns, and a line that names the others and says `where` they are; redirected output has all.
    """
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    widths = [
        max(*map(len, words.split() or [""]), *(Text.from_markup(cell).cell_len for cell in cells))
        for words, *cells in zip(header, *lines, strict=True)
    ]
    label = min(widths[0], max(12, console.width // 4))
    ends = [label + 4 + sum(width + 3 for width in widths[1:n]) for n in range(1, len(header) + 1)]
    shown = max(2, sum(end <= console.width for end in ends))
    console.print(title, highlight=False, markup=False)
    table = Table()
    table.add_column(header[0], min_width=label, overflow="fold")
    for heading, width in zip(header[1:shown], widths[1:], strict=False):
        table.add_column(heading, justify="right", overflow="fold", min_width=width)
    for line in lines:
        table.add_row(*line[:shown])
    console.print(table)
    if shown < len(header):
        rest = ", ".join(header[shown:])
        console.print(f"not shown here, but {where}: {rest}", highlight=False, markup=False)


def format_markdown(header: list[str], *lines: list[str]) -> str:
    """Returns a table in Markdown, of texts that are escaped already."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *lines])
