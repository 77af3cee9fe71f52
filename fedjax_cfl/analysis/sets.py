"""Sets of runs that differ in nothing but the seed, as a frame with a row per run: `label` names
the set of a run, `method` is the label without the data, and every one of `MEASURES` is a number.

A run beside the baseline's run of the same seed (Fielding, https://arxiv.org/abs/2411.01580,
section 3) has two more: how much more accurate it is in the end, and how much sooner it is as
accurate. Accuracies are then means over clients. The target is the baseline's accuracy in the end;
it is reached once every later test reaches it, too. Tests before all clients had a model are left
out: those that a clustered method has assigned first may be the easy ones.
"""

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fedjax_cfl.analysis.runs import DATA, IDENTITY, MADE_OF, find_runs, list_settings, read_run
from fedjax_cfl.analysis.tables import MEASURES
from fedjax_cfl.errors import InputError
from fedjax_cfl.formatting import escape_text
from fedjax_cfl.runs.display import follow
from fedjax_cfl.runs.results import rounds_to, tail_macro_score
from fedjax_cfl.scores import SCORES, find_owner, score_of

RELATIVE = (*(score.gain for score in SCORES), "speedup")  # measures that need a baseline
Rows = list[dict[str, Any]]  # of metrics.jsonl


def read_sets(
    paths: Iterable[Any], target: float | None = None, baseline: str | None = None
) -> pd.DataFrame:
    """Returns the finished runs at or below `paths`, each with the label of its set, ordered by
    sets. Raises InputError for a `baseline` that names no set.
    """
    each = [read_run(run_dir) for run_dir in follow(find_runs(list(paths)), "reading runs")]
    found = pd.DataFrame(each, dtype=object)
    if target is not None:
        found["rounds_to_target"] = [rounds_to(rows, target) for rows in found["rows"]]
    runs = label_runs(found)
    return runs if baseline is None else add_baseline(runs, baseline)


def label_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs ordered by sets, in the order in which they were found, with the names of
    their sets; `overrides`, the text of what varies within the same names; `pair`, what two runs
    share that are compared seed by seed: the seed and the data; `score`, what they are scored by;
    and `data`: the data set, partition and model, as far as they differ, and the scores' words.
    """
    runs = runs.reindex(columns=[*dict.fromkeys([*runs, *MEASURES, *IDENTITY, "seed", "data_id"])])
    runs[[*IDENTITY]] = runs[[*IDENTITY]].astype(object).fillna("").astype(str)
    runs[[*MEASURES]] = runs[[*MEASURES]].astype(float)
    scores = [score_of(rows) for rows in runs["rows"]]
    runs["score"] = pd.Series(scores, runs.index, dtype=object)
    pair = runs["seed"].map(str) + " " + runs["data_id"].map(str)
    runs["pair"] = pair.where(runs["seed"].notna())
    words = pd.Series([score.words for score in scores], runs.index)
    varying = [name for name in IDENTITY if runs[name].nunique() > 1]
    texts = [runs[name] for name in varying if name in DATA] + [words] * (words.nunique() > 1)
    runs["data"] = list(map(", ".join, zip(*texts, strict=True))) if texts else ""
    short = shorten_names({name for each in runs["overrides"] for name in each})
    labels: dict[int, dict[str, str]] = {}
    for _, same in runs.groupby([*IDENTITY]):
        swept = list_swept(same["overrides"])
        for place, run in zip(same.index, same.to_dict("records"), strict=True):
            varied = {name: run["overrides"][name] for name in swept if name in run["overrides"]}
            extra = escape_text(" ".join(f"{name}={value}" for name, value in varied.items()))
            values = list_defaults(run, swept) | varied
            settings = [f"{short[n]}={shorten_value(values[n])}" for n in swept if n in values]
            named = {n: run[n] for n in IDENTITY if n == IDENTITY[0] or n in varying}
            label = " ".join([*named.values(), *settings])
            method = " ".join([*(named[n] for n in named if n not in DATA), *settings])
            labels[place] = {"overrides": extra, "label": label, "method": method}
    runs[["overrides", "label", "method"]] = pd.DataFrame.from_dict(labels, orient="index")
    order = runs.groupby([*IDENTITY, "overrides"], sort=False).ngroup()
    return runs.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def list_defaults(run: dict[Any, Any], swept: list[str]) -> dict[str, str]:
    """Returns what a run has of the settings that others of its name were given, as 3 (default)."""
    names = [name for name in swept if name not in run["overrides"] and MADE_OF not in name]
    settings = list_settings(run["run_dir"]) if names and "run_dir" in run else {}
    return {name: f"{settings[name]} (default)" for name in names if name in settings}


def list_swept(overrides: Iterable[dict[str, str]]) -> list[str]:
    """Returns the settings that are not the same for all of these runs. What parts are made of
    counts between runs that say it, those from Python; of parts that vary together the first is
    enough.
    """
    overrides = list(overrides)
    python = [each for each in overrides if any(name.startswith(MADE_OF) for name in each)]
    swept, seen = [], set()
    names = {name for each in overrides for name in each}
    # a place in a list says less than a name
    for name in sorted(names, key=lambda name: (name.rpartition(".")[2].isdecimal(), name)):
        part = name.startswith(MADE_OF)
        values = tuple(each.get(name) for each in (python if part else overrides))
        if len({*values}) > 1 and not (part and values in seen):
            swept.append(name)
            seen.add(values)
    return swept


def shorten_value(value: str) -> str:
    """Returns a value as labels have it: of a long one its first signs, and a number of its own."""
    number = zlib.crc32(value.encode(errors="surrogatepass"))
    return escape_text(value if len(value) <= 200 else f"{value[:100]}... ({number:08x})")


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the last part of each setting's name, m of algorithm.m, where only one has it and it
    does not name another setting alone.
    """
    last = {name: name.rpartition(".")[2] for name in names}
    counts = Counter([*last.values(), *IDENTITY, "seed"])
    return {name: part if counts[part] == 1 else name for name, part in last.items()}


def keep_known(names: Iterable[str], runs: pd.DataFrame) -> list[str]:
    """Returns the measures without those of a score that none of the runs has, as RMSE."""
    return [name for name in names if find_owner(name) in (None, *runs["score"])]


def list_measures(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per set of runs: what it is of, how many runs it has, and of every measure that
    some set may have the mean, the sample sd, NaN for one run, and how many have it, `_n`.
    """
    names, sets = keep_known(MEASURES, runs), runs.groupby("label", sort=False)
    found = sets[names].agg(["mean", "std", "count"])
    short = {"mean": "mean", "std": "sd", "count": "n"}
    found.columns = [f"{name}_{short[part]}" for name, part in found.columns]
    counts = sets.agg(runs=("label", "size"), seeds=("seed", lambda each: " ".join(map(str, each))))
    named = sets[[*IDENTITY, "overrides"]].first()
    return pd.concat([named, counts, found], axis=1).reset_index()


# beside a baseline


def time_to_keep(rows: Rows, target: float) -> float | None:
    """Returns the simulated seconds, without a clock the rounds, after which every test is of
    all clients and has an accuracy of at least `target`, or an RMSE of at most that; None if the
    last one has not.
    """
    score, reached = score_of(rows), None
    # that had a model, or can have none, see `finalize`
    settled = [
        (row.get("evaluated_clients") or 0) + (row.get("groupless_clients") or 0) for row in rows
    ]
    most = max(settled, default=0)
    for row, clients in zip(reversed(rows), reversed(settled), strict=True):
        value = row.get(f"macro_{score.name}")
        if clients < most or value is None or score.is_better(target, value):
            break
        reached = row.get("sim_time_s") or row["round"]
    return reached


def compare_to_baseline(rows: Rows, baseline: Rows) -> dict[str, float | None]:
    """Returns the measures `RELATIVE` of a run: by how much its score is better, a difference of
    fractions or of RMSE, and the baseline's time to its own final score divided by the run's.

    The speed-up is None if the run does not reach it.
    """
    score = score_of(rows)
    gain = score.gain
    if rows is baseline:
        return {gain: 0.0, "speedup": 1.0}
    score_here, target = tail_macro_score(rows), tail_macro_score(baseline)
    if score_here is None or target is None or score_of(baseline) is not score:
        return {gain: None, "speedup": None}
    ours, theirs = time_to_keep(rows, target), time_to_keep(baseline, target)
    # the baseline's last tests may be below their own mean: then its time is the whole run
    theirs = theirs or baseline[-1].get("sim_time_s") or baseline[-1]["round"]
    better = score_here - target if score.higher else target - score_here
    return {gain: better, "speedup": theirs / ours if ours else None}


def add_baseline(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns the runs with the measures `RELATIVE` beside the run of their seed, on the same data,
    in the set called `name`, by its label or algorithm; `paired` says whether there is one.

    Raises InputError unless there is one such set, with one run for each seed and data.
    """
    base = runs[(runs["label"] == name) | (runs["algorithm"] == name)]
    if base["label"].nunique() != 1:
        labels = ", ".join(runs["label"].unique())
        raise InputError(f"--baseline {name}: must name one of the sets of runs: {labels}")
    base = base[base["rows"].map(bool) & base["pair"].notna()]
    if base["pair"].duplicated().any():
        seeds = " ".join(map(str, base["seed"]))
        raise InputError(
            f"--baseline {name}: holds a seed more than once (seeds {seeds}); name its folders, one"
            " for each seed"
        )
    theirs = dict(zip(base["pair"], base["rows"], strict=True))
    beside = [
        compare_to_baseline(rows, theirs[pair]) if pair in theirs else {}
        for rows, pair in zip(runs["rows"], runs["pair"], strict=True)
    ]
    found = pd.DataFrame(beside, runs.index).reindex(columns=[*RELATIVE]).astype(float)
    return runs.assign(**{n: found[n] for n in RELATIVE}, paired=[bool(one) for one in beside])
