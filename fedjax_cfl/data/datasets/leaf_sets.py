"""Data sets of LEAF (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
https://arxiv.org/abs/1812.01097) from its JSON files: Sentiment140 by author, as word vectors,
CelebA by celebrity, smiling or not (Liu et al., ICCV 2015,
https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html), and Shakespeare by speaking role, the next
character after 80.
"""

import datetime
import os
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_cfl.data.datasets.download import locate, locate_leaf, missing_data_error
from fedjax_cfl.data.datasets.image_files import stack_images
from fedjax_cfl.data.datasets.leaf_json import (
    count_samples,
    join_users,
    label_users,
    leaf,
    read_users,
)
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.readers import read_files
from fedjax_cfl.data.datasets.word_vectors import embed_texts
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import NaturalInt, PositiveInt, Seed, checked

# LEAF's row of a tweet is id, date, query, user, text, and sometimes more
WHEN, TEXT, COLUMNS = 1, 4, 5
STAND_IN = "sent140_k30_test_pseudonymised.json"
STAND_IN_DIVISOR = 10  # the stand-in holds only the test tenth of each user's tweets
FACES = ("celeba/data/raw/img_align_celeba", "celeba/img_align_celeba")
SIZE = 84  # pixels of a side, as in LEAF's model
ROLE_TRAIN = 0.8  # of a role's windows


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
    `_find_tweets`; `test` is set where they are split. There is no download. Raises InputError
    for missing or bad files.
    """
    tweets, y, client, test, time = read_tweets(users, min_tweets, seed)
    pool = Pool(embed_texts(tweets, embedding, lower, pad), y, 2, client, test, time=time)
    return check_pool(pool, "sent140")


@checked("dataset.source")
def read_tweets(
    users: PositiveInt | None = None, min_tweets: NaturalInt = 30, seed: Seed = 0
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Returns the tweets of `sent140`: texts [N], y [N] (1 positive), client [N], in the order of
    their names, test [N] bool if the files have a split, and hours [N] since 1970 if they have all
    dates. Raises InputError if there are none, if one is bad, or if no user has enough tweets.
    """
    files = _find_tweets()
    sentiment = {"4": 1, "1": 1, "0": 0, "2": 0}  # of the original (2 is neutral), or of LEAF
    row = "a row of id, date, query, user, text"
    parse = label_users(_is_tweet, row, sentiment, "4 or 1 (positive), 0 or 2")
    parts = [read_users(part, parse) for part in files]
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
    hours = [parse_hour(row[WHEN]) for row in rows]
    time = None if None in hours else np.array(hours, np.int32)
    return [row[TEXT] for row in rows], y, client, test, time


def _find_tweets() -> list[list[Path]]:
    """Returns the files or folders of Sentiment140: those of train and of test, or one
    list if they are not split.

    Under sent140/data/ (as LEAF makes it) or sent140/: the folders train/ and test/, or
    all_data/, or one of train/ and test/; else JSON files in sent140/ itself, split if
    some names have _train and the others _test, as LEAF's have; else the test tenth
    STAND_IN.
    """
    if found := locate_leaf("sent140", ("train",), ("test",)):
        return [[path] for path in found]
    found = [each for root in locate("sent140") or () for each in sorted(root.glob("*.json*"))]
    own = [each for each in found if re.search(r"\.json(\.gz)?$", each.name)]
    own = [each for each in own if not each.name.startswith(STAND_IN)]
    train, test = ([path for path in own if mark in path.name] for mark in ("_train", "_test"))
    if own:
        return [train, test] if train and test and len(train) + len(test) == len(own) else [own]
    stand_in = locate(f"sent140/{STAND_IN}.gz")  # or unpacked
    if stand_in is None:
        raise missing_data_error("sent140", "sent140/data/train", "sent140/data/test")
    return [stand_in]


def _is_tweet(row: Any) -> bool:
    return isinstance(row, list) and len(row) >= COLUMNS and isinstance(row[TEXT], str)


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


@checked("dataset.source")
def celeba(users: PositiveInt | None = None, seed: Seed = 0, keep_split: bool = False) -> Pool:
    """Returns the faces of CelebA, 84x84x3 uint8, y 1 where smiling; `client` is the
    celebrity, in order of names.

    Celebrities with less than two images are dropped (FeSEM); of the others `users` are
    drawn with `seed` (None: all). `test` is LEAF's own split with `keep_split`, if the
    files have one, else None, so that a partition by user makes the split. Images are
    resized with a bicubic filter and take 21 kB each. Files: JSON under celeba/data/
    (as LEAF makes it) or celeba/, in train/ and test/, or all_data/; images in
    raw/img_align_celeba/ beside them or in celeba/img_align_celeba/. There is no
    download. Raises InputError for missing or bad files.
    """
    files, images = locate_leaf("celeba"), locate(FACES[0]) or locate(FACES[1])
    if files is None or images is None:
        raise missing_data_error("celeba", "celeba/data/all_data" if files is None else FACES[0])
    parse = label_users(_names_file, "the name of an image file", {"0": 0, "1": 1}, "0 or 1")
    parts = [read_users([part], parse) for part in files]
    names, faces, y, client, test = join_users(parts, 1, users, seed)
    if not names:
        raise InputError(f"{files[0]}: no celebrity has two images, expected some")
    content = read_files(images[0] / face for face in faces)
    x = stack_images("celeba", content, len(faces), [SIZE, SIZE], "rgb", filter="BICUBIC")
    own = test if keep_split else None
    return check_pool(Pool(x, y, 2, client, own, client_names=tuple(names)), "celeba")


def _names_file(name: Any) -> bool:
    """Returns whether this is the name of a file, and of none outside of its folder."""
    return isinstance(name, str) and os.path.basename(name) == name not in ("", ".", "..")


def shakespeare() -> Pool:
    """Returns windows of 80 characters x [N, 80] and the character that follows, of 80, or of 81
    where some are not among LEAF's; `client` is the role, in one play.

    Windows follow each other in a play and overlap, so that where the files have no split the last
    fifth of a role's windows is for testing; those at the border share characters. Files: LEAF JSON
    under shakespeare/data/ or shakespeare/, in train/ and test/, or all_data/, or alone. There is
    no download. Raises InputError for missing or bad files. Source: github.com/TalwalkarLab/leaf.
    """
    found = locate_leaf("shakespeare") or locate("shakespeare")
    if found is None:
        raise missing_data_error("shakespeare", "shakespeare/data/train")
    pool = leaf(found[0].parent if len(found) == 2 else found[0])
    if pool.test is not None or pool.client is None:
        return pool
    size = np.bincount(pool.client)
    place = np.empty(len(pool.y), np.int64)  # of a window among those of its role, from 0
    place[np.argsort(pool.client, kind="stable")] = np.concatenate([np.arange(n) for n in size])
    return pool._replace(test=place >= np.maximum(ROLE_TRAIN * size[pool.client], 1))
