"""The cells of a published table: which runs it has, which further settings they may be given,
and which of them are finished.
"""

import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from fedjax_cfl.analysis import trials
from fedjax_cfl.cli.tune import TRIAL_SEEDS
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.labels import is_execution, parse_overrides
from fedjax_cfl.runs.results import read_json, read_summary
from fedjax_cfl.validation import check_value

TABLES = Path(__file__).resolve().parent / "tables"
# with these a run would not be one cell in its folder
RESERVED_SETTINGS = {"run_dir", "seeds", "vectorize"}


class Cell(NamedTuple):
    """One run of a table; where its seeds run together, all of them; of a table that tunes, all
    trials and last runs of one method and data set.
    """

    row: str
    column: str  # "" where the table's columns are measures of one run
    seed: int  # of several the first
    folder: Path
    overrides: list[str]
    # of a table that tunes: the values tried, each as KEY=V1,V2, and the seeds of the trials where
    # the row names them
    grid: tuple[str, ...] = ()
    trial_seeds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()  # those that run together, of a table that tunes its last runs

    def __str__(self) -> str:
        words = f"{len(self.seeds)} seeds" if self.seeds else f"seed {self.seed}"
        words += ", tuned" if self.grid else ""
        return ", ".join([self.row, *([self.column] if self.column else []), words])


def load_table(name: str) -> dict:
    """Returns a table: title, columns and rows of overrides, published numbers. Raises
    InputError if there is no such table.
    """
    check_value("paper", name, Literal[tuple(sorted(path.stem for path in TABLES.glob("*.yaml")))])
    return yaml.safe_load((TABLES / f"{name}.yaml").read_text(encoding="utf-8"))


def read_named(flag: str, path: Path) -> str:
    """Returns the text of the file that `flag` named. Raises InputError where there is none."""
    try:
        if path.is_file():  # no device, which may never end
            return path.read_text(encoding="utf-8")
        reason = "no such file"
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    raise InputError(f"{flag} {path}: cannot be read ({reason})")


def add_methods(table: dict, path: Path | None) -> None:
    """Adds the columns of a YAML file to a table, NAME: [KEY=VALUE, ...], where the table tunes
    NAME: {overrides: [KEY=VALUE, ...], tune: [KEY=V1,V2,...]}, and their names as its `own`. Raises
    InputError for what is no such column, or has not as many trials as the others have.
    """
    if path is None:
        return
    if "columns" not in table:
        raise InputError(f"--methods {path}: {table['title']} has no methods as its columns")
    try:
        given = yaml.safe_load(read_named("--methods", path))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--methods {path}: cannot be read ({reason})") from None
    if not isinstance(given, dict) or not given:
        raise InputError(f"--methods {path}: expected NAME: and its settings")
    trials_each = {count_trials(table, column) for column in table["columns"]}
    for name, entry in given.items():
        where = f"--methods {path}, {name}"
        plain = isinstance(name, str) and Path(name).name == name and not name.startswith(".")
        if not plain or name in table["columns"]:
            raise InputError(
                f"{where}: expected a name that the table has not, without / and not .NAME"
            )
        parts = entry if isinstance(entry, dict) and "tune" in table else {"overrides": entry}
        parts = {"overrides": [], "tune": []} | parts
        if parts.keys() != {"overrides", "tune"} or not all(map(is_overrides, parts.values())):
            form = "{overrides: [KEY=VALUE, ...], tune: [KEY=V1,V2]}"
            raise InputError(f"{where}: expected {form if 'tune' in table else '[KEY=VALUE, ...]'}")
        table["columns"][name] = parts if "tune" in table else entry
        if (count := count_trials(table, name)) not in trials_each:
            raise InputError(f"{where}: {count} trials, where each method has {max(trials_each)}")
    for row, entry in table["rows"].items():
        if "runs" not in entry:
            entry["columns"] = list(dict.fromkeys([*row_columns(table, row), *given]))
    table["own"] = list(given)


def is_overrides(given: object) -> bool:
    """Returns whether this is a list of KEY=VALUE."""
    return isinstance(given, list) and all(isinstance(text, str) and "=" in text for text in given)


def count_trials(table: dict, column: str) -> int:
    """Returns how many combinations of values a column tries; 1 in a table that does not tune."""
    grid = make_grid(table, column)
    return math.prod(text.partition("=")[2].count(",") + 1 for text in grid)


def make_grid(table: dict, column: str) -> tuple[str, ...]:
    """Returns the values that a column tries, each as KEY=V1,V2: of its own settings, and of those
    of the table that it does not name.
    """
    _, values = split_column(table, column)
    named = {text.partition("=")[0]: text for text in (*table.get("tune", ()), *values)}
    return tuple(named.values())


def match_names(field: str, asked: list[str] | None, known: Iterable[str]) -> list[str]:
    """Returns the names that `asked` lists, all of them if it is None; `*` stands for
    anything. Raises InputError for unknown names.
    """
    known = list(known)
    for pattern in asked or []:
        if not fnmatch.filter(known, pattern):
            check_value(field, pattern, Literal[tuple(known)])
    return [
        name
        for name in known
        if asked is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in asked)
    ]


def source_rows(table: dict, row: str) -> list[str]:
    """Returns the rows whose runs a row shows: its own, those of the row it names, of which it
    shows another measure, or those of several rows, of which it shows the mean.
    """
    named = table["rows"][row].get("runs", row)
    return named if isinstance(named, list) else [named]


def row_columns(table: dict, row: str) -> list[str]:
    """Returns the columns a row has: those it lists, or has published numbers for, or
    all; measures are columns, too.
    """
    entry = table["rows"][source_rows(table, row)[0]]
    return entry.get("columns") or list(
        table.get("measures") or entry.get("published") or table["columns"]
    )


def make_cells(
    name: str,
    table: dict,
    out: Path,
    rows: list[str],
    columns: list[str] | None,
    seeds: Iterable[int],
    extra: list[str],
) -> Iterator[Cell]:
    """Yields the cells of the given rows, columns and seeds; seeds are outermost, so that a
    whole table comes first.

    Rows that share their runs have one cell together, that of the row which owns them. A table
    that tunes has one cell for all seeds, as has one with `seeds: together` of several.

    Args: `name` is the experiment of conf/experiment that the runs share; `table` is that of
    `load_table`; `out` is the folder of all cells; `rows` and `columns` are names in the table,
    columns of None: all; `extra` are further overrides of every cell.
    """
    owners = list(dict.fromkeys(owner for row in rows for owner in source_rows(table, row)))
    seeds = list(seeds)
    together = "tune" in table or (len(seeds) > 1 and table.get("seeds") == "together")
    for seed in seeds[:1] if together else seeds:
        for row in owners:
            entry = table["rows"][row]
            for column in row_columns(table, row) if "columns" in table else [""]:
                if columns is not None and column and column not in columns:
                    continue
                own, _ = split_column(table, column)
                overrides = [f"experiment={name}", *entry["overrides"], *own]
                folder = out / row / column
                if "tune" in table:
                    grid = make_grid(table, column)
                    tried = tuple(entry.get("trial_seeds", ()))
                    asked = [*overrides, *extra]
                    yield Cell(row, column, seed, folder, asked, grid, tried, tuple(seeds))
                elif together:
                    folder, asked = folder / f"seeds{len(seeds)}", [*overrides, *extra]
                    yield Cell(row, column, seed, folder, asked, seeds=tuple(seeds))
                else:
                    overrides += [f"seed={seed}", *extra]
                    yield Cell(row, column, seed, folder / f"seed{seed}", overrides)


def split_column(table: dict, column: str) -> tuple[list[str], list[str]]:
    """Returns the overrides of a column, and the values that are tried of settings of its own."""
    entry = table["columns"][column] if column else []
    return (entry["overrides"], entry["tune"]) if isinstance(entry, dict) else (entry, [])


def check_cells(
    todo: list[Cell],
    extra: list[str],
    added: Collection[str],
    resolve_settings: Callable[[list[str]], object],
) -> None:
    """Raises InputError, before anything runs, if one of the overrides `extra` names a
    setting that the cells set themselves, or one of them or of the columns `added` is not allowed
    in a run.

    `resolve_settings(overrides)` raises what the run itself would. It is called with one cell
    of every row and of every column.
    """
    seen = set()
    for cell in todo:
        if not extra and cell.column not in added:
            continue
        if {("row", cell.row), ("column", cell.column)} <= seen:
            continue
        seen |= {("row", cell.row), ("column", cell.column)}
        own = {
            text.partition("=")[0]
            for text in [*cell.overrides[: len(cell.overrides) - len(extra)], *cell.grid]
        }
        for override in extra:
            name = override.partition("=")[0].lstrip("+~")
            if name in own | RESERVED_SETTINGS:
                raise InputError(
                    f"{override}: a cell has its own {name}; see --rows, --columns, --seeds and"
                    " --out"
                )
        try:
            resolve_settings([*cell.overrides, *(text.partition(",")[0] for text in cell.grid)])
        except InputError as error:
            raise InputError(f"{cell}: {error}") from None


def filter_overrides(overrides: list[str]) -> set[str]:
    """Returns the overrides that say which cell a run is: all but the number of rounds and
    those that say only how it runs. Of several for one setting the last counts.
    """
    last = {override.partition("=")[0]: override for override in overrides}
    return {text for name, text in last.items() if name != "rounds" and not is_execution(name)}


def requested_rounds(overrides: list[str]) -> str | None:
    """Returns the last value of `rounds`, None: the setting's own."""
    return parse_overrides(overrides).get("rounds")


def read_chosen(folder: Path) -> dict[str, Any] | None:
    """Returns what `tune` has written about its choice, None where it has not finished."""
    path = folder / trials.CHOSEN_FILE
    if not path.is_file():
        return None
    chosen = read_json(path)
    if not isinstance(chosen.get("given"), list) or not isinstance(chosen.get("seeds"), list):
        raise InputError(f"{path}: has no given or seeds, expected what tune writes")
    return chosen


def read_started(cell: Cell) -> tuple[list[str], list[int]] | None:
    """Returns the overrides with which a finished cell ran, and its seeds, None if it has not
    finished.
    """
    if cell.grid:
        chosen = read_chosen(cell.folder)
        return None if chosen is None else (chosen["given"], chosen["seeds"])
    first, *others = [read_summary(folder) for folder in list_runs(cell)]
    if first is None or None in others:
        return None
    ran = first.get("overrides") or []
    if cell.seeds:
        ran = [text for text in ran if not text.startswith("seed=")]
    return ran, list(cell.seeds) or [cell.seed]


def has_run(cell: Cell) -> bool:
    """Returns whether the cell has finished with its number of rounds. Raises InputError if
    its folder has a run with other settings.
    """
    started = read_started(cell)
    if started is None:
        return False
    (ran, seeds), asked = started, [*cell.overrides, *cell.grid]
    differ = sorted(filter_overrides(ran) ^ filter_overrides(asked))
    if cell.seeds and seeds != list(cell.seeds):
        differ.append(f"{len(seeds)} seeds")
    if cell.grid:
        tried = (read_chosen(cell.folder) or {}).get("trial_seeds")
        if tried not in (None, list(cell.trial_seeds or TRIAL_SEEDS)):
            differ.append(f"trials of seeds {' '.join(map(str, tried))}")
    if differ:
        raise InputError(
            f"{cell.folder}: was run with other settings ({', '.join(differ)}); choose another"
            " folder with --out"
        )
    return requested_rounds(ran) == requested_rounds(asked)


def list_runs(cell: Cell) -> list[Path]:
    """Returns the directories of the runs that a finished cell shows, seeds in order."""
    if cell.grid:
        return [run_dir for run_dir, _ in trials.list_runs(cell.folder / trials.LAST_RUNS)]
    return [cell.folder / str(seed) for seed in cell.seeds] or [cell.folder]


def find_finished(
    name: str, table: dict, out: Path, extra: list[str]
) -> dict[tuple[str, str], list[Path]]:
    """Returns the folders of all finished cells of these settings in `out`, by (row,
    column), seeds in order; rounds may differ.
    """
    found: dict[tuple[str, str], list[Path]] = {}
    rows = list(table["rows"])
    # not out.glob("**/..."): inside live runs folders come and go
    places = {cell.folder.parent for cell in make_cells(name, table, out, rows, None, [0], extra)}
    names = {path.name[4:] for place in places for path in place.glob("seed*") if path.is_dir()}
    seeds = sorted(int(name) for name in names if name.isdecimal())
    if "tune" in table:
        seeds = [0]  # one cell for all
    counts = {path.name[5:] for place in places for path in place.glob("seeds*") if path.is_dir()}
    several = sorted((int(count) for count in counts if count.isdecimal()), reverse=True)
    for each in [*map(range, several), seeds]:  # of seeds that ran together and alone, the former
        these: dict[tuple[str, str], list[Path]] = {}
        for cell in make_cells(name, table, out, rows, None, each, extra):
            started, asked = read_started(cell), [*cell.overrides, *cell.grid]
            if started is not None and filter_overrides(started[0]) == filter_overrides(asked):
                these.setdefault((cell.row, cell.column), []).extend(list_runs(cell))
        found = these | found
    return found
