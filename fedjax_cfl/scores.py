"""What runs are compared by: the accuracy of classes, or the root mean square error (RMSE) of
numbers that are regressed. Rows and summaries say which by the fields that they have.
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


ERRORS = ("rmse", "mae", "r2")  # what a regression measures
ACCURACY = Score(
    "accuracy", "accuracy", "correct test samples", True, True,
    ("macro_accuracy", "weighted_macro_f1", "macro_f1", "worst10_accuracy", "ari", "group_sizes",
     "group_accuracy", "concept_accuracy"),
)  # fmt: skip
RMSE = Score(
    "rmse", "RMSE", "root mean square error", False, False,
    ("mae", "r2", *(f"{part}_{name}" for part in ("macro", "worst10") for name in ERRORS), "ari",
     "group_sizes", *(f"{part}_{name}" for part in ("group", "concept") for name in ERRORS)),
)  # fmt: skip
SCORES = (ACCURACY, RMSE)


def find_owner(measure: str) -> Score | None:
    """Returns the score whose runs alone have a measure of this name, None: all have it."""
    if ACCURACY.name in measure:
        return ACCURACY
    return RMSE if any(name in measure for name in ERRORS) else None


def find_score(fields: Mapping[str, Any]) -> Score:
    """Returns the score of a row, of a summary, or of anything else with such fields."""
    regressed = any(name in fields for name in ("rmse", "final_rmse", "best_rmse"))
    return RMSE if regressed else ACCURACY


def score_of(rows: list[dict[str, Any]]) -> Score:
    """Returns the score of a run by its rows; that of classes where there are none."""
    return find_score(rows[-1]) if rows else ACCURACY
