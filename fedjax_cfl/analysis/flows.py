"""Who moved where: groups followed through the evaluations of a run, and the flows of
clients between them.

A method numbers its groups as it likes, and may renumber them. Here a group goes on as
the one of the evaluation before that shares most clients with it.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment

from fedjax_cfl.runs.assignments import Assignments

OTHER = "other"  # of classes, those beyond the most frequent


class Classes(NamedTuple):
    """What clients are coloured by."""

    kind: str  # in words
    names: list[str]  # of class 0, 1, ...
    values: list[int]  # true group, label or group of these, without that of `OTHER`
    numbers: np.ndarray  # [E, R] int, -1 where a client's class is unknown


def has_groups(groups: np.ndarray) -> bool:
    """Returns whether groups [E, R] are any: more than one somewhere, and not a model for
    each client.
    """
    each = (row[row >= 0] for row in groups)
    return any(1 < np.unique(met).size <= max(2, met.size // 2) for met in each)


def match_groups(groups: np.ndarray) -> np.ndarray:
    """Returns groups [E, R], renumbered so that a number means the same group throughout.

    The groups of an evaluation take the numbers of those of the one after with which they
    share most clients. The rest are new, and keep the method's number if no group has had it.
    Followed from the last evaluation back: there numbers are the method's, as in its other files.
    """
    followed, used = [groups[-1]], {*groups[-1].tolist()}
    for own in groups[-2::-1]:
        present, before = (np.unique(each[each >= 0]) for each in (own, followed[-1]))
        overlap = (own == present[:, None]).astype(int) @ (followed[-1][:, None] == before)
        pairs = np.transpose(linear_sum_assignment(-overlap)).tolist()
        name = {int(present[new]): int(before[old]) for new, old in pairs if overlap[new, old]}
        for group in present.tolist():
            name.setdefault(group, group if group not in used else max(used) + 1)
            used.add(name[group])
        followed.append(pd.Series(own).map(name).fillna(-1).to_numpy(own.dtype))
    return np.stack(followed[::-1])


def choose_classes(
    found: Assignments, followed: np.ndarray, labels: np.ndarray | None, most: int = 7
) -> Classes:
    """Returns what to colour clients by: the true group, the most frequent label or the last
    group, the first of these that can be used.

    True groups must be known for half of the entries or more; labels must be known and differ
    between clients. `labels` [S, C] are the clients' training labels. The `most` frequent
    classes have names of their own.
    """
    if found.concepts is not None and 2 * (found.concepts >= 0).sum() >= found.concepts.size:
        kind, prefix, numbers = "true group at the time", "true group", found.concepts
    elif labels is not None and np.unique(labels.argmax(1)).size > 1:
        kind, prefix = "most frequent label of the client", "label"
        numbers = np.broadcast_to(labels.argmax(1), followed.shape)
    else:
        kind, prefix = "last group", "group"
        numbers = np.broadcast_to(followed[-1], followed.shape)
    values, counts = np.unique(numbers[numbers >= 0], return_counts=True)
    kept = np.sort(values[np.argsort(-counts, kind="stable")][:most])
    names = [f"{prefix} {value}" for value in kept.tolist()]
    if values.size > most:
        names.append(OTHER)
    classes = np.where(numbers >= 0, most, -1)
    for place, value in enumerate(kept.tolist()):
        classes[numbers == value] = place
    return Classes(kind, names, kept.tolist(), classes)


def count_moves(followed: np.ndarray) -> np.ndarray:
    """Returns the share [E] of clients that changed their group since the evaluation
    before, among those that had one; 0 at the first.
    """
    had, moved = followed[:-1] >= 0, followed[1:] != followed[:-1]
    shares = (had & moved).sum(1) / had.sum(1).clip(1)
    return np.concatenate([[0.0], shares])


def choose_snapshots(evaluations: int, most: int) -> np.ndarray:
    """Returns which evaluations to show: all, or `most` evenly apart, with the first and
    the last.
    """
    return np.unique(np.linspace(0, evaluations - 1, min(evaluations, most)).round().astype(int))


def count_flows(before: np.ndarray, after: np.ndarray, classes: np.ndarray) -> pd.DataFrame:
    """Adds up the clients [R] by their groups before and after, `source` and `target`, and their
    class `kind`: a row for each, with how many `clients`.
    """
    table = pd.DataFrame({"source": before, "target": after, "kind": classes})
    return table.groupby([*table]).size().rename("clients").reset_index()
