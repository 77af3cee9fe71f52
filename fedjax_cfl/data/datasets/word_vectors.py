"""Texts as word vectors, from a GloVe text file or hashed from the words."""

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_cfl.data.datasets.readers import PathLike, line_of, open_unpacked
from fedjax_cfl.errors import InputError
from fedjax_cfl.validation import checked

MAX_TOKENS, VECTOR_SIZE = 25, 300  # of a tweet, of a word
TOKEN = re.compile(r"[\w']+|[.,!?;]")
# of a component of a hashed vector, about that of GloVe.6B's vectors: the norm is then about 7
HASH_STD = 0.4


def tokenize(text: str, lower: bool = False) -> list[str]:
    """Returns the tokens of a text: every longest run of word characters and
    apostrophes, and each of `. , ! ? ;`.
    """
    return TOKEN.findall(text.lower() if lower else text)


@checked("dataset.source")
def embed_texts(
    texts: Sequence[str],
    embedding: PathLike | None = None,
    lower: bool = False,
    pad: Literal["front", "end"] = "front",
) -> np.ndarray:
    """Returns the word vectors [N, MAX_TOKENS, VECTOR_SIZE] float32 of texts: the first
    MAX_TOKENS tokens, zeros at the "front" or at the "end".

    Vectors come from a GloVe text file, `embedding`, or are hashed, see `hash_words`.
    Raises InputError for a bad file or another `pad`.
    """
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
    """Returns vectors of words [V, VECTOR_SIZE] float32 that need no file: a function of
    a word's UTF-8 text and of nothing else.

    A component is the sum of four bytes of the word's SHAKE-256 digest, centred and
    scaled to HASH_STD: nearly normal, and the same on any machine. No word is unknown,
    but similar words are not near each other: accuracies differ from those of GloVe.
    """
    # JSON can hold half of a surrogate pair, which plain UTF-8 cannot.
    digests = (
        hashlib.shake_256(word.encode("utf-8", "surrogatepass")).digest(4 * VECTOR_SIZE)
        for word in words
    )
    drawn = np.frombuffer(b"".join(digests), np.uint8).reshape(len(words), VECTOR_SIZE, 4)
    center, deviation = 4 * 127.5, (4 * (256**2 - 1) / 12) ** 0.5
    unit = np.float32(HASH_STD / deviation)
    return (drawn.sum(axis=2, dtype=np.int32) - int(center)).astype(np.float32) * unit


def read_glove(path: PathLike, words: Collection[str]) -> np.ndarray:
    """Returns vectors of words [V, VECTOR_SIZE] float32 from a GloVe text file (plain or
    .gz); a word that is not in it gets zeros.

    A line is a word and VECTOR_SIZE numbers, with single spaces between them; of a
    repeated word the first line counts. The file is read line by line. Raises
    InputError, with the number of the line, for one with another number of columns, or that is
    not UTF-8, or, where the word is needed, with a column that is not a finite number; and for a
    file with none of the words.
    """
    path = Path(os.path.expanduser(str(path)))
    wanted = {word.encode("utf-8", "surrogatepass"): i for i, word in enumerate(words)}
    table, missing = np.zeros((len(wanted), VECTOR_SIZE), np.float32), len(wanted)
    with open_unpacked(path) as file:
        for number, line in enumerate(file, 1):
            word, *columns = line.rstrip(b"\r\n").split(b" ")
            try:  # another encoding would only look like unknown words
                word.decode()
                if len(columns) != VECTOR_SIZE:
                    raise ValueError(f"it has {len(columns) + 1} columns")
                if (i := wanted.pop(word, None)) is not None:
                    with np.errstate(over="ignore"):
                        table[i] = np.array(columns).astype(np.float64)
                    if not np.isfinite(table[i]).all():
                        raise ValueError("a number is not finite")
            except ValueError as error:
                raise InputError(
                    f"{path}: line {number} cannot be read ({line_of(error)}), expected a word in"
                    f" UTF-8 and {VECTOR_SIZE} finite numbers"
                ) from None
    if len(wanted) == missing > 0:
        raise InputError(
            f"{path}: none of the {missing} different words of the data is in it, expected vectors"
            " of English words"
        )
    return table
