"""What the programs here share: their options, processes that they measure in, and tables."""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def make_parser(doc: str, quick: str) -> argparse.ArgumentParser:
    """Returns a parser that prints `doc` as it is, with --quick, of which `quick` says what
    it does.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def call(
    command: list[str], said: str, environment: dict[str, str] | None = None, **more: Any
) -> str:
    """Runs a command in a process of its own and returns what it prints; ends this program
    where it fails, with `said` and its last words.
    """
    done = subprocess.run(
        command, env=os.environ | (environment or {}), capture_output=True, text=True, **more
    )
    if done.returncode:
        sys.exit(f"{said} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def call_side(command: list[str], said: str, environment: dict[str, str] | None = None) -> Any:
    """Runs this program's script with other options, see `call`; returns its last line, JSON."""
    return json.loads(
        call([sys.executable, sys.argv[0], *command], said, environment).splitlines()[-1]
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a table, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, columns: Sequence[str], row: dict[str, Any]) -> None:
    """Writes a row at the end of a table, with the head of a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
