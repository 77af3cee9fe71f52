"""What each column of a table is, as the user names them."""

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


class Columns(NamedTuple):
    """Which column of a table is what; columns without a part are not read.

    `y` is the label, numbers or text; `x` are the features, None: all columns of numbers without
    another part; `client` is whose sample a row is, numbers or text; `split` is 0 or train, 1 or
    test; `time` when the sample came into being, whole numbers or dates; `concept` the true group
    of its client. From Python `y` may be None: the table has no labels, and they are 0.
    """

    y: Annotated[str | None, NAME]
    x: Annotated[list[str] | str | None, or_none(NAMES)] = None
    client: Annotated[str | None, or_none(NAME)] = None
    split: Annotated[str | None, or_none(NAME)] = None
    time: Annotated[str | None, or_none(NAME)] = None
    concept: Annotated[str | None, or_none(NAME)] = None
