"""What each column of a table is, as the user names it."""

from typing import Annotated, Any, NamedTuple

from fedjax_cfl.validation import Rule, or_none


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value) != ""


NAME = Rule("the name of a column", _is_name)
NAMES = Rule(
    "the name of a column, or a list of names",
    lambda value: (
        _is_name(value) or (isinstance(value, list | tuple) and all(map(_is_name, value)))
    ),
)


Name = Annotated[str, NAME]
OptionalName = Annotated[str | None, or_none(NAME)]
OptionalNames = Annotated[list[str] | str | None, or_none(NAMES)]


class Columns(NamedTuple):
    """Which column of a table is what, see `csv`; columns without a part are not read."""

    y: str | None  # None: the table has no labels, and they are 0
    x: list[str] | str | None = None
    client: str | None = None
    split: str | None = None
    time: str | None = None
    concept: str | None = None
