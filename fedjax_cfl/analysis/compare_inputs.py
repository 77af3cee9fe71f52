"""What a comparison reads: finished runs, checked, for their files may have been edited
or be of something else.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_cfl.errors import InputError, suggest_nearest
from fedjax_cfl.formatting import escape_text
from fedjax_cfl.runs.labels import is_execution, name_parts, parse_overrides
from fedjax_cfl.runs.results import (
    METRICS_FILE,
    SUMMARY_FILE,
    check_numbers,
    read_metrics,
    read_summary,
    rounds_to,
    summarize_rows,
)
from fedjax_cfl.runs.scoring import scored_rounds
from fedjax_cfl.scores import SCORES

IDENTITY = ("algorithm", "dataset", "partition", "model", "preset")
DATA = ("dataset", "partition", "model")  # what runs must share to be compared
# what is read from a summary
NUMBERS = (
    *(
        f"{part}_{score.name}"
        for score in SCORES
        for part in ("best", "final", "last10_evals", "macro", "worst10")
    ),
    *(name for score in SCORES[1:] for name in score.measured),
    "ari",
    "rounds_to_target",
    "units",
    "wall_s",
    "accuracy",
    "discrepancy",
    "units_down",
    "units_up",
    "bytes_down",
    "bytes_up",
    "local_steps",
    "sim_time_s",
)
MAX_RUN_FILE_BYTES = 2**28  # of a file; as Python objects it takes up to twenty times that


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Returns the finished runs at or below `paths`, sorted, each once; prints which are left out
    because they are unfinished.
    """
    finished, begun = set(), dict[Path, str]()
    for path in map(Path, paths):
        if not path.is_dir():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            siblings = [item.name for item in beside if item.is_dir()]
            raise InputError(
                f"no folder {str(path)!r}{suggest_nearest(path.name, siblings)}: expected a run"
                " directory or a folder of runs"
            )
        finished |= {file.parent.resolve() for file in path.rglob(SUMMARY_FILE)}
        folders = [file.parent for file in path.rglob(METRICS_FILE)]
        # a run that was killed while it was compiled has nothing but its settings
        folders += [file.parent.parent for file in path.rglob(".hydra/config.yaml")]
        begun |= {folder.resolve(): str(folder) for folder in folders}
    print_unfinished({run_dir: name for run_dir, name in begun.items() if run_dir not in finished})
    if not finished:
        raise InputError(
            f"no finished run ({SUMMARY_FILE}) in {', '.join(repr(str(path)) for path in paths)}"
        )
    return sorted(finished)


def print_unfinished(found: Mapping[Path, str]) -> None:
    """Prints how many runs are unfinished and which, by their names: those that have rounds, and
    those that were stopped before their first evaluated round.
    """
    evaluated, others = list[str](), list[str]()
    for run_dir, name in sorted(found.items()):
        file = run_dir / METRICS_FILE
        (evaluated if file.is_file() and file.stat().st_size else others).append(name)
    for names, what in ((evaluated, f"no {SUMMARY_FILE}"), (others, "no evaluated round yet")):
        if names:
            count = f"{len(names)} run{'s' * (len(names) > 1)}"
            said = f"skipped, unfinished: {count} with {what}: {', '.join(names)}"
            print(escape_text(said), flush=True)


def read_run(run_dir: Path, target: float | None) -> dict[str, Any]:
    """Returns a run's rows, numbers, names and what the command line changed.

    `rounds_to_target` is the first round that reaches the `target`, an accuracy or an RMSE, None
    if none does. Raises InputError for files that no run wrote.
    """
    summary, rows = _read(run_dir)
    overrides = _read_overrides(run_dir, summary)
    names = {name: summary[name] for name in IDENTITY if summary.get(name) is not None}
    last = rows[-1] if rows else {}
    sent = [last[name] for name in ("units_down", "units_up") if last.get(name) is not None]
    return {
        **summary,
        **name_parts(names, overrides),
        **summarize_rows(rows),
        "rows": rows,
        "run_dir": run_dir,
        "asked": overrides,
        "evaluations": len(scored_rounds(rows)),
        "overrides": {
            name: value
            for name, value in parse_overrides(overrides).items()
            if name not in IDENTITY and name != "seed" and not is_execution(name)
        },
        "rounds_to_target": None if target is None else rounds_to(rows, target),
        "units": sum(sent) if sent else None,
        "sim_time_s": last.get("sim_time_s") or None,  # 0: no clock
        "wall_s": last.get("wall_s"),
    }


def _read(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the summary and the rows of a run, checked."""
    summary_file, metrics_file = run_dir / SUMMARY_FILE, run_dir / METRICS_FILE
    summary = read_summary(_check_file(summary_file).parent) or {}
    rows = read_metrics(_check_file(metrics_file).parent)
    names = [summary[name] for name in (*IDENTITY, "seed") if summary.get(name) is not None]
    _check_texts(summary_file, [str(name) if isinstance(name, int) else name for name in names])
    _check_texts(summary_file, summary.get("overrides") or [], shown=False)
    check_numbers(str(summary_file), summary, NUMBERS)
    return summary, rows


def _read_overrides(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """Returns the overrides of the command line, from the summary or from Hydra's own file."""
    lines = summary.get("overrides")
    file = run_dir / ".hydra" / "overrides.yaml"
    if lines is None and file.is_file():
        # a flat YAML list of strings, so that no YAML parser is needed
        text = _check_file(file).read_text(encoding="utf-8", errors="replace")
        lines = [
            line[2:].strip().strip("'\"") for line in text.splitlines() if line.startswith("- ")
        ]
        _check_texts(file, lines, shown=False)
    return lines or []


def _check_file(path: Path) -> Path:
    """Returns the path of a file of a run, if it can be read whole."""
    try:
        if not path.is_file():
            raise InputError(
                f"{path}: file is missing or no regular file, expected one as a run writes it"
            )
        if path.stat().st_size > MAX_RUN_FILE_BYTES:
            raise InputError(
                f"{path}: file has {path.stat().st_size} bytes, expected at most"
                f" {MAX_RUN_FILE_BYTES}"
            )
        with path.open("rb"):
            return path
    except OSError as error:
        raise InputError(
            f"{path}: file cannot be read ({error.strerror}), expected a readable file"
        ) from None


def _check_texts(path: Path, texts: Any, shown: bool = True) -> None:
    """Raises InputError unless `texts` are lines that a table and a plot can show as they are; with
    `shown` of False any texts: a list of columns may be long, and a path have any letters.
    """
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and (not shown or (text.isprintable() and len(text) <= 1000))
        for text in texts
    ):
        raise InputError(
            f"{path}: overrides or names are no plain text, expected what a run writes"
        )
