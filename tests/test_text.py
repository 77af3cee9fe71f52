"""Tweets: tokens, padding, vectors of words, and what is refused in files of vectors
and of tweets.
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cfl.data import partition
from fedjax_cfl.data.datasets import download, word_vectors
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, locate
from fedjax_cfl.data.datasets.leaf_sets import STAND_IN, read_tweets, sent140
from fedjax_cfl.formatting import format_value

real = pytest.mark.skipif(
    not os.environ.get(DATA_ENV_VAR), reason=f"real data: {DATA_ENV_VAR} is not set"
)
ONE = "1 " * 299 + "1"  # the numbers of a vector
HALF = "\ud83d"  # of a surrogate pair, as JSON may hold it


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", []),
        ("  \n\t ", []),
        ("@#$%^&*()<>/:-", []),
        ("I don't know!!", ["I", "don't", "know", "!", "!"]),
        ("'quoted' rock'n'roll '", ["'quoted'", "rock'n'roll", "'"]),
        ("so... what?", ["so", ".", ".", ".", "what", "?"]),
        ("a,b;c_d-e:f", ["a", ",", "b", ";", "c_d", "e", "f"]),
        ("@user :) http://t.co/x", ["user", "http", "t", ".", "co", "x"]),
        ("Café naïve Ünïcode 日本語 ёлка", ["Café", "naïve", "Ünïcode", "日本語", "ёлка"]),
        ("great 😀 day 3.5", ["great", "day", "3", ".", "5"]),
        ("&quot;hey&quot;", ["quot", ";", "hey", "quot", ";"]),
        (f"half {HALF} pair", ["half", "pair"]),
        ("don\u2019t", ["don", "t"]),  # only the plain apostrophe belongs to a word
    ],
)
def test_tokens(given, expected):
    assert word_vectors.tokenize(given) == expected


def test_case_is_kept_unless_asked():
    assert word_vectors.tokenize("OMG Yes") == ["OMG", "Yes"] and word_vectors.tokenize(
        "OMG Yes", lower=True
    ) == [
        "omg",
        "yes",
    ]
    upper, lower = word_vectors.embed_texts(["OMG"], lower=True), word_vectors.embed_texts(["omg"])
    np.testing.assert_array_equal(upper, lower)
    assert (word_vectors.embed_texts(["OMG"]) != lower).any()


def test_padding_and_truncation():
    long = " ".join(f"w{i}" for i in range(60))
    front, end = (word_vectors.embed_texts(["a b", "", long], pad=pad) for pad in ("front", "end"))
    assert front.shape == end.shape == (3, 25, 300) and front.dtype == np.float32
    a, b = word_vectors.hash_words(["a", "b"])
    np.testing.assert_array_equal(front[0], [*np.zeros((23, 300)), a, b])
    np.testing.assert_array_equal(end[0], [a, b, *np.zeros((23, 300))])
    assert not front[1].any() and not end[1].any()
    # the first 25
    np.testing.assert_array_equal(front[2], word_vectors.hash_words([f"w{i}" for i in range(25)]))
    np.testing.assert_array_equal(front[2], end[2])
    one_line("dataset.source.pad=middle", word_vectors.embed_texts, ["a"], pad="middle")
    assert word_vectors.embed_texts([]).shape == (0, 25, 300)


def test_hashed_vectors_are_nearly_normal_and_told_apart():
    vectors = word_vectors.hash_words([f"word{i}" for i in range(2000)])
    assert vectors.dtype == np.float32 and len(np.unique(vectors, axis=0)) == 2000
    assert abs(vectors.mean()) < 0.002 and abs(vectors.std() - word_vectors.HASH_STD) < 0.002
    # the kurtosis of four uniform numbers; 3 if normal
    assert abs((vectors**4).mean() / vectors.var() ** 2 - 2.7) < 0.02
    norms = np.linalg.norm(vectors, axis=1)
    cosines = vectors[:1000] @ vectors[1000:].T / np.outer(norms[:1000], norms[1000:])
    assert np.abs(cosines).max() < 0.35 and abs(cosines.std() - 300**-0.5) < 0.002


def test_hashed_vectors_do_not_depend_on_process_order_or_company():
    words = ["happy", "sad", "日本語", HALF, "don't"]
    vectors = word_vectors.hash_words(words)
    np.testing.assert_array_equal(vectors[::-1], word_vectors.hash_words(words[::-1]))
    np.testing.assert_array_equal(vectors[1:2], word_vectors.hash_words(["sad"]))
    code = (
        "import sys; from fedjax_cfl.data.datasets.word_vectors import hash_words; "
        "sys.stdout.buffer.write(hash_words(['happy', 'sad']).tobytes())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=environment
    ).stdout
    assert out == vectors[:2].tobytes()
    first = np.frombuffer(hashlib.shake_256(b"happy").digest(1200), np.uint8)[:4].sum()  # by hand
    np.testing.assert_allclose(vectors[0, 0], (int(first) - 510) / np.sqrt(21845) * 0.4, rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=80), max_size=6), st.sampled_from(["front", "end"]))
def test_any_text_becomes_a_sequence(texts, pad):
    x = word_vectors.embed_texts(texts, pad=pad)
    assert x.shape == (len(texts), 25, 300) and np.isfinite(x).all()
    filled = x.any(axis=2)
    assert filled.sum(axis=1).tolist() == [
        min(25, len(word_vectors.tokenize(each))) for each in texts
    ]
    order = np.diff(filled.astype(int), axis=1)
    assert (order >= 0).all() if pad == "front" else (order <= 0).all()


def test_glove(tmp_path):
    lines = [
        f"the {ONE}",
        f"sad {'0.5 ' * 299}-2e-1",
        f"the {'9 ' * 299}9",
        f"café {'2 ' * 299}2",
        f"unneeded {'x ' * 299}x",
    ]
    for name, content in {
        "a.txt": "\n".join(lines),
        "b.txt": "\r\n".join(lines) + "\r\n",
        "c.gz": "\n".join(lines) + "\n",
    }.items():
        raw = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        table = word_vectors.read_glove(tmp_path / name, ["unknown", "sad", "the", "café"])
        assert table.dtype == np.float32 and not table[0].any()
        np.testing.assert_array_equal(table[1], np.float32([0.5] * 299 + [-0.2]))
        assert (table[2] == 1).all() and (table[3] == 2).all()  # the first of two lines for a word
    x = word_vectors.embed_texts(["The the", "sad"], tmp_path / "a.txt")
    assert not x[0, :24].any() and (x[0, 24] == 1).all()  # GloVe.6B has no capitals: unknown
    assert (
        word_vectors.embed_texts(["The the"], str(tmp_path / "a.txt"), lower=True)[0, 23:] == 1
    ).all()


GLOVE = {
    "empty": (b"", "none of the 2 different words"),
    "too few columns": (
        f"the {ONE}\nsad {ONE[2:]}\n".encode(),
        "line 2 cannot be read (it has 300 columns), expected a word",
    ),
    "too many columns": (f"the {ONE} 1\n".encode(), "line 1 cannot be read (it has 302 columns)"),
    "50-dimensional": (f"the {ONE[:99]}\n".encode(), "line 1 cannot be read (it has 51 columns)"),
    "word2vec header": (
        f"400000 300\nthe {ONE}\n".encode(),
        "line 1 cannot be read (it has 2 columns)",
    ),
    "tabs": (
        f"the {ONE}\n".replace(" ", "\t").encode(),
        "line 1 cannot be read (it has 1 columns)",
    ),
    "blank line": (
        f"sad {ONE}\n\nthe {ONE}\n".encode(),
        "line 2 cannot be read (it has 1 columns)",
    ),
    "not a number": (
        f"sad {ONE}\nthe {ONE[:-1]}one\n".encode(),
        "line 2 cannot be read (could not convert string to float",
    ),
    "doubled space": (f"the  {ONE[2:]}\n".encode(), "line 1 cannot be read (could not convert"),
    "nan": (f"the nan {ONE[2:]}\n".encode(), "line 1 cannot be read (a number is not finite)"),
    "overflow": (f"the 1e99 {ONE[2:]}\n".encode(), "line 1 cannot be read (a number is not"),
    "number that is not UTF-8": (b"the \xff " + ONE[2:].encode(), "line 1 cannot be read"),
    "Latin-1": (f"café {ONE}\n".encode("latin-1"), "line 1 cannot be read ('utf-8' codec"),
    "UTF-16": (f"the {ONE}\n".encode("utf-16"), "is text in UTF-16"),
    "zero bytes": (bytes(5000), "line 1 cannot be read (it has 1 columns)"),
    "truncated gzip": (gzip.compress(f"the {ONE}\n".encode())[:-9], "gzip"),
    "html": (b"<html>404</html>\n", "is a web page"),
    "another language": (f"der {ONE}\n".encode(), "none of the 2 different words"),
}


@pytest.mark.parametrize("name", GLOVE)
def test_bad_glove(name, tmp_path):
    content, says = GLOVE[name]
    (tmp_path / "vectors.txt").write_bytes(content)
    path = tmp_path / "vectors.txt"
    said = f"{path}: {'' if says == 'gzip' else says}"
    one_line(said, word_vectors.read_glove, path, ["the", "sad"])


def test_glove_that_cannot_be_opened(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path, "a\0b", 5):
        one_line("cannot be read", word_vectors.read_glove, path, ["the"])


def leaf(counts, label=lambda i: i % 2, first=0, **changes):
    """Returns a LEAF shard: user -> number of tweets, whose words are the user's name
    and a number.
    """

    def row(user, i):
        return [str(i), "Sat May 16 22:18:35 PDT 2009", "NO_QUERY", user, f"{user} {i}", "training"]

    data = {
        user: {
            "x": [row(user, first + i) for i in range(n)],
            "y": [label(first + i) for i in range(n)],
        }
        for user, n in counts.items()
    }
    return {
        "users": list(counts),
        "num_samples": list(counts.values()),
        "user_data": data,
    } | changes


def put(folder, shard):
    """Writes a shard to sent140/ under a data root."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    raw = (shard if isinstance(shard, str) else json.dumps(shard)).encode()
    folder.write_bytes(gzip.compress(raw) if folder.name.endswith(".gz") else raw)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Returns sent140/ of an empty data root."""
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    return tmp_path / "sent140"


@pytest.mark.parametrize(
    "name",
    [
        "all_data.json",
        "all_data_niid_3_keep_30.json.gz",
        "all_data/all_data.json",
        "data/all_data/all_data.json",
    ],
)
def test_sent140_of_one_part(root, name):
    put(root / name, leaf({"ida": 31, "bob": 30, "eve": 40}))
    pool = sent140()
    assert (
        pool.x.shape == (71, 25, 300)
        and pool.x.dtype == np.float32
        and pool.num_classes == 2
        and pool.test is None
    )
    # bob has not more than 30; eve comes before ida
    assert np.bincount(pool.client).tolist() == [
        40,
        31,
    ]
    np.testing.assert_array_equal(pool.x[40, 23:], word_vectors.hash_words(["ida", "0"]))
    assert pool.y[40:].tolist() == [i % 2 for i in range(31)]
    held = partition.by_user(pool, test_fraction=0.2)
    assert np.bincount(held.owner[~held.test]).tolist() == [int(0.8 * 40), int(0.8 * 31)]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train/a.json", "test/b.json.gz"),
        (
            "data/train/all_data_niid_3_keep_30_train_8.json",
            "data/test/all_data_niid_3_keep_30_test_8.json",
        ),
        ("all_data_niid_3_keep_30_train_8.json", "all_data_niid_3_keep_30_test_8.json"),
    ],
)
def test_sent140_keeps_a_split(root, train, test):
    put(root / train, leaf({"a": 25, "b": 28, "c": 3}))
    put(root / test, leaf({"b": 2, "a": 6, "d": 31}, first=28))
    pool = sent140()
    # a: 25 + 6; b: 28 + 2 is not more than 30; d: 31, all of them test
    assert np.bincount(pool.client).tolist() == [
        31,
        31,
    ]
    assert pool.test.tolist() == [False] * 25 + [True] * 37
    held = partition.by_user(pool, test_fraction=0.5)
    np.testing.assert_array_equal(held.test, pool.test[held.sample])


def test_sent140_draws_users_of_a_seed(root):
    put(root / "all_data.json", leaf({f"u{i:02}": 4 + i for i in range(30)}))
    everybody = sent140(min_tweets=3)
    assert everybody.client.max() == 29 and sent140(50, min_tweets=3).client.max() == 29
    drawn = sent140(10, min_tweets=3, seed=1)
    np.testing.assert_array_equal(drawn.x, sent140(10, min_tweets=3, seed=1).x)
    sizes = np.bincount(drawn.client)
    assert len(sizes) == 10 and (np.diff(sizes) > 0).all()  # in the order of their names
    assert np.bincount(sent140(10, min_tweets=3, seed=2).client).tolist() != sizes.tolist()


def test_sent140_labels_and_rows_of_any_origin(root):
    shard = leaf({"a": 6}, label=["4", "0", "2", 4, 0, 1].__getitem__)
    for row in shard["user_data"]["a"]["x"]:
        del row[5:]
    put(root / "all_data.json", shard)
    assert sent140(min_tweets=0).y.tolist() == [1, 0, 0, 1, 0, 1]


def test_the_test_tenth_alone_counts_for_ten(root):
    put(root / f"{STAND_IN}.gz", leaf({"a": 3, "b": 4}))
    assert np.bincount(sent140().client).tolist() == [4]
    put(root / "all_data.json", leaf({"c": 31}))  # the user's own file comes first
    assert np.bincount(sent140().client).tolist() == [31]


def changed(entry="x", place=0, value=None):
    """Returns a shard of a user with two tweets, one entry replaced."""
    shard = leaf({"a": 2})
    shard["user_data"]["a"][entry][place] = value
    return shard


SHARDS = {
    "no JSON": ("{", "expected JSON, "),
    "no users": (leaf({}), "no user has more than 0 tweets"),
    "no data": (leaf({"a": 2}, user_data={}), "no user has more than 0 tweets"),
    "x is text": (
        leaf({"a": 1}, user_data={"a": {"x": "a", "y": [0]}}),
        "user 'a' is listed without data",
    ),
    "no y": (leaf({"a": 1}, user_data={"a": {"x": [[]]}}), "user 'a' is listed without data"),
    "bare text": (changed(value="hello"), "entry 0 of x is 'hello', expected a row of id, date"),
    "short row": (
        changed(value=["1", "2", "3", "4"]),
        "entry 0 of x is ['1', '2', '3', '4'], expected",
    ),
    "number as text": (changed(value=[1, 2, 3, 4, 5]), "entry 0 of x is [1, 2, 3, 4, 5], expected"),
    "nested without end": (
        json.dumps(changed(value="?")).replace('"?"', "[" * 900 + "]" * 900),
        "entry 0 of x is [[[",
    ),
    "missing row": (changed(value=None), "entry 0 of x is None"),
    "label 3": (changed("y", 1, 3), "entry 1 of y is 3, expected 4 or 1 (positive), 0 or 2"),
    "label in words": (changed("y", 1, "good\nbad"), "entry 1 of y is 'good\\nbad'"),
    "label with a fraction": (changed("y", 1, 0.5), "entry 1 of y is 0.5"),
    "label true": (changed("y", 1, True), "entry 1 of y is True"),
    "label of lists": (changed("y", 1, [[1]]), "entry 1 of y is [[1]], expected"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_bad_tweets(name, root):
    shard, says = SHARDS[name]
    put(root / "all_data.json", shard)
    error = one_line(says, sent140, min_tweets=0)
    assert "sent140" in error


def test_bad_folders_and_settings(root):
    one_line("sent140: not found: sent140/data/train", sent140)
    root.mkdir()
    one_line("not found", sent140)
    (root / "train").mkdir()
    one_line("holds no *.json", sent140)
    put(root / "train" / "1.json", leaf({"a": 5}))
    assert len(sent140(min_tweets=4).y) == 5
    one_line("dataset.source.min_tweets=30: no user has more than 30 tweets; the most", sent140)
    put(root / "train" / "2.json", leaf({"a": 5}))
    one_line("user 'a' is also in", sent140)
    for setting, values in {
        "users": (0, 1.5),
        "min_tweets": (-1, True),
        "seed": (2**31, "x"),
    }.items():
        for value in values:
            said = f"dataset.source.{setting}={format_value(value)}: must be "
            one_line(said, sent140, **{setting: value})


@real
def test_real_tweets():
    if (
        locate(f"sent140/{STAND_IN}.gz") is None
        or locate("sent140/train")
        or locate("sent140/data")
    ):
        pytest.skip(f"no sent140/{STAND_IN}.gz under the data root, or files that come before it")
    tweets, y, client, test, _ = read_tweets(min_tweets=0)
    assert (len(tweets), y.sum(), client.max() + 1, test) == (16_025, 9_717, 2_875, None)
    pool = sent140(users=772)
    sizes = np.bincount(pool.client)
    assert (
        len(sizes) == 772 and 4 <= sizes.min() and sizes.max() <= 55 and len(pool.y) == sizes.sum()
    )
    # no tweet without tokens, and the last one stands at the end
    assert pool.x.any(axis=2)[:, -1].all()
    held = partition.by_user(pool, test_fraction=0.2)
    np.testing.assert_array_equal(np.bincount(held.owner[~held.test]), (0.8 * sizes).astype(int))


def one_line(says, function, *args, **kwargs):
    """Asserts an InputError of one line that says what is wrong, and returns it."""
    error = refusal(function, *args, **kwargs)
    assert says in error, error
    assert any(word in error for word in ("expected", "must be", "no user", "not found")), error
    return error
