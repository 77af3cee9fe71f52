"""Decompositions under a map of runs: one matrix at a time, so that no device waits for ever, and
with the numbers of `jax.numpy.linalg`.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fedjax_cfl
from fedjax_cfl import decompose
from fedjax_cfl.models.recurrent import orthogonal

HOME = Path(fedjax_cfl.__file__).parent
KINDS = {
    "eigh": jnp.linalg.eigh,
    "svd": lambda matrix: jnp.linalg.svd(matrix, full_matrices=False),
    "svdvals": lambda matrix: jnp.linalg.svd(matrix, compute_uv=False),
    "qr": jnp.linalg.qr,
}
# as many devices as threads: each device's program batches what it is told
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec
from fedjax_cfl import decompose
jax.config.update("jax_num_cpu_devices", os.cpu_count())
mesh, whole = jax.make_mesh((os.cpu_count(),), ("all",)), PartitionSpec()
function = eval(sys.argv[1], {"jnp": jnp, "decompose": decompose})

def mapped(x):
    def once(_, x):
        parts = jax.tree.leaves(jax.vmap(function)(x))
        return x + 1e-6 * jax.lax.psum(sum(jnp.sum(jnp.abs(part)) for part in parts), "all")
    return jax.lax.fori_loop(0, 5, once, x)

x = jax.random.normal(jax.random.key(0), (3, 50, 50))
one = jax.shard_map(mapped, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
print(jax.block_until_ready(jax.jit(one)(x + x.swapaxes(1, 2))).shape)
"""


def run_mapped(function: str, seconds: float) -> str:
    """Returns what the program prints; raises TimeoutExpired where it hangs."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, function],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=seconds,
    ).stdout


def test_a_batch_on_every_core_does_not_hang():
    every = ", ".join(f"decompose.{name}(x)" for name in KINDS)
    assert run_mapped(f"lambda x: ({every})", 120) == "(3, 50, 50)\n"


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_numpy_to_the_bit(name):
    ours, theirs = getattr(decompose, name), KINDS[name]
    draws = jax.random.normal(jax.random.key(1), (3, 12, 12))
    several = draws + draws.swapaxes(1, 2) if name == "eigh" else draws[:, :, :7]
    for way in (lambda f: f(several[0]), lambda f: jax.jit(f)(several[0])):
        for ours_part, theirs_part in zip(
            jax.tree.leaves(way(ours)), jax.tree.leaves(way(theirs)), strict=True
        ):
            np.testing.assert_array_equal(ours_part, theirs_part)
    twice = jax.jit(jax.vmap(jax.vmap(ours)))(several[None])
    for number in range(3):
        alone = jax.tree.leaves(ours(several[number]))
        for part, part_alone in zip(jax.tree.leaves(twice), alone, strict=True):
            np.testing.assert_array_equal(part[0, number], part_alone)
    with pytest.raises(ValueError, match="one matrix"):
        ours(several)


def test_a_mapped_decomposition_is_a_loop():
    """Whatever the machine: no kernel is given more than one matrix."""
    matrices = jnp.ones((3, 5, 5))
    for name in KINDS:
        text = jax.jit(jax.vmap(getattr(decompose, name))).lower(matrices).as_text()
        assert "while" in text
        calls = [line for line in text.splitlines() if "lapack" in line or "@Qr" in line]
        assert calls and not any("tensor<3x5x5" in line for line in calls), name


def test_recurrent_kernels_are_drawn_one_by_one_with_the_same_numbers():
    keys = jax.random.split(jax.random.key(2), 3)
    theirs = nn.initializers.orthogonal()
    drawn = jax.jit(jax.vmap(lambda key: orthogonal(key, (4, 12))))(keys)
    for key, kernel in zip(keys, drawn, strict=True):
        np.testing.assert_array_equal(kernel, theirs(key, (4, 12)))
    text = jax.jit(jax.vmap(lambda key: orthogonal(key, (4, 12)))).lower(keys).as_text()
    calls = [line for line in text.splitlines() if "lapack" in line or "@Qr" in line]
    assert calls and not any("tensor<3x12x4" in line for line in calls)


def test_nothing_else_decomposes():
    """JAX's own decompositions are called in one module; NumPy's are of the host."""
    found = []
    for path in sorted(HOME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            rooms = ("jnp.linalg.", "jax.numpy.linalg.", "jax.lax.linalg.", "jax.scipy.linalg.")
            if text.startswith(rooms) and not text.endswith(".norm"):
                found.append(path.relative_to(HOME).as_posix())
    assert set(found) == {"decompose.py"}
