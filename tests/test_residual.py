"""The large networks at small width: every parameter learns, every sample by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly
from test_layers import KEY, close, normal

from fedjax_cfl.models import GroupNorm, MobileNetV2, ResNet18, as_task
from fedjax_cfl.models.convolution import DepthwiseConv, shift_and_add, shift_and_add_per_image

PAIRS = partial(GroupNorm, 2)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2))  # of MobileNetV2
SMALL = {
    "resnet18": ResNet18(3, features=(4, 6), norm=PAIRS),
    "resnet18 of large images": ResNet18(3, stem=7, features=(4, 6), norm=PAIRS),
    "mobilenet_v2": MobileNetV2(3, width=0.2, stages=STAGES),
    "mobilenet_v2 of large images": MobileNetV2(3, False, width=0.2, stages=STAGES),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SMALL)
def test_a_sample_is_alone_and_every_parameter_learns(name):
    side = 32 if "large" in name else 16
    task = as_task(SMALL[name], (side, side, 3), 3)
    params = jax.jit(task.init)(KEY)
    # biases start at 0: away from there every gradient has a reason
    params = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)
    x, y = normal(4, side, side, 3), np.array([0, 1, 2, 1])

    @jax.jit
    def run(params, x):
        def total(params):
            each = task.loss(params, x, y)
            return each.sum(), each

        (_, each), grad = jax.value_and_grad(total, has_aux=True)(params)
        return each, task.predict(params, x), grad

    each, logits, grad = run(params, x)
    assert logits.shape == (4, 3) and np.isfinite(each).all()
    for path, leaf in jax.tree_util.tree_leaves_with_path(grad):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path
    other = x.copy()
    other[1] = 30
    changed = run(params, other)[1]
    rest = np.array([0, 2, 3])
    close(changed[rest], logits[rest], 1e-4)
    assert not np.allclose(changed[1], logits[1])


@pytest.mark.parametrize("convolve", [shift_and_add, shift_and_add_per_image])
@pytest.mark.parametrize(("side", "stride"), [(5, 1), nightly(6, 2), (7, 2), nightly(1, 2)])
def test_depthwise_convolution_is_the_grouped_one_of_jax(side, stride, convolve):
    """And its gradients, with a kernel for each of two clients."""
    x, kernel = normal(2, 3, side, side + 1, 4), normal(2, 3, 3, 4)

    def grouped(x, kernel, stride):
        layout = ("NHWC", "HWIO", "NHWC")
        kernel, steps = kernel[:, :, None], (stride, stride)
        return jax.lax.conv_general_dilated(
            x, kernel, steps, "SAME", dimension_numbers=layout, feature_group_count=4
        )

    def run(convolve):
        def objective(x, kernel):
            out = convolve(x, kernel, stride)
            return jnp.sum(jnp.sin(3 * out)), out

        return jax.jit(jax.vmap(jax.grad(objective, argnums=(0, 1), has_aux=True)))(x, kernel)

    close(run(convolve), run(grouped))


@pytest.mark.parametrize(("backend", "loops"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_a_cpu_takes_one_image_after_another(monkeypatch, backend, loops):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    layer, x = DepthwiseConv(), jnp.zeros((2, 5, 5, 4))
    params = jax.eval_shape(layer.init, KEY, x)
    assert params["params"]["kernel"].shape == (3, 3, 4)
    assert ("scan[" in str(jax.make_jaxpr(layer.apply)(params, x))) == loops
