"""Reader of SQLite files, under the rules of `readers`: nothing is written, and a view, which may
run functions, is no table.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fedjax_cfl.data.datasets.readers import list_names, open_unpacked, report_damage
from fedjax_cfl.errors import InputError

LONGEST = 2**28  # bytes of one value


@contextlib.contextmanager
def open_sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    """Yields a database that cannot be written; any error of reading it is an `InputError`."""
    with open_unpacked(path) as (file, _):
        start = bytes(file.peek(16)[:16])
    if start != b"SQLite format 3\0":
        hint = ": unpack it, xz --format=lzma -dk FILE" if path.suffix == ".lzma" else ""
        raise InputError(f"{path}: file is no SQLite database, expected one{hint}")
    name = f"{Path(os.path.abspath(path)).as_uri()}?mode=ro&immutable=1"
    with (
        report_damage(path, "a complete SQLite database"),
        contextlib.closing(sqlite3.connect(name, uri=True)) as database,
    ):
        database.execute("PRAGMA trusted_schema=OFF")
        database.execute("PRAGMA query_only=ON")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        yield database


def find_table(path: Path, database: sqlite3.Connection, columns: dict[str, list[str]]) -> str:
    """Returns the first of the tables `columns`, name -> columns, that a database has. Raises
    InputError if it has none, or one that is a view, virtual or computed.
    """
    rows = database.execute("SELECT name, type, rootpage FROM sqlite_master ORDER BY name")
    found = {name: kind == "table" and page > 0 for name, kind, page in rows}
    name = next((name for name in columns if name in found), None)
    if name is None:
        raise InputError(
            f"{path}: holds the tables {list_names(list(found)) or 'none'}, expected"
            f" {' or '.join(columns)}"
        )
    # hidden 0: a column whose values are stored
    stored = database.execute(
        "SELECT name FROM pragma_table_xinfo(?) WHERE hidden = 0", (name,)
    ).fetchall()
    if not found[name] or not {(column,) for column in columns[name]} <= set(stored):
        raise InputError(
            f"{path}: {name} is no table with the columns {', '.join(columns[name])}, expected one"
        )
    return name
