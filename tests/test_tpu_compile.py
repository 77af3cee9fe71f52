"""Programs for chips that nobody has: what the reader of compiled programs finds, what lowers
for GPU and TPU, and what the TPU's own compiler makes of a run.
"""

import csv
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hlo
import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from conftest import build, nightly, others_nightly
from jax import export, lax
from jax.sharding import PartitionSpec

import fedjax_cfl as cfl
from fedjax_cfl.sharding import flatten_updates, on_every_device
from fedjax_cfl.simulation.compiler import COMMAND_BUFFERS, QUICK, compiler_options

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "tpu_compile.py"
METHODS = {
    "fedavg": {},
    "ifca": {"m": 3},
    "flexcfl": {"m": 2, "alpha": 3, "pretrain": "iters:3"},
}


def compiled_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_the_reader_finds_exchanges_and_tells_those_of_loops():
    mesh = cfl.make_mesh(4)
    axes, split = mesh.axis_names, PartitionSpec(mesh.axis_names)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    def exchange(x):
        once = lax.psum(x.sum(0), axes)
        often = lax.fori_loop(0, 3, lambda i, a: a + lax.psum(a * i, axes), x[:, :2].sum(0))
        return x + once + often.sum()

    found = hlo.find_collectives(compiled_text(exchange, np.ones((8, 5), np.float32)))
    assert {(each.kind, each.in_loop, each.bytes) for each in found} == {
        ("all-reduce", False, 5 * 4),
        ("all-reduce", True, 2 * 4),
    }
    assert hlo.count_collectives(found) == {"all-reduce": (2, 28)}


def test_distances_are_shared_out_and_a_clustering_waits_for_nobody():
    """Each device gets its coordinates of all updates, and loops over their products alone."""
    mesh = cfl.make_mesh(4)

    def loop(x):
        return lax.fori_loop(0, 9, lambda i, x: jnp.tanh(x @ x / 2e4), x)

    def cluster(rows):
        rows = flatten_updates(rows, mesh)
        return on_every_device(loop, mesh)(rows @ rows.T)

    rows = np.random.default_rng(0).normal(size=(32, 1024)).astype(np.float32)
    held = jax.device_put(rows, jax.NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    found = hlo.find_collectives(compiled_text(cluster, held))
    assert {each.kind for each in found} == {"all-to-all", "all-reduce"}
    assert not any(each.in_loop for each in found)
    np.testing.assert_allclose(jax.jit(cluster)(held), loop(rows @ rows.T), atol=1e-2)


def test_the_reader_finds_whole_arrays_and_what_goes_to_the_host():
    def quiet(x):
        return jnp.sin(x) @ x.T

    def loud(x):
        jax.debug.callback(lambda _: None, x.sum())
        return quiet(x)

    x = np.ones((11, 13), np.float32)
    assert hlo.find_host_transfers(compiled_text(quiet, x)) == []
    assert len(hlo.find_host_transfers(compiled_text(loud, x))) == 1
    assert hlo.count_arrays(compiled_text(quiet, x), {11 * 13})
    assert not hlo.count_arrays(compiled_text(quiet, x), {17})
    assert hlo.shape_sizes("(f32[2,3]{1,0}, /*index=1*/bf16[4], pred[])") == [
        (6, 24),
        (4, 8),
        (1, 1),
    ]


def test_the_reader_counts_an_exchange_in_pieces_once():
    piece = 'frontend_attributes={chain_id="0"}'
    lines = [
        f"  %gather{n} = f32[8,5]{{1,0}} all-gather(%x), channel_id={channel}, {chain}"
        for n, (channel, chain) in enumerate([(1, piece), (1, piece), (2, piece), (3, ""), (3, "")])
    ]
    found = hlo.find_collectives("\n".join(["ENTRY %main (x: f32[2,5]) -> f32[8,5] {", *lines]))
    assert hlo.count_collectives(found) == {"all-gather": (4, 4 * 160)}


def test_the_reader_counts_a_step_of_a_loop_and_its_transposes():
    text = """
%fused (p: f32[4,2]) -> f32[2,4] {
  %p = f32[4,2]{1,0} parameter(0)
  ROOT %t = f32[2,4]{1,0} transpose(%p), dimensions={1,0}
}

%body (c: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %c = (s32[], f32[4,2]{1,0}) parameter(0)
  %x = f32[4,2]{1,0} get-tuple-element(%c), index=1
  %moved = f32[2,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %product = f32[4,4]{1,0} dot(%x, %moved), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[4,2]{1,0}) tuple(%x, %x)
}

ENTRY %main (a: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %a = (s32[], f32[4,2]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[4,2]{1,0}) while(%a), condition=%cond, body=%body
}
"""
    assert hlo.find_step_loops(text) == [(2, 1)]
    assert hlo.find_step_loops(text.replace("dot(", "add(")) == []


@pytest.mark.parametrize("kind", ["TPU v5 lite", "NVIDIA H100 80GB HBM3", "AMD MI300X", "cpu"])
def test_every_compiler_gets_its_own_options(kind, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    platform = {"T": "tpu", "N": "gpu", "A": "gpu", "c": "cpu"}[kind[0]]
    device = SimpleNamespace(platform=platform, device_kind=kind)
    mesh = SimpleNamespace(devices=np.array([device]))
    quick = QUICK if jaxlib.version.__version__.startswith("0.10.") else {}
    own = {"cpu": quick, "NVIDIA H100 80GB HBM3": COMMAND_BUFFERS}
    assert compiler_options(mesh) == own.get(kind, {})
    if kind.startswith("NVIDIA"):  # what a user says of them stays
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
        assert compiler_options(mesh) == {"xla_gpu_graph_min_graph_size": 1}


@pytest.mark.parametrize("name", others_nightly(METHODS, ["ifca"]))
@pytest.mark.parametrize("width", [nightly(1), 64])
def test_a_round_lowers_for_gpu_and_tpu(name, width, toy, linear):
    """From shapes alone and with nothing for the host, for four devices."""
    local = cfl.Local(
        0.2, epochs=2, batch_size=5, execution=cfl.make_execution(cfl.make_mesh(4), width)
    )
    factory = getattr(cfl.algorithms, name)
    algorithm = build(factory, linear, local, cfl.select.rr_then_random(6), **METHODS[name])
    key, data = jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(lambda: toy)
    state = jax.eval_shape(algorithm.init, key, data)
    exported = export.export(jax.jit(algorithm.round), platforms=("cuda", "tpu"))(key, state, data)
    assert exported.platforms == ("cuda", "tpu") and exported.nr_devices == 4
    assert "callback" not in exported.mlir_module()


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="no TPU compiler: pip install 'fedjax-cfl[tpu]'",
)
def test_the_compiler_of_tpus_shares_the_cohort_over_the_chips(tmp_path):
    """Updates are added up by all-reduces, nothing has the whole cohort, and nothing goes to
    the host.
    """
    environment = os.environ | {"XLA_FLAGS": "", "FEDJAX_CFL_DATA": str(tmp_path)}
    command = [sys.executable, PROGRAM, "--results", tmp_path, "--methods", *METHODS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "programs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == set(METHODS)
    assert not any(row["error"] or row["host_transfers"] or row["whole_cohort"] for row in rows)
    rounds = [row for row in rows if row["program"] == "train"]
    assert all(int(row["all_reduce"]) > 0 for row in rounds)
    assert all(int(row["all_gather_bytes"]) < int(row["all_reduce_bytes"]) for row in rounds)
