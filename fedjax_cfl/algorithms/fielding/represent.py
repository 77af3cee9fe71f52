"""What a client reports to the server about its data: label shares, the mean embedding of a
frozen network that all clients store, or a gradient at such a network (Fielding,
https://arxiv.org/abs/2411.01580, section 2 and appendix E).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from typing_extensions import TypeAliasType

from fedjax_cfl.client.cohort import map_clients, mean_over_samples, pass_over_samples
from fedjax_cfl.client.executor import map_result
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import gradient_step
from fedjax_cfl.clustering.distances import MetricFn, l1, squared_euclidean
from fedjax_cfl.data.federated import check_classes, gather, train_label_shares
from fedjax_cfl.data.perturb import draw_false_orders, report_falsely
from fedjax_cfl.models.task import as_float
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE
from fedjax_cfl.system.reports import make_bill, no_bill
from fedjax_cfl.tasks.classification import cross_entropy
from fedjax_cfl.tree import drop_statistics
from fedjax_cfl.types import Bill, FederatedData, Key, Task
from fedjax_cfl.validation import Fraction, NaturalInt, PositiveInt


class Representation(NamedTuple):
    """How clients are represented by points [K, p]."""

    # (key, data) -> what every client stores from the start on, () if nothing
    init: Callable[[Key, FederatedData], Any]
    # (shared, data, who [K] bool) -> [K, p]; rows of others may be anything
    compute: Callable[[Any, FederatedData, jax.Array], jax.Array]
    metric: MetricFn  # the distance of two points, unless the settings name another
    # (shared, K) -> what sending `shared` to each client [K] takes, or nobody's bill
    setup: Callable[[Any, int], Bill]
    # (who [K] bool, p) -> what the reports of each client [K] take: p words
    report: Callable[[jax.Array, int], Bill] = lambda who, length: make_bill(words_up=who * length)
    # what computing a point takes: samples inferred for each sample of the client
    inferences: int = 0


MakeRepresentation = TypeAliasType("MakeRepresentation", Callable[[Task, Local], Representation])
RepresentationName = Literal["labels", "embedding", "gradient"]


OTHERS = "use represent=gradient, or another algorithm, as ifca"  # without classes


def label_shares(task: Task, local: Local) -> Representation:
    """Represents a client by the shares [C] of its training labels (a `MakeRepresentation`).

    The distance is L1. A report is C words.
    """

    def init(key: Key, data: FederatedData) -> tuple[()]:
        check_classes(data, "represent=labels", OTHERS)
        return ()

    return Representation(
        init,
        lambda shared, data, who: train_label_shares(data),
        l1,
        lambda shared, clients: no_bill(),
    )


def embedding(
    units: PositiveInt = 64,
    images_per_class: PositiveInt = 200,
    epochs: PositiveInt = 300,
    lr: float = 0.05,
) -> MakeRepresentation:
    """Represents a client by the mean activation [units] of a small network's hidden layer
    over its training samples. The distance is squared Euclidean.

    The network has one hidden layer. It is trained at the start on `images_per_class`
    random samples of each class, for `epochs` full passes, and then stored by all clients.
    A report is `units` words.
    """

    def init(key: Key, data: FederatedData) -> Any:
        x, y, weight = draw_per_class(key, data, images_per_class)
        size = int(np.prod(x.shape[1:]))
        initial = {
            "hidden": jax.random.normal(key, (size, units)) * np.sqrt(2 / size),
            "hidden_bias": jnp.zeros(units),
            "out": jnp.zeros((units, data.num_classes)),
            "out_bias": jnp.zeros(data.num_classes),
        }

        def losses(network: Any) -> jax.Array:
            logits = hidden_layer(network, x) @ network["out"] + network["out_bias"]
            return cross_entropy(logits, y)

        return descend(losses, initial, weight, epochs, lr)

    def send_network(shared: Any, clients: int) -> Bill:
        words = sum(leaf.size for leaf in jax.tree.leaves(shared))
        return make_bill(words_down=jnp.full(clients, words))

    def make(task: Task, local: Local) -> Representation:
        def client_mean(client, data, shared, work):
            def add(total, x, y, owner, number):
                seen = jnp.where((owner >= 0)[:, None], hidden_layer(shared, x), 0.0)
                return total + jnp.sum(seen, axis=0)

            return pass_over_samples(client, data, jnp.zeros(units), add, mean_over_samples)

        return Representation(
            init,
            lambda shared, data, who: map_clients(client_mean, local.execution, shared, data, who),
            squared_euclidean,
            send_network,
            inferences=1,
        )

    return make


def hidden_layer(network: Any, x: jax.Array) -> jax.Array:
    """Returns the activations [B, units] of a small network on samples [B, ...]."""
    flat = as_float(x).reshape(len(x), -1)
    return jax.nn.relu(flat @ network["hidden"] + network["hidden_bias"])


def descend(
    losses: Callable[[Any], jax.Array], initial: Any, weight: jax.Array, epochs: int, lr: float
) -> Any:
    """Returns parameters after `epochs` gradient steps on the weighted mean of `losses`.

    Args: `losses` gives the loss [n] of each sample for parameters like `initial`; `weight` [n]
    >= 0 is how much each sample counts; `lr` is the step size.
    """

    def loss(network: Any) -> jax.Array:
        return jnp.sum(weight * losses(network)) / jnp.maximum(weight.sum(), 1)

    def step(_: Any, network: Any) -> Any:
        return jax.tree.map(lambda p, g: p - lr * g, network, jax.grad(loss)(network))

    return lax.fori_loop(0, epochs, step, initial)


def gradient(
    length: PositiveInt = 256,
    images_per_class: PositiveInt = 200,
    epochs: NaturalInt = 300,
    lr: float = 0.05,
) -> MakeRepresentation:
    """Represents a client by the direction [length] of the gradient of its mean loss at a
    frozen model that all clients store.

    The model is trained at the start as that of `embedding` is; with 0 `epochs` it is random,
    and gradients then reflect the labels more than the model's errors. A gradient is scaled to
    norm 1, so that squared distances are 2 - 2 cos, and projected. A report costs a whole
    model. Differs from a Gaussian projection: every coordinate is added to one random place
    with a random sign, which keeps inner products in the mean at the cost of one pass.
    """

    def make(task: Task, local: Local) -> Representation:
        def client_direction(solve, client, data, shared, work):
            def direction(upload):
                leaves = jax.tree.leaves(drop_statistics(upload.delta))
                flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
                norm = jnp.sqrt(jnp.sum(jnp.square(flat)))
                unit = jnp.where(norm > 0, -flat / jnp.where(norm > 0, norm, 1), 0)
                return project(unit, length)

            return map_result(solve(client, data, (jax.random.key(0), shared), work), direction)

        def compute(shared: Any, data: FederatedData, who: jax.Array) -> jax.Array:
            of_client = Partial(client_direction, gradient_step(task, local))
            return map_clients(of_client, local.execution, shared, data, who)

        def init(key: Key, data: FederatedData) -> Any:
            starting, drawing = jax.random.split(key)
            model = task.init(starting)
            if epochs:
                x, y, weight = draw_per_class(drawing, data, images_per_class)
                model = descend(lambda p: task.loss(p, x, y, None), model, weight, epochs, lr)
            return jax.tree.map(lambda leaf: leaf[None], model)

        return Representation(
            init,
            compute,
            squared_euclidean,
            lambda shared, clients: make_bill(units_down=jnp.ones(clients)),
            lambda who, length: make_bill(units_up=who),
            inferences=TRAIN_TO_INFERENCE,
        )

    return make


def with_false_reports(representation: Representation, fraction: Fraction) -> Representation:
    """Lets a random `fraction` of the clients permute the numbers of every report, each in an
    order of its own (malicious registrations; Fielding, section 3.3). They train honestly.
    """

    def init(key: Key, data: FederatedData) -> Any:
        own, false = jax.random.split(key)
        shared = representation.init(own, data)
        all_clients = jnp.ones(data.num_clients, bool)
        points = jax.eval_shape(representation.compute, shared, data, all_clients)
        return shared, draw_false_orders(false, data.num_clients, points.shape[1], fraction)

    def compute(shared: Any, data: FederatedData, who: jax.Array) -> jax.Array:
        own, orders = shared
        return report_falsely(representation.compute(own, data, who), orders)

    return representation._replace(
        init=init,
        compute=compute,
        setup=lambda shared, clients: representation.setup(shared[0], clients),
    )


def project(vector: jax.Array, length: int) -> jax.Array:
    """Returns a fixed random projection [length] of a vector [P]: each coordinate is added
    to a random place with a random sign (Charikar, Chen, Farach-Colton 2002).
    """
    place, sign = jax.random.split(jax.random.key(length))
    where = jax.random.randint(place, vector.shape, 0, length)
    signs = jax.random.rademacher(sign, vector.shape, vector.dtype)
    return jnp.zeros(length, vector.dtype).at[where].add(signs * vector)


def draw_per_class(
    key: Key, data: FederatedData, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (x, y, weight) [C * count, ...] of random visible training samples of each class,
    weight 0 where a class has fewer.
    """
    check_classes(data, "represent=embedding", OTHERS)
    rows = data.train.order
    held = data.owner[rows] >= 0
    draws = jax.random.uniform(key, rows.shape)

    def of_class(c: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_c = held & (data.y[rows] == c)
        best, place = lax.top_k(jnp.where(is_c, draws, -1.0), min(count, rows.size))
        return rows[place], (best >= 0).astype(jnp.float32)

    drawn, weight = lax.map(of_class, jnp.arange(data.num_classes))
    return *gather(data, drawn.reshape(-1)), weight.reshape(-1)
