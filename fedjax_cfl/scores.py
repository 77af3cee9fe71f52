"""What runs are compared by: the accuracy of classes, the root mean square error (RMSE) of numbers
that are regressed, the micro-F1 of labels. Rows and summaries say which by the fields they have.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Score(NamedTuple):
    """The score of a kind of task, as rows, tables and pictures have it."""

    name: str  # of the field in rows; that of further fields begins with best_, final_, macro_ ...
    words: str  # what it is called in a sentence
    axis: str  # what an axis says of it
    higher: bool  # True: the higher the better
    percent: bool  # True: a share, shown in percent
    gain: str  # what a comparison calls how much better it is than a baseline's
    measured: tuple[str, ...]  # all that is measured of a client, of a group and over all
    # what else an evaluation measures, and a summary takes from the last one
    beside: tuple[str, ...]

    def is_better(self, value: float, than: float) -> bool:
        """Returns whether a value is better than another; no value is if one of them is NaN."""
        return value > than if self.higher else value < than

    def pick_best(self, values: Any) -> Any:
        """Returns the best of at least one value."""
        return max(values) if self.higher else min(values)

    def format(self, value: float | None, digits: int = 2) -> str:
        """Returns a value as text, - where there is none; `digits` are those of a percentage."""
        if value is None:
            return "-"
        return f"{value:.{digits}%}" if self.percent else f"{value:.4g}"


def list_beside(name: str, *others: str) -> tuple[str, ...]:
    """Returns what an evaluation measures beside a score of targets."""
    every = (name, *others)
    over_clients = (f"{part}_{one}" for part in ("macro", "worst10") for one in every)
    by_group = (f"{part}_{one}" for part in ("group", "concept") for one in every)
    return (*others, *over_clients, "ari", "group_sizes", *by_group)


ERRORS = ("rmse", "mae", "r2")  # what a regression measures
LABEL_SCORES = ("micro_f1", "label_f1", "exact_match")  # what is measured of labels
ACCURACY = Score(
    "accuracy", "accuracy", "correct test samples", True, True, "accuracy_gain", ("accuracy",),
    ("macro_accuracy", "weighted_macro_f1", "macro_f1", "worst10_accuracy", "ari", "group_sizes",
     "group_accuracy", "concept_accuracy"),
)  # fmt: skip
RMSE = Score(
    "rmse", "RMSE", "root mean square error", False, False, "rmse_reduction", ERRORS,
    list_beside(*ERRORS),
)  # fmt: skip
MICRO_F1 = Score(
    "micro_f1", "micro-F1", "micro-F1 of the labels", True, True, "f1_gain", LABEL_SCORES,
    list_beside(*LABEL_SCORES),
)  # fmt: skip
SCORES = (ACCURACY, RMSE, MICRO_F1)


def find_owner(measure: str) -> Score | None:
    """Returns the score whose runs alone have a measure of this name, None: all have it."""
    for score in SCORES:
        if measure == score.gain or any(name in measure for name in score.measured):
            return score
    return None


def find_score(fields: Mapping[str, Any]) -> Score:
    """Returns the score of a row, of a summary, or of anything else with such fields."""
    for score in (RMSE, MICRO_F1):
        names = score.name, f"final_{score.name}", f"best_{score.name}"
        if any(name in fields for name in names):
            return score
    return ACCURACY


def describe_rows(rows: list[dict[str, Any]]) -> str:
    """Returns the last test of a run, and the best one, in words."""
    if not rows:
        return "no test"
    score, last = score_of(rows), rows[-1]
    tested = [row[score.name] for row in rows if is_known(row.get(score.name))]
    words = f"{score.words} {score.format(last.get(score.name))} after {last['round']} rounds"
    words += f" (best {score.format(score.pick_best(tested))})" if tested else ""
    words += f", ARI {last['ari']:.2f}" if is_known(last.get("ari")) else ""
    sizes = last.get("group_sizes") or []
    return words + (f", clients per group {list(map(int, sizes))}" if len(sizes) > 1 else "")


def pick_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a small table shows of a row."""
    score = find_score(row).name
    names = ("round", score, f"worst10_{score}", "ari", "group_sizes", "units_down", "units_up")
    return {name: row[name] for name in names if is_known(row.get(name))}


def is_known(value: Any) -> bool:
    """Returns whether a value of a row is there: neither None nor NaN."""
    return value is not None and value == value


def score_of(rows: list[dict[str, Any]]) -> Score:
    """Returns the score of a run by its rows; that of classes where there are none."""
    return find_score(rows[-1]) if rows else ACCURACY
