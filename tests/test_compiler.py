"""What programs are compiled with."""

import shlex
import subprocess
import sys

import jax
import jaxlib.version
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.simulation.compiler import QUICK, compiler_options

ONE_KIND = not jaxlib.version.__version__.startswith("0.10.")
two_kinds = pytest.mark.skipif(ONE_KIND, reason="this XLA has one kind of emitter only")


def as_task(model, shape):
    return cfl.as_task(model, shape, 3)


@two_kinds
def test_only_training_of_a_wide_dense_layer_keeps_the_slower_compiler(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    mesh = cfl.make_mesh()
    dense = as_task(cfl.models.MLP(num_classes=3, hidden=(128,)), (784,))
    linear = as_task(cfl.models.MCLR(num_classes=3), (64,))
    images = as_task(cfl.models.LeNet(num_classes=3), (28, 28, 1))
    assert compiler_options(mesh) == QUICK == compiler_options(mesh, images)
    assert compiler_options(mesh, linear) == QUICK
    assert compiler_options(mesh, dense) == {}


@two_kinds
def test_flags_of_the_user_win(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    options = compiler_options(cfl.make_mesh())
    assert options == {"xla_cpu_use_fusion_emitters": False}


@two_kinds
def test_a_run_is_compiled_with_these_options(monkeypatch, toy, mlp):
    monkeypatch.setenv("XLA_FLAGS", "")
    given = []
    compile_lowered = jax.stages.Lowered.compile

    def spy(self, compiler_options=None):
        given.append(compiler_options)
        return compile_lowered(self, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    local = cfl.Local(lr=0.1, epochs=1, batch_size=5)
    algorithm = cfl.algorithms.fedavg(mlp, local, cfl.select.rr_then_random(6))
    cfl.run(algorithm, mlp, toy, jax.random.key(0), rounds=1)
    assert given == [QUICK] * 3  # the start, the rounds, the evaluation


@pytest.mark.nightly
def test_a_cache_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    line = "algorithm=fedavg model=mclr rounds=1 dataset.clients=8 curves=false run_dir="

    def run(name):
        command = [sys.executable, "-m", "fedjax_cfl", *shlex.split(line + name)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert run("one").stderr == ""
    for path in (tmp_path / "cache").rglob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    said = run("two").stderr.splitlines()
    assert len(said) == 1 and said[0].endswith("so they are compiled again; remove it")
    assert said[0].startswith(f"fedjax-cfl: warning: {tmp_path / 'cache'}")
