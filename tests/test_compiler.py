"""What programs are compiled with."""

import jax
import jaxlib.version
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.simulation.compiler import QUICK, compiler_options

ONE_KIND = not jaxlib.version.__version__.startswith("0.10.")
pytestmark = pytest.mark.skipif(ONE_KIND, reason="this XLA has one kind of emitter only")


def as_task(model, shape):
    return cfl.as_task(model, shape, 3)


def test_only_training_of_a_wide_dense_layer_keeps_the_slower_compiler(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    mesh = cfl.make_mesh()
    dense = as_task(cfl.models.MLP(num_classes=3, hidden=(128,)), (784,))
    linear = as_task(cfl.models.MCLR(num_classes=3), (64,))
    images = as_task(cfl.models.LeNet(num_classes=3), (28, 28, 1))
    assert compiler_options(mesh) == QUICK == compiler_options(mesh, images)
    assert compiler_options(mesh, linear) == QUICK
    assert compiler_options(mesh, dense) == {}


def test_flags_of_the_user_win(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    options = compiler_options(cfl.make_mesh())
    assert options == {"xla_cpu_use_fusion_emitters": False}


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
