"""Data sets: each function returns a checked `Pool` of labelled samples, before they
are dealt to clients.
"""

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from fedjax_cfl.data.datasets.download import locate, missing_data_error
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.readers import PathLike, open_unpacked, read_users, shorten
from fedjax_cfl.errors import InputError, require
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, PositiveInt, Seed


def sent140(
    users: PositiveInt | None = None,
    min_tweets: NaturalInt = 30,
    seed: Seed = 0,
    embedding: str | None = None,
    lower: bool = False,
    pad: str = "front",
) -> Pool:
    """Returns the tweets of Sentiment140 (LEAF) as word vectors, x [N, 25, 300]
    float32, y 1 where positive; `client` is the author.

    Of the authors with more than `min_tweets` tweets, `users` are drawn with `seed`
    (None: all are taken, as when there are no more). Vectors come from the GloVe text
    file `embedding`, zeros for an unknown word; without one they are hashed from the
    word, which tells words apart but knows no likeness, so that accuracies are not
    comparable with the papers'. `lower` puts the text in lower case first, `pad` puts
    the zeros at the "front" (FlexCFL) or at the "end" (FedProx). Files: LEAF JSON under
    sent140/, see `text.read_tweets`; `test` is set where they are split. There is no
    download. Raises InputError for missing or bad files.
    """
    tweets, y, client, test = read_tweets(users, min_tweets, seed)
    return check_pool(
        Pool(embed_texts(tweets, embedding, lower, pad), y, 2, client, test), "sent140"
    )


MAX_TOKENS, VECTOR_SIZE = 25, 300  # of a tweet, of a word
TOKEN = re.compile(r"[\w']+|[.,!?;]")
# of a component of a hashed vector, about that of GloVe.6B's vectors: the norm is then about 7
HASH_STD = 0.4
TEXT, COLUMNS = 4, 5  # LEAF's row of a tweet is id, date, query, user, text, and sometimes more
POSITIVE, NEGATIVE = (
    ("4", "1"),
    ("0", "2"),
)  # labels as the original writes them (2 is neutral, not in its training file), or LEAF
MAX_LINE_BYTES = 2**14  # bytes of a line of word vectors: 300 numbers of 50 signs and more
STAND_IN = "sent140_k30_test_pseudonymised.json"
STAND_IN_DIVISOR = 10  # the stand-in holds only the test tenth of each user's tweets


def tokenize(text: str, lower: bool = False) -> list[str]:
    """Returns the tokens of a text: every longest run of word characters and
    apostrophes, and each of `. , ! ? ;`.
    """
    return TOKEN.findall(text.lower() if lower else text)


def embed_texts(
    texts: Sequence[str], embedding: PathLike | None = None, lower: bool = False, pad: str = "front"
) -> np.ndarray:
    """Returns the word vectors [N, TOKENS, DIMENSIONS] float32 of texts: the first
    TOKENS tokens, zeros at the "front" or at the "end".

    Vectors come from a GloVe text file, `embedding`, or are hashed, see `hash_words`.
    Raises InputError for a bad file or another `pad`.
    """
    require("dataset.source.pad", pad, ("front", "end"))
    number = {}  # word -> row of the table; row 0 is the padding
    rows = np.zeros((len(texts), MAX_TOKENS), np.int32)
    for row, text in zip(rows, texts, strict=True):
        found = [
            number.setdefault(token, len(number) + 1)
            for token in tokenize(text, lower)[:MAX_TOKENS]
        ]
        row[(MAX_TOKENS - len(found) if pad == "front" else 0) :][: len(found)] = found
    table = np.zeros((len(number) + 1, VECTOR_SIZE), np.float32)
    table[1:] = hash_words(number) if embedding is None else read_glove(embedding, number)
    return table[rows]


def hash_words(words: Collection[str]) -> np.ndarray:
    """Returns vectors of words [V, DIMENSIONS] float32 that need no file: a function of
    a word's UTF-8 text and of nothing else.

    A component is the sum of four bytes of the word's SHAKE-256 digest, centred and
    scaled to DEVIATION: nearly normal, and the same on any machine. No word is unknown,
    but similar words are not near each other: accuracies differ from those of GloVe.
    """
    # JSON can hold half of a surrogate pair, which plain UTF-8 cannot.
    digests = (
        hashlib.shake_256(word.encode("utf-8", "surrogatepass")).digest(4 * VECTOR_SIZE)
        for word in words
    )
    drawn = np.frombuffer(b"".join(digests), np.uint8).reshape(len(words), VECTOR_SIZE, 4)
    center, deviation = 4 * 127.5, (4 * (256**2 - 1) / 12) ** 0.5
    return (drawn.sum(axis=2, dtype=np.int32) - int(center)).astype(np.float32) * np.float32(
        HASH_STD / deviation
    )


def read_glove(path: PathLike, words: Collection[str]) -> np.ndarray:
    """Returns vectors of words [V, DIMENSIONS] float32 from a GloVe text file (plain or
    .gz); a word that is not in it gets zeros.

    A line is a word and DIMENSIONS numbers, with single spaces between them; of a
    repeated word the first line counts. The file is read line by line. Raises
    InputError, with the number of the line, for one that is too long, not UTF-8, has
    another number of columns or, where the word is needed, a column that is not a
    finite number; and for a file with none of the words.
    """
    path = Path(os.path.expanduser(str(path)))
    wanted = {word.encode("utf-8", "surrogatepass"): i for i, word in enumerate(words)}
    table, missing, number = np.zeros((len(wanted), VECTOR_SIZE), np.float32), len(wanted), 0
    with open_unpacked(path) as (file, _):
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path}: line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{place} has more than {MAX_LINE_BYTES} bytes, expected a word and"
                    f" {VECTOR_SIZE} numbers"
                )
            line = line.rstrip(b"\r\n")
            if (columns := line.count(b" ") + 1) != VECTOR_SIZE + 1:
                raise InputError(
                    f"{place} has {columns} columns, expected {VECTOR_SIZE + 1}: a word and"
                    f" {VECTOR_SIZE} numbers"
                )
            word, _, rest = line.partition(b" ")
            _check_utf8(place, word)
            if (i := wanted.pop(word, None)) is not None:
                table[i] = _vector(place, rest.split(b" "))
    if number == 0:
        raise InputError(
            f"{path}: file is empty, expected lines of a word and {VECTOR_SIZE} numbers"
        )
    if len(wanted) == missing > 0:
        raise InputError(
            f"{path}: none of the {missing} different words of the data is in it, expected vectors"
            " of English words"
        )
    return table


def _check_utf8(place: str, word: bytes) -> None:
    """Raises InputError for a word that is not UTF-8: another encoding would only look
    like unknown words.
    """
    try:
        word.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: word {shorten(word)} is not UTF-8, expected a GloVe text file"
        ) from error


def _vector(place: str, columns: list[bytes]) -> np.ndarray:
    """Returns the numbers of a line [DIMENSIONS] float32."""
    vector = np.zeros(VECTOR_SIZE, np.float32)
    for i, column in enumerate(columns):
        try:
            with np.errstate(over="ignore"):
                vector[i] = float(column)
        except ValueError:
            vector[i] = np.nan
        if not np.isfinite(vector[i]):
            raise InputError(
                f"{place}: column {i + 2} is {shorten(column.decode(errors='replace'))}, expected a"
                " finite number"
            )
    return vector


def read_tweets(
    users: int | None = None, min_tweets: int = 30, seed: int = 0
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the tweets of Sentiment140: texts [N], y [N] (1 positive), client [N],
    and test [N] bool if the files have a split.

    Users keep their order of names. Only those with more than `min_tweets` tweets,
    train and test together, are kept; if there are more than `users` of them, so many
    are drawn with `seed` (None: no limit). See `_files` for where the files may be.
    Raises InputError if there are none, if one is bad, or if no user has enough tweets.
    """
    for name, value, low in (
        ("min_tweets", min_tweets, 0),
        ("users", 1 if users is None else users, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**32:
            raise InputError(
                f"dataset.source.{name}={value}: expected a whole number, {low} or more"
            )
    files = _files()
    parts = [read_users(part, _tweets) for part in files]
    names = sorted(set().union(*parts))
    sizes = np.array(
        [sum(len(part[name][0]) for part in parts if name in part) for name in names], int
    )
    # LEAF trains on int(0.9 n) of n tweets: whoever had more than 30 has more than 3 in the
    # test tenth, and nobody else.
    least = min_tweets // STAND_IN_DIVISOR if files[0][0].name.startswith(STAND_IN) else min_tweets
    enough = np.flatnonzero(sizes > least)
    if not len(enough):
        most = f"the most of any user in {files[0][0].parent} is {sizes.max(initial=0)}"
        raise InputError(
            f"dataset.source.min_tweets={min_tweets}: no user has more than {least} tweets; {most}"
        )
    if users is not None and users < len(enough):
        enough = np.sort(np.random.RandomState(seed).choice(enough, users, replace=False))
    texts, counts, labels = [], [], []
    for name in (names[i] for i in enough):
        for part in parts:
            rows, y = part.get(name, ([], []))[:2]
            texts += rows
            labels += y
            counts.append(len(y))
    client, test = np.divmod(np.repeat(np.arange(len(counts)), counts), len(parts))
    return (
        texts,
        np.array(labels, np.int32),
        client.astype(np.int32),
        test == 1 if len(parts) == 2 else None,
    )


def _files() -> list[list[Path]]:
    """Returns the files or folders of Sentiment140: those of train and of test, or one
    list if they are not split.

    Under sent140/data/ (as LEAF makes it) or sent140/: the folders train/ and test/, or
    all_data/, or one of train/ and test/; else JSON files in sent140/ itself, split if
    some names have _train and the others _test, as LEAF's have; else the test tenth
    STAND_IN.
    """
    for folder in ("sent140/data", "sent140"):
        for names in (("train", "test"), ("all_data",), ("train",), ("test",)):
            if found := locate(*(f"{folder}/{name}" for name in names)):
                return [[path] for path in found]
    root = locate("sent140")
    try:
        listed = sorted(root[0].iterdir()) if root is not None and os.path.isdir(root[0]) else []
    except OSError as error:
        raise InputError(
            f"{root[0]}: folder cannot be read ({error.strerror}), expected a readable folder of"
            " LEAF files"
        ) from error
    own = [
        path
        for path in listed
        if path.name.endswith((".json", ".json.gz")) and not path.name.startswith(STAND_IN)
    ]
    train, test = ([path for path in own if mark in path.name] for mark in ("_train", "_test"))
    if own:
        return [train, test] if train and test and len(train) + len(test) == len(own) else [own]
    stand_in = locate(f"sent140/{STAND_IN}.gz")  # or unpacked
    if stand_in is None:
        raise missing_data_error(
            "sent140 (made by LEAF's scripts, no download)",
            "sent140/data/train",
            "sent140/data/test",
        )
    return [stand_in]


def _tweets(path: Path, user: str, size: object, held: object) -> tuple[list[str], list[int]]:
    """Returns the texts and labels (1 positive, 0 negative) of one user of a LEAF file."""
    said = f"{path}: user {shorten(user)}"
    if (
        not isinstance(held, dict)
        or not isinstance(held.get("x"), list)
        or not isinstance(held.get("y"), list)
    ):
        raise InputError(f"{said} is listed without data, expected lists x and y")
    rows, labels = held["x"], held["y"]
    if isinstance(size, bool) or not isinstance(size, int) or not len(rows) == len(labels) == size:
        raise InputError(
            f"{said}: num_samples is {_describe_value(size)}, expected {len(rows)} (x) and"
            f" {len(labels)} (y) to equal it"
        )
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        if not isinstance(row, list) or len(row) < COLUMNS or not isinstance(row[TEXT], str):
            raise InputError(
                f"{said}: entry {i} of x is {_describe_value(row)}, expected a row of id, date,"
                " query, user, text"
            )
        if (
            isinstance(label, bool)
            or not isinstance(label, int | str)
            or str(label) not in POSITIVE + NEGATIVE
        ):
            raise InputError(
                f"{said}: entry {i} of y is {_describe_value(label)}, expected 4 or 1 (positive), 0"
                " or 2"
            )
    return [row[TEXT] for row in rows], [int(str(label) in POSITIVE) for label in labels]


def _describe_value(value: object) -> str:
    """Returns a value as a message can show it; what is nested, and could be so without
    end, by its kind and length.
    """
    return (
        f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, list | dict)
        else shorten(value)
    )
