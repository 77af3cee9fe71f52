"""What Fielding's clients tell of their data: label shares, embeddings, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import silhouette_score

from fedjax_cfl.algorithms.fielding import represent
from fedjax_cfl.data.federated import gather, train_label_shares


def test_label_shares(toy):
    found = train_label_shares(toy)
    owner, y = np.asarray(toy.owner)[toy.train.order], np.asarray(toy.y)[toy.train.order]
    for k in range(14):
        held = np.bincount(y[owner == k], minlength=4)
        np.testing.assert_allclose(found[k], held / max(held.sum(), 1), rtol=1e-6)


def test_embedding_is_the_mean_of_a_trained_hidden_layer(toy, linear, local):
    representation = represent.embedding(units=8, epochs=30, lr=0.5)(linear, local)
    shared = representation.init(jax.random.key(0), toy)
    who = np.arange(14) % 3 > 0
    points = jax.jit(representation.compute)(shared, toy, who)
    owner, rows = np.asarray(toy.owner)[toy.train.order], np.asarray(toy.train.order)
    hidden = np.maximum(np.asarray(toy.x) @ shared["hidden"] + shared["hidden_bias"], 0)
    for k in range(14):
        mine = hidden[rows[owner == k]]
        wanted = mine.mean(0) if len(mine) and who[k] else np.zeros(8)
        np.testing.assert_allclose(points[k], wanted, rtol=1e-4, atol=1e-5)
    logits = hidden[rows] @ shared["out"] + shared["out_bias"]
    assert (logits.argmax(1) == np.asarray(toy.y)[rows]).mean() > 0.5


@pytest.mark.nightly
def test_gradients_see_what_label_shares_cannot(toy, linear, local):
    """The concepts of the toy name two classes the other way round: labels alone do not tell."""
    representation = represent.gradient(length=64)(linear, local)
    shared = representation.init(jax.random.key(0), toy)
    large = np.asarray(toy.train.size) > 10
    points = np.asarray(jax.jit(representation.compute)(shared, toy, jnp.asarray(large)))
    assert not points[~large].any()
    concept = np.asarray(toy.concept)[large]

    def score(x, metric):
        return silhouette_score(x, concept, metric=metric)

    labels = np.asarray(train_label_shares(toy))[large]
    assert score(points[large], "sqeuclidean") > score(labels, "cityblock") + 0.1
    # what all clients store has learned something, unless it is to be random
    random = represent.gradient(length=64, epochs=0)(linear, local).init(jax.random.key(0), toy)
    x, y = gather(toy, toy.train.order)
    losses = [
        float(linear.loss(jax.tree.map(lambda leaf: leaf[0], model), x, y, None).mean())
        for model in (shared, random)
    ]
    assert losses[0] < losses[1] - 0.1


def test_projection_keeps_inner_products():
    x = np.random.default_rng(0).normal(size=(2, 20_000)).astype("f4")
    x[1] = 0.5 * x[0] + x[1]
    low = np.stack([represent.project(jnp.asarray(row), 4096) for row in x])
    np.testing.assert_allclose(low @ low.T, x @ x.T, rtol=0.1)
