"""Which round of a run is reported, and when a run ends early: by validation samples alone, see
`evaluate.choose` and `evaluate.patience`. A row has `chosen_round`, the best so far, where a round
is chosen.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fedjax_cfl.runs.results import to_plain
from fedjax_cfl.scores import find_score


class Standing(NamedTuple):
    """What the tests so far say."""

    best: float | None = None  # mean over clients of their scores on validation samples
    round: int | None = None  # of the first test that has it
    waited: int = 0  # tests since

    def follow(self, row: dict[str, Any]) -> "Standing":
        """Returns what holds after a further row. Tests whose scores do not count yet, see `Plan`,
        are no reason to end.
        """
        score = find_score(row)
        value = to_plain(row.get(f"validation_macro_{score.name}"))
        if value is not None and (self.best is None or score.is_better(value, self.best)):
            return Standing(value, row["round"])
        return self._replace(waited=self.waited + (self.best is not None))

    def ends(self, patience: int) -> bool:
        """Returns whether a run of this patience, 0: it has no end, ends here."""
        return 0 < patience <= self.waited


def stand(rows: Iterable[dict[str, Any]]) -> Standing:
    """Returns what all rows of a run so far say."""
    standing = Standing()
    for row in rows:
        standing = standing.follow(row)
    return standing
