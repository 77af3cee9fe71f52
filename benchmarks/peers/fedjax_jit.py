"""FedJAX: `for_each_client` with its `jit` backend, the fastest it has on a current
JAX, on Haiku models.

FedJAX repeats the samples and then cuts batches, so that E epochs of n samples are
ceil(E n / B) steps: in W3 as many as elsewhere, in W1 and W2 (E = B = 10) up to nine
fewer a client.
"""

import itertools
import time

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from workloads import CLASSES, LR, Workload, cohorts, initial, population

jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls a name that JAX has dropped
import fedjax  # noqa: E402

from peers import Trained  # noqa: E402

NAMES = {"mlp": ["hidden", "head"], "mclr": ["head"], "cnn": ["conv_0", "conv_1", "head"]}


def logits_of(model: str, x):
    """Applies the Haiku layers of a workload."""
    if model == "cnn":
        for layer, features in enumerate((32, 64)):
            x = hk.max_pool(
                jax.nn.relu(hk.Conv2D(features, 5, name=f"conv_{layer}")(x)), 2, 2, "VALID"
            )
        x = hk.Flatten()(x)
    if model == "mlp":
        x = jax.nn.relu(hk.Linear(128, name="hidden")(x))
    return hk.Linear(CLASSES, name="head")(x)


def train(work: Workload, rounds: int) -> Trained:
    """Runs FedAvg as FedJAX's own does: a weighted mean of the clients' deltas."""
    x, y, start = population(work.model)
    data = [fedjax.ClientDataset({"x": x[a:b], "y": y[a:b]}) for a, b in itertools.pairwise(start)]
    network = hk.without_apply_rng(hk.transform(lambda x: logits_of(work.model, x)))
    params = {
        name: {"w": jnp.asarray(w), "b": jnp.asarray(b)}
        for name, (w, b) in zip(NAMES[work.model], initial(work.model), strict=True)
    }

    def loss(params, batch):
        logits = network.apply(params, batch["x"])
        return jnp.mean(-jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1))

    def client_init(shared, rng):
        return {"params": shared, "rng": rng}

    def client_step(state, batch):
        rng, _ = jax.random.split(state["rng"])
        grads = jax.grad(loss)(state["params"], batch)
        return {
            "params": jax.tree_util.tree_map(lambda p, g: p - LR * g, state["params"], grads),
            "rng": rng,
        }

    def client_final(shared, state):
        return jax.tree_util.tree_map(jnp.subtract, state["params"], shared)

    def batches(client: int, number: int):
        n = len(data[client])
        if n <= work.batch:  # full batches: cut after repeating they would be one of E n samples
            return [data[client].all_examples()] * work.epochs, work.epochs
        view = data[client].shuffle_repeat_batch(
            batch_size=work.batch, num_epochs=work.epochs, seed=number
        )
        return view, -(-work.epochs * n // work.batch)

    fedjax.set_for_each_client_backend("jit")
    visit = fedjax.for_each_client(client_init, client_step, client_final)
    seconds, steps, model = [], [], None
    for number, ids in enumerate(cohorts(work, rounds)):
        began = time.perf_counter()
        views = [batches(int(i), number) for i in ids]
        total, weight = jax.tree_util.tree_map(jnp.zeros_like, params), 0
        for client, delta in visit(
            params,
            [
                (int(i), view, jax.random.PRNGKey(i))
                for i, (view, _) in zip(ids, views, strict=True)
            ],
        ):
            n = len(data[client])
            total = jax.tree_util.tree_map(lambda t, d, n=n: t + n * d, total, delta)
            weight += n
        params = jax.block_until_ready(
            jax.tree_util.tree_map(lambda p, t, w=weight: p + t / w, params, total)
        )
        seconds.append(time.perf_counter() - began)
        steps.append(sum(count for _, count in views))
        model = model or [
            tuple(np.asarray(params[name][part]) for part in ("w", "b"))
            for name in NAMES[work.model]
        ]
    return Trained(seconds, steps, model)
