"""Checkpoints: exact round trips, damage of every kind, other runs, and other device counts."""

import collections
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_cfl.errors import InputError
from fedjax_cfl.runs import checkpoint
from fedjax_cfl.runs.checkpoint import HEADER, restore_latest

IDENTITY = {
    "algorithm": "ifca",
    "model": {"name": "mlp", "l2": 0.001},
    "m": 3,
    "dataset": "digits",
    "shape": (8, 8),
}


class Pair(NamedTuple):
    left: Any
    right: Any


@struct.dataclass
class Carried:
    groups: Any
    assignment: Any
    memory: Any
    static: int = struct.field(pytree_node=False, default=7)


def everything():
    """Builds a tree with every kind of leaf and container a run may carry, with bits
    that are easy to lose.
    """
    params = {
        "w": jnp.array([[1.5, -0.0], [jnp.nan, jnp.inf]]),
        "b": jnp.array([1e-45, 3.4e38], jnp.float32),
    }
    return Carried(
        groups={"params": params, "half": jnp.array([1.0, 3.140625, -jnp.inf], jnp.bfloat16)},
        assignment=jnp.array([-1, 0, 2**31 - 1], jnp.int32),
        memory={
            "optax": optax.adam(1e-3).init(params),
            "empty": (),
            "nothing": None,
            "pair": Pair(
                jnp.array([True, False]), [jnp.zeros((0, 4), jnp.int32), np.uint32(2**32 - 1)]
            ),
            "raw key": jax.random.PRNGKey(7),
            "keys": jax.random.split(jax.random.key(7), 3),
            "other key": jax.random.key(1, impl="rbg"),
            "no keys": jax.random.split(jax.random.key(7), 3)[:0],
            "host": np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
            "scalar": jnp.int32(4),
        },
    )


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert bits(one) == bits(other)
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)


def small(step):
    """Builds a tree in which every number tells the step."""
    return {"w": np.full((40, 5), step, np.float32), "n": np.full(3, step, np.int32)}


def save(folder, step, **more):
    """Saves a small checkpoint; returns its header and its folder."""
    checkpoint.save(folder, step, small(step), {"round": step}, IDENTITY, **more)
    return folder / f"{step}{HEADER}", folder / str(step)


def latest(folder):
    """Restores the newest checkpoint, asserts that it is whole, and returns (step, warnings)."""
    warned = []
    found = restore_latest(folder, small(0), IDENTITY, warned.append)
    if found is None:
        return None, warned
    assert_same(found.tree, small(found.step))
    assert found.facts == {"round": found.step}
    return found.step, warned


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# what comes back


@pytest.mark.parametrize("abstract", [False, True])
def test_everything_comes_back_bit_for_bit(tmp_path, abstract):
    tree = everything()
    facts = {
        "round": 12,
        "best": 0.1 + 0.2,
        "worst": float("-inf"),
        "rows": [1, None, "ü"],
        "counter": np.int64(2**60),
    }
    folder = tmp_path / "a b#c?%20ü" / "deep"
    checkpoint.save(folder, 12, tree, facts, IDENTITY)
    like = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
        ),
        tree,
    )
    found = restore_latest(folder, like if abstract else tree, IDENTITY)
    assert found.step == 12 and found.facts == {**facts, "counter": 2**60}
    assert_same(found.tree, tree)
    assert jax.random.key_impl(found.tree.memory["other key"]) == "rbg"
    assert isinstance(found.tree.memory["pair"].right[1], np.uint32)
    if not abstract:
        assert not found.tree.assignment.committed, (
            "free to go where the program it is given to runs"
        )


def test_the_tree_may_be_empty(tmp_path):
    checkpoint.save(tmp_path, 1, ((), jnp.zeros((0, 2))), {}, {})
    assert restore_latest(tmp_path, ((), jnp.ones((0, 2))), {}).tree[1].shape == (0, 2)


def test_the_latest_step_that_counts_counts(tmp_path):
    for step in (2, 4):
        save(tmp_path, step)
    for until, step in ((4, 4), (3, 2), (2, 2), (1, None)):
        found = restore_latest(tmp_path, small(0), IDENTITY, until=until)
        assert (found.step if found else None) == step


def test_no_checkpoint_is_none(tmp_path):
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "missing") == (None, [])
    save(tmp_path, 0)[0].unlink()
    assert latest(tmp_path) == (None, []), "killed in its first save"


def test_a_plain_number_is_not_an_array(tmp_path):
    with pytest.raises(AssertionError, match=r"\['n'\] is a int"):
        checkpoint.save(tmp_path, 1, {"n": 3}, {}, {})


def test_orbax_is_imported_only_when_used():
    code = "import sys, fedjax_cfl.runs.checkpoint; sys.exit('orbax.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_is_a_pickle(tmp_path):
    checkpoint.save(tmp_path, 1, everything(), {}, IDENTITY)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 3
    for file in files:
        start = file.read_bytes()[:2]
        assert not (start[:1] == b"\x80" and start[1:] in {bytes([n]) for n in range(6)}), (
            f"{file} starts like a pickle"
        )
    assert "import pickle" not in Path(checkpoint.__file__).read_text()


# damage


def damages(file):
    """Yields (what, function) for each way to damage a file."""
    size = file.stat().st_size
    content = file.read_bytes()
    for length in {0, size // 2, size - 1} - {size}:
        yield f"cut to {length}", lambda length=length: os.truncate(file, length)
    for place in sorted({0, size // 3, size - 1, random.Random(size).randrange(max(size, 1))}):
        if place < size:
            flipped = (
                content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
            )
            yield f"bit flipped at {place}", lambda flipped=flipped: file.write_bytes(flipped)
    yield "deleted", file.unlink


def test_any_damage_falls_back_and_never_gives_wrong_numbers(tmp_path):
    save(tmp_path, 1)
    header, newest = save(tmp_path, 2)
    tried = 0
    for file in [header, *(file for file in newest.rglob("*") if file.is_file())]:
        content = file.read_bytes()
        for what, damage in damages(file):
            damage()
            step, warned = latest(tmp_path)
            assert step == 1, f"{file} {what}"
            if file.exists() or file != header:  # without a header it was never saved
                assert len(warned) == 1 and "\n" not in warned[0] and str(newest) in warned[0]
            file.write_bytes(content)
            tried += 1
    assert tried > 40
    assert latest(tmp_path) == (2, [])


def test_an_identity_that_was_damaged_is_not_one_of_another_run(tmp_path):
    save(tmp_path, 1)
    header, _ = save(tmp_path, 2)
    header.write_text(header.read_text().replace('"ifca"', '"ifcb"'))
    step, warned = latest(tmp_path)
    assert step == 1 and "has changed since it was written" in warned[0]


def test_every_bit_of_the_numbers_is_guarded(tmp_path):
    save(tmp_path, 1)
    _, newest = save(tmp_path, 2)
    largest = max(
        (file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    content = largest.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 100)):
        largest.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        assert latest(tmp_path)[0] == 1


def test_missing_folders_fall_back(tmp_path):
    save(tmp_path, 1)
    _, newest = save(tmp_path, 2)
    shutil.rmtree(newest)
    assert latest(tmp_path)[0] == 1
    newest.mkdir()
    assert latest(tmp_path)[0] == 1
    newest.rmdir()
    newest.write_text("a file")
    assert latest(tmp_path)[0] == 1


def test_a_run_goes_on_after_a_fall_back(tmp_path):
    save(tmp_path, 1)
    for step in (2, 3):
        save(tmp_path, step)[0].write_text("")
    step, warned = latest(tmp_path)
    assert step == 1 and len(warned) == 2
    save(tmp_path, 2)
    assert latest(tmp_path) == (2, []), "those of later rounds are gone"


def test_nothing_readable_is_an_error(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)[0].write_text("[1, 2")
    with pytest.raises(InputError, match="none of 2 can be read"):
        latest(tmp_path)


def test_what_lies_beside_checkpoints_is_ignored(tmp_path):
    _, folder = save(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("litter")
    assert latest(tmp_path) == (1, [])
    os.mkfifo(folder / "pipe")
    with pytest.raises(InputError, match="none of 1 can be read"):
        latest(tmp_path)


def test_a_pipe_or_a_link_to_a_device_never_hangs(tmp_path):
    save(tmp_path, 1)
    _, folder = save(tmp_path, 2)
    file = folder / "_CHECKPOINT_METADATA"
    for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink()
        replace(file)
        step, warned = latest(tmp_path)
        assert step == 1 and "is not a regular file" in warned[0]


def test_a_checkpoint_of_an_earlier_version_is_refused_in_a_line(tmp_path):
    (tmp_path / "000002-step-50").mkdir()
    assert "an earlier version wrote it, format 4 or before; go on with that version" in refused(
        tmp_path, small(0), IDENTITY
    )


# another run


def refused(folder, like, identity):
    warned = []
    with pytest.raises(InputError) as caught:
        restore_latest(folder, like, identity, warned.append)
    assert not warned and "\n" not in str(caught.value)
    return str(caught.value)


def test_another_run_is_refused_with_both_values(tmp_path):
    _, path = save(tmp_path, 1)
    text = refused(tmp_path, small(0), {**IDENTITY, "algorithm": "fedprox", "m": 2})
    assert (
        text
        == f"checkpoint {path} is of a different run (algorithm: ifca there, fedprox here; m: 3"
        " there, 2 here)"
    )
    assert "model.l2: 0.001 there, 0 here" in refused(
        tmp_path, small(0), {**IDENTITY, "model": {"name": "mlp", "l2": 0}}
    )
    assert "shape: [8, 8] there, absent here" in refused(
        tmp_path, small(0), {k: v for k, v in IDENTITY.items() if k != "shape"}
    )
    assert "extra: absent there, 1 here" in refused(tmp_path, small(0), {**IDENTITY, "extra": 1})


def test_other_shapes_types_and_leaves_are_refused(tmp_path):
    save(tmp_path, 1)
    assert "['n']: int32[3] there, int32[4] here" in refused(
        tmp_path, {**small(0), "n": np.zeros(4, np.int32)}, IDENTITY
    )
    half = {**small(0), "w": jnp.zeros((40, 5), jnp.bfloat16)}
    assert "['w']: float32[40, 5] there, bfloat16[40, 5] here" in refused(tmp_path, half, IDENTITY)
    assert "['w']: float32[40, 5] there, absent here" in refused(
        tmp_path, {"n": small(0)["n"]}, IDENTITY
    )
    assert "and 14 more" in refused(
        tmp_path, {**small(0), **{str(n): np.zeros(1) for n in range(20)}}, IDENTITY
    )


def test_other_key_types_are_refused(tmp_path):
    checkpoint.save(tmp_path, 1, jax.random.key(0), {}, {})
    assert "key<fry>[] there, key<rbg>[] here" in refused(
        tmp_path, jax.random.key(0, impl="rbg"), {}
    )


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 6)
    save(tmp_path, 1)
    monkeypatch.undo()
    assert "has format 6, this version reads 5" in refused(tmp_path, small(0), IDENTITY)


def test_leaves_are_found_by_name_not_by_position(tmp_path):
    first, second = collections.namedtuple("Pair", "a b"), collections.namedtuple("Pair", "b a")
    checkpoint.save(tmp_path, 1, first(a=np.zeros(2), b=np.ones(2)), {}, {})
    found = restore_latest(tmp_path, second(a=np.zeros(2), b=np.zeros(2)), {}).tree
    assert found.a.tolist() == [0, 0] and found.b.tolist() == [1, 1]


# what is kept


def test_the_last_are_kept(tmp_path):
    for step in range(6):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["4", "4.header", "5", "5.header"]


def test_rounds_sort_as_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["10", "10.header", "100", "100.header"]
    assert latest(tmp_path) == (100, [])


# devices


FOUR = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from fedjax_cfl.runs import checkpoint

one, four = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()), ("clients",))
assert mesh.size == 4
split, whole = NamedSharding(mesh, P("clients")), NamedSharding(mesh, P())
like = {
    "w": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=split),
    "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole),
    "b": jax.device_put(jnp.zeros(4, jnp.bfloat16), whole),
}
tree = checkpoint.restore_latest(one, like, {}).tree
assert all(leaf.sharding == like[name].sharding for name, leaf in tree.items())
assert [shard.data.shape for shard in tree["w"].addressable_shards] == [(2, 3)] * 4
assert np.array_equal(tree["w"], np.arange(24).reshape(8, 3))
tree = jax.jit(lambda tree: tree | {"b": tree["b"] + 1}, donate_argnums=0)(tree)
assert all(np.array_equal(shard.data, np.ones(4)) for shard in tree["b"].addressable_shards)
checkpoint.save(four, 2, tree, {}, {})
"""


def test_one_device_and_four_read_each_other(tmp_path):
    tree = {
        "w": jnp.arange(24.0).reshape(8, 3),
        "key": jax.random.key(5),
        "b": jnp.zeros(4, jnp.bfloat16),
    }
    checkpoint.save(tmp_path / "one", 1, tree, {}, {})
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment.pop("XLA_FLAGS", None)
    subprocess.run(
        [sys.executable, "-c", FOUR, tmp_path / "one", tmp_path / "four"],
        check=True,
        env=environment,
    )
    found = restore_latest(tmp_path / "four", tree, {})
    assert_same(found.tree, tree | {"b": jnp.ones(4, jnp.bfloat16)})
    mesh = Mesh(np.array(jax.devices()[:1]), ("clients",))
    sharding = NamedSharding(mesh, PartitionSpec("clients"))
    found = restore_latest(
        tmp_path / "four", jax.device_put(tree, {**dict.fromkeys(tree, sharding), "key": None}), {}
    )
    assert found.tree["w"].sharding == sharding
