"""Sentiment140 by author: the JSON files of LEAF, as word vectors.

LEAF: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
https://arxiv.org/abs/1812.01097.
"""

import datetime
import re
from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_cfl.data.datasets.download import locate, locate_first, missing_data_error
from fedjax_cfl.data.datasets.leaf_json import (
    count_samples,
    join_users,
    read_users,
    user_lists,
)
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.readers import shorten
from fedjax_cfl.data.datasets.word_vectors import embed_texts
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, PositiveInt, Seed, checked

# LEAF's row of a tweet is id, date, query, user, text, and sometimes more
WHEN, TEXT, COLUMNS = 1, 4, 5
# labels as the original writes them (2 is neutral, not in its training file), or LEAF
POSITIVE, NEGATIVE = ("4", "1"), ("0", "2")
PLACES = tuple(
    tuple(f"{folder}/{part}" for part in parts)
    for folder in ("sent140/data", "sent140")
    for parts in (("train", "test"), ("all_data",), ("train",), ("test",))
)  # where the files may be
STAND_IN = "sent140_k30_test_pseudonymised.json"
STAND_IN_DIVISOR = 10  # the stand-in holds only the test tenth of each user's tweets


def sent140(
    users: PositiveInt | None = None,
    min_tweets: NaturalInt = 30,
    seed: Seed = 0,
    embedding: str | None = None,
    lower: bool = False,
    pad: Literal["front", "end"] = "front",
) -> Pool:
    """Returns the tweets of Sentiment140 (LEAF) as word vectors, x [N, 25, 300] float32, y 1
    where positive; `client` is the author, `time` the hour of the tweet.

    Args: authors with more than `min_tweets` tweets count, of whom `users` are drawn with
    `seed` (None: all are taken, as when there are no more); `embedding` is a GloVe text file
    with the vectors, zeros for an unknown word, None: vectors are hashed from the words;
    `lower` puts the text in lower case first; `pad` puts the zeros at the "front" (FlexCFL) or
    at the "end" (FedProx).

    Hashed vectors differ for different words, but similar words are not near each other:
    accuracies are not comparable with the papers'. Files: LEAF JSON under sent140/, see
    `read_tweets`; `test` is set where they are split. There is no download. Raises InputError
    for missing or bad files.
    """
    tweets, y, client, test, time = read_tweets(users, min_tweets, seed)
    pool = Pool(embed_texts(tweets, embedding, lower, pad), y, 2, client, test, time=time)
    return check_pool(pool, "sent140")


@checked("dataset.source")
def read_tweets(
    users: PositiveInt | None = None, min_tweets: NaturalInt = 30, seed: Seed = 0
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Returns the tweets of Sentiment140: texts [N], y [N] (1 positive), client [N], test
    [N] bool if the files have a split, and hours [N] since 1970 if they have all dates.

    Users keep their order of names. Only those with more than `min_tweets` tweets,
    train and test together, are kept; if there are more than `users` of them, so many
    are drawn with `seed` (None: no limit). See `_files` for where the files may be.
    Raises InputError if there are none, if one is bad, or if no user has enough tweets.
    """
    files = _files()
    parts = [read_users(part, _tweets) for part in files]
    # LEAF trains on int(0.9 n) of n tweets: users who had more than 30 have more than 3 in the
    # test tenth, and no others do.
    least = min_tweets // STAND_IN_DIVISOR if files[0][0].name.startswith(STAND_IN) else min_tweets
    names, rows, y, client, test = join_users(parts, least, users, seed)
    if not names:
        most = max((count_samples(parts, name) for part in parts for name in part), default=0)
        raise InputError(
            f"dataset.source.min_tweets={min_tweets}: no user has more than {least} tweets; the"
            f" most of any user in {files[0][0].parent} is {most}"
        )
    hours = [hour for _, hour in rows]
    time = None if None in hours else np.array(hours, np.int32)
    return [text for text, _ in rows], y, client, test, time


def _files() -> list[list[Path]]:
    """Returns the files or folders of Sentiment140: those of train and of test, or one
    list if they are not split.

    Under sent140/data/ (as LEAF makes it) or sent140/: the folders train/ and test/, or
    all_data/, or one of train/ and test/; else JSON files in sent140/ itself, split if
    some names have _train and the others _test, as LEAF's have; else the test tenth
    STAND_IN.
    """
    if found := locate_first(PLACES):
        return [[path] for path in found]
    found = [each for root in locate("sent140") or () for each in sorted(root.glob("*.json*"))]
    own = [
        each
        for each in found
        if each.name.endswith((".json", ".json.gz")) and not each.name.startswith(STAND_IN)
    ]
    train, test = ([path for path in own if mark in path.name] for mark in ("_train", "_test"))
    if own:
        return [train, test] if train and test and len(train) + len(test) == len(own) else [own]
    stand_in = locate(f"sent140/{STAND_IN}.gz")  # or unpacked
    if stand_in is None:
        raise missing_data_error("sent140", "sent140/data/train", "sent140/data/test")
    return [stand_in]


def parse_hour(date: object) -> int | None:
    """Returns the hours since 1970 of "Mon Apr 06 22:19:45 PDT 2009", in the zone that it
    names; None of what is no such date.
    """
    plain = re.sub(r" \w+(?= \d{4}$)", "", str(date))  # without the zone
    try:
        then = datetime.datetime.strptime(plain, "%a %b %d %H:%M:%S %Y")
    except ValueError:
        return None
    hours = (then - datetime.datetime(1970, 1, 1)) // datetime.timedelta(hours=1)
    return hours if hours >= 0 else None


def _tweets(path: Path, user: str, held: object) -> tuple[list[tuple[str, int | None]], list[int]]:
    """Returns the (text, hour) and the labels (1 positive, 0 negative) of one user of a LEAF
    file.
    """
    said = f"{path}: user {shorten(user)}"
    rows, labels = user_lists(path, user, held)
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        if not isinstance(row, list) or len(row) < COLUMNS or not isinstance(row[TEXT], str):
            raise InputError(
                f"{said}: entry {i} of x is {shorten(row)}, expected a row of id, date, query,"
                " user, text"
            )
        if str(label) not in POSITIVE + NEGATIVE:
            raise InputError(
                f"{said}: entry {i} of y is {shorten(label)}, expected 4 or 1 (positive), 0 or 2"
            )
    positive = [int(str(label) in POSITIVE) for label in labels]
    return [(row[TEXT], parse_hour(row[WHEN])) for row in rows], positive
