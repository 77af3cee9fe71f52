"""Layers: initialisation, slow twins, and every way to compute a convolution."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_as_users_do, nightly

from fedjax_cfl.models import convolution, layers, recurrent
from fedjax_cfl.models.task import as_task
from fedjax_cfl.models.zoo import BiGRU

KEY = jax.random.key(0)


def normal(*shape):
    """Standard normal numbers from NumPy, which compiles nothing."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def close(actual, expected, tolerance: float = 1e-5) -> None:
    """Asserts that two pytrees agree up to `tolerance` of their largest value."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(np.abs(b).max()))


@pytest.mark.parametrize("shape", [(64, 10), (5, 5, 3, 8)])
def test_kernels_are_drawn_as_flax_draws_them(shape):
    np.testing.assert_allclose(
        layers.glorot(KEY, shape), nn.initializers.glorot_uniform()(KEY, shape), rtol=0, atol=1e-7
    )


def test_recurrent_layers_start_as_in_keras():
    x = jnp.zeros((1, 2, 300))
    for layer, gates in ((recurrent.GRU(64), 3), (recurrent.LSTM(64), 4)):
        params = jax.jit(layer.init)(KEY, x)["params"]
        matrix = np.asarray(params["recurrent_kernel"])
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(64), atol=1e-5)
        assert 0.95 < np.abs(params["kernel"]).max() / np.sqrt(6 / (300 + gates * 64)) <= 1
        assert params["bias"].sum() == (64 if gates == 4 else 0)
    np.testing.assert_array_equal(params["bias"], np.repeat([0, 1, 0, 0], 64))


# image, channels, features, kernel, stride, padding: the kinds in use on smaller images, sizes
# that do not divide
CONVOLUTIONS = [
    (10, 1, 32, 3, 1, "same"),
    (8, 32, 64, 3, 1, "same"),
    (10, 1, 32, 3, 1, "valid"),
    (8, 32, 32, 3, 1, "valid"),
    (12, 32, 32, 5, 2, "same"),
    (8, 64, 64, 5, 2, "same"),
    (12, 1, 32, 5, 1, "same"),
    (7, 32, 64, 5, 1, "same"),
    (12, 1, 6, 5, 1, "valid"),
    (12, 6, 16, 5, 1, "valid"),
    (21, 3, 32, 3, 1, "same"),
    (11, 3, 4, 5, 2, "same"),
    (11, 3, 4, (3, 2), (2, 3), "valid"),
]


@pytest.mark.parametrize(
    ("size", "channels", "features", "kernel", "strides", "padding"),
    # in every run the narrow ones, of both paddings and of strides
    [row if max(row[1:3]) <= 16 else nightly(*row) for row in CONVOLUTIONS],
)
def test_every_way_to_convolve_is_that_of_jax_with_one_kernel_per_client(
    size, channels, features, kernel, strides, padding
):
    ways = [
        convolution.Conv(features, kernel, strides, padding, method)
        for method in convolution.METHODS
    ]
    x = normal(2, 2, size, size, channels)  # [clients, B, H, W, C]
    shapes, *others = (jax.eval_shape(conv.init, KEY, x[0])["params"] for conv in ways)
    assert all(shapes == other for other in others)
    params = jax.tree.map(lambda leaf: normal(2, *leaf.shape) / 10, shapes)

    def by_jax(params, x):
        steps, layout = convolution._pair(strides), ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(
                x, params["kernel"], steps, padding.upper(), dimension_numbers=layout
            )
            + params["bias"]
        )

    def run(apply):
        def objective(params, x):
            out = apply(params, x)
            return jnp.sum(jnp.sin(3 * out)), out

        return jax.jit(jax.vmap(jax.grad(objective, argnums=(0, 1), has_aux=True)))(params, x)

    expected = run(by_jax)
    for conv in ways:
        close(run(lambda params, x, conv=conv: conv.apply({"params": params}, x)), expected)


@pytest.mark.parametrize(
    ("backend", "kernel", "found"),
    [
        ("cpu", 3, ("scan", "dot_general")),
        ("cpu", 5, ("dot_general",)),  # few features of a large kernel
        ("gpu", 3, ("dot_general",)),
        ("tpu", 5, ("conv_general_dilated",)),
    ],
)
def test_the_backend_decides_how_to_convolve(monkeypatch, backend, kernel, found):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    conv = convolution.Conv(4, kernel)
    params = jax.eval_shape(conv.init, KEY, jnp.zeros((1, 5, 5, 1)))
    jaxpr = str(jax.make_jaxpr(conv.apply)(params, jnp.zeros((2, 5, 5, 1))))
    assert (
        tuple(
            name for name in ("scan", "dot_general", "conv_general_dilated") if f"{name}[" in jaxpr
        )
        == found
    )


def test_a_convolution_refuses_unknown_words():
    for field in ({"method": "fft"}, {"padding": "full"}):
        with pytest.raises(ValueError, match="is allowed"):
            convolution.Conv(1, 3, **field).init(KEY, jnp.zeros((1, 5, 5, 1)))


@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        nightly((6, 4), "valid"),
        ((5, 7), "valid"),
        nightly((6, 4), "same"),
        ((5, 7), "same"),
        nightly((1, 2), "same"),
    ],
)
def test_max_pool_equals_reduce_window(shape, padding):
    def window(x):
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), padding.upper()
        )

    def with_gradient(pool):
        return jit_as_users_do(jax.grad(lambda x: (jnp.sum(pool(x) ** 2), pool(x)), has_aux=True))(
            normal(2, *shape, 3) - 5
        )

    close(with_gradient(lambda x: convolution.max_pool(x, padding)), with_gradient(window))


def test_batch_norm_uses_the_statistics_of_the_batch():
    x = 3 + 2 * normal(4, 5, 5, 2)
    out, params = jax.jit(layers.BatchStatNorm().init_with_output)(KEY, x)
    assert jax.tree.map(jnp.shape, params) == {"params": {"scale": (2,), "bias": (2,)}}
    flat = np.asarray(x, np.float64).reshape(-1, 2)
    close(out.reshape(-1, 2), (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-3))


def test_batch_norm_takes_statistics_per_client_and_never_of_padding():
    x, owner = 3 + 2 * normal(6, 3, 5, 2), np.array([4, -1, 7, 4, 7, 4])
    x[1] = np.nan
    norm = layers.BatchStatNorm()
    params = {"params": {"scale": np.float32([1.1, 0.9]), "bias": np.float32([0.1, -0.2])}}
    apply = jax.jit(norm.apply)
    out = np.asarray(apply(params, x, owner))
    for client in (4, 7):
        close(out[owner == client], apply(params, x[owner == client]))
    loss = lambda x: jnp.square(norm.apply(params, x, owner))[owner >= 0].sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(x)
    assert np.isfinite(gradient).all() and not gradient[1].any()


def test_group_norm_is_that_of_flax_and_sees_one_sample_at_a_time():
    x = 3 + 2 * normal(4, 3, 5, 6)
    ours, theirs = layers.GroupNorm(3), nn.GroupNorm(num_groups=3, epsilon=1e-5)
    scale, bias = normal(6), normal(6) - 1
    shaped = {"params": {"scale": scale.reshape(3, 2), "bias": bias.reshape(3, 2)}}
    out = ours.apply(shaped, x)
    close(out, theirs.apply({"params": {"scale": scale, "bias": bias}}, x))
    close(out[1:2], ours.apply(shaped, x[1:2]))
    with pytest.raises(ValueError, match="groups=4: a divisor of the 6 channels"):
        layers.GroupNorm(4).init(KEY, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_gru(p, x, reverse):
    """One sample [T, in] -> [T, h], from the equations, gate by gate."""
    h, out = np.zeros(p["recurrent_kernel"].shape[0]), [None] * len(x)
    (kz, kr, kc), (uz, ur, uc) = (
        np.split(p[name], 3, axis=1) for name in ("kernel", "recurrent_kernel")
    )
    (bz, br, bc), (cz, cr, cc) = np.split(p["bias"][0], 3), np.split(p["bias"][1], 3)
    for t in range(len(x))[:: -1 if reverse else 1]:
        z = sigmoid(x[t] @ kz + bz + h @ uz + cz)
        r = sigmoid(x[t] @ kr + br + h @ ur + cr)
        h = z * h + (1 - z) * np.tanh(x[t] @ kc + bc + r * (h @ uc + cc))
        out[t] = h
    return np.stack(out)


def slow_lstm(p, x, reverse):
    """One sample [T, in] -> [T, h], from the equations, gate by gate."""
    h = cell = np.zeros(p["recurrent_kernel"].shape[0])
    out = [None] * len(x)
    kernels, recurrent, biases = (
        np.split(p[name], 4, axis=-1) for name in ("kernel", "recurrent_kernel", "bias")
    )
    for t in range(len(x))[:: -1 if reverse else 1]:
        i, f, c, o = (
            x[t] @ k + h @ u + b for k, u, b in zip(kernels, recurrent, biases, strict=True)
        )
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
        h = sigmoid(o) * np.tanh(cell)
        out[t] = h
    return np.stack(out)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("layer", "slow"), [(recurrent.GRU, slow_gru), (recurrent.LSTM, slow_lstm)]
)
def test_recurrent_layers_equal_a_numpy_loop(layer, slow, reverse):
    x = normal(3, 5, 4)
    params = jax.jit(layer(6).init)(KEY, x)["params"]
    params = jax.tree.map(lambda p: p + normal(*p.shape) / 3, params)  # no bias is zero
    outputs, last = (
        jax.jit(layer(6, reverse, sequences).apply)({"params": params}, x)
        for sequences in (True, False)
    )
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = np.stack([slow(p, sample, reverse) for sample in x])
    close(outputs, expected)
    close(last, expected[:, 0 if reverse else -1])


@pytest.mark.nightly
def test_bidirectional_model_reads_both_ways():
    x = normal(2, 4, 3)
    task = as_task(BiGRU(2), (4, 3), 2)
    params = jax.jit(task.init)(KEY)
    logits = jax.jit(task.predict)(params, x)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for b in range(2):
        h = np.concatenate(
            [slow_gru(p["GRU_0"], x[b], False), slow_gru(p["GRU_1"], x[b], True)], axis=1
        )
        h = np.concatenate([slow_gru(p["GRU_2"], h, False)[-1], slow_gru(p["GRU_3"], h, True)[0]])
        h = np.maximum(h @ p["hidden"]["kernel"], 0)
        close(logits[b], h @ p["head"]["kernel"])
