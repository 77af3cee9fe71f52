"""Numbers, settings and texts as people read them; what files hold cannot act on what shows it."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from fedjax_cfl.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

# numbers


def format_bytes(value: float) -> str:
    """Formats with a decimal prefix: format_bytes(3.2e9) is "3.20 GB"."""
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.2f} {prefix}B"
    return f"{value:g} B"


# texts from files: labels, names of data sets, groups, folders and runs


def escape_text(text: object) -> str:
    r"""Replaces what a terminal would obey or cannot show by its escape: ESC is \x1b, a
    newline \n.
    """
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "surrogatepass").decode()
        for sign in str(text)
    )


def escape_markup(text: object) -> str:
    """Escapes a text for rich, which reads [red] as a colour."""

    return escape(escape_text(text))


def escape_markdown(text: object) -> str:
    """Escapes a text for one cell of a Markdown table."""
    return escape_text(text).replace("|", "\\|").replace("<", "&lt;")


def escape_latex(text: object) -> str:
    """Escapes a text for LaTeX."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    signs |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
    return "".join(signs.get(sign, sign) for sign in escape_text(text))


def escape_csv(value: object) -> object:
    """Escapes a text for one cell of a CSV file: a spreadsheet would compute what begins
    with = + - or @, but not after a quote. Numbers stay numbers.
    """
    if not isinstance(value, str):
        return value
    text = escape_text(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def escape_plot(text: object) -> str:
    """Escapes a text for matplotlib, which reads formulas between dollars."""
    return escape_text(text).replace("$", r"\$")


# names from files: of clients, classes and columns


def clean_name(value: object) -> str:
    """Returns the one form of a name of a client, a class or a column: bytes are UTF-8, accents
    are composed (NFC), whole numbers that were stored as floats are whole, and blanks around it
    are left out.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = unicodedata.normalize("NFC", str(value)).strip()
    return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", text)


def name_columns(frame: Any) -> dict[str, Any] | None:
    """Returns the names of the columns of a frame in their one form, and as it has them; None for
    an array, which has no names. Raises InputError for one of two columns.
    """
    names = getattr(frame, "column_names", getattr(frame, "columns", None))
    if names is None:
        return None
    found = {}
    for name in names:
        if clean_name(name) in found:
            said = shorten(clean_name(name))
            raise InputError(f"x: column {said} is there more than once, expected each name once")
        found[clean_name(name)] = name
    return found


# values


def shorten(value: object) -> str:
    """Returns a value as a message can show it: on one line, and not whole if it is long."""
    text = repr(value) if isinstance(value, str | bytes) else " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


# settings


def flatten_settings(
    tree: dict, path: str = "", single: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every leaf of a nested dict; what has one of the `single`
    names is a leaf, also where it is a dict.
    """
    for name, value in ((f"{path}{name}", value) for name, value in tree.items()):
        if isinstance(value, dict) and name not in single:
            yield from flatten_settings(value, f"{name}.", single)
        else:
            yield name, value


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Returns settings in words that follow others; nothing where there are none."""
    return f"; {' '.join(f'{k}={format_value(v)}' for k, v in settings.items())}" * bool(settings)


def format_value(value: Any) -> str:
    """Returns a value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


# tables


def to_frame(table: Iterable[Mapping[str, Any]] | Mapping[str, Any]) -> "DataFrame":
    """Returns a table as a pandas.DataFrame.

    `table` are rows, as `load_run(...).rows`, or columns, as `load_run(...).table`. Values that a
    row does not have are None or NaN; a column of lists, as `group_accuracy`, stays one.
    """
    import pandas  # only now: a run needs none of it

    if isinstance(table, Mapping):
        return pandas.DataFrame({name: list(values) for name, values in table.items()})
    return pandas.DataFrame(list(table))
