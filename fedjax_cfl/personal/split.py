"""Models in two parts: one is a client's own and never sent, the other is its group's.

FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization
Layers", 2019, https://arxiv.org/abs/1912.00818: the last layers are a client's own.

LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act
Globally: Federated Learning with Local and Global Representations", 2020,
https://arxiv.org/abs/2001.01523: the first layers are, the last ones are shared.

FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021, https://arxiv.org/abs/2102.07078: the head is a client's own, and is
trained before the body.

FedBABU: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, https://arxiv.org/abs/2106.06042: the head stays as it was drawn, the same for all, until
clients are fine-tuned after the run.

FedBN: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, https://arxiv.org/abs/2102.07623: all normalisations are a client's own,
which describe its inputs. Differs from the authors' code, which finds them by names with "bn" in
them, and so shares those of shortcuts; and clients are weighed as the method below does.

FedPer, LG-FedAvg and FedBN train both parts at once. What is averaged, compared and counted in
bytes is the group's part; in the group's models the other part stays what it was at the start.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_cfl.client.cohort import ClientFn
from fedjax_cfl.client.local import Local
from fedjax_cfl.client.sgd import ClientInputs, add_change, change_training
from fedjax_cfl.client.steps import Step, StepChange
from fedjax_cfl.errors import InputError
from fedjax_cfl.method import Method
from fedjax_cfl.personal.layer import list_layers
from fedjax_cfl.tree import STATISTICS, put_part
from fedjax_cfl.types import Params, Task, Upload, Work
from fedjax_cfl.validation import PositiveInt, checked

Judge = Literal["template", "own"]


@checked("personal")
def fedper(*, layers: Sequence[str] = ("head",), judge: Judge = "template") -> Method:
    """FedPer: every client has `layers` of its own, by their names in the model's parameters.

    Where clients choose a group by the losses of its model, `judge` says what stands for the
    clients' own layers: template (those of the start, which are the same for all) | own (those of
    the client; trained with the layers of its present group, they make others look worse, so that
    clients stay). Raises InputError, when the method is built, for a layer that the model does not
    have, and if nothing is left to be sent.
    """
    return split_layers("FedPer", layers, lambda name: name in layers, judge)


@checked("personal")
def lg_fedavg(*, layers: Sequence[str] = ("head",), judge: Judge = "own") -> Method:
    """LG-FedAvg: clients share `layers`, by their names in the model's parameters, and have all
    others of their own. The models start as the method's own do, and not from a trained one as in
    the paper.

    `judge` is as in `fedper`. Raises InputError as `fedper` does.
    """
    return split_layers("LG-FedAvg", layers, lambda name: name not in layers, judge)


@checked("personal")
def fedbn(*, judge: Judge = "template") -> Method:
    """FedBN: every client has the normalisations of its own, with their running statistics: all
    modules of the model with a parameter `scale`, as Flax calls it, or with statistics.

    `judge` is as in `fedper`. Raises InputError, when the method is built, for a model that has
    none, or nothing else.
    """

    def check(task: Task) -> None:
        model = jax.eval_shape(task.init, jax.random.key(0))
        if len(flatten_dict(take_norms(model))) in (0, len(flatten_dict(model))):
            raise InputError(
                "personal=fedbn: some modules of the model must be normalisations, with a parameter"
                " named scale or running statistics, and some not; use another model, as"
                " resnet18_bn, or personal=fedper"
            )

    return split_models("FedBN", take_norms, check, judge)


def take_norms(model: Params) -> Params:
    """Returns the normalisations of a model, and all running statistics."""
    leaves = flatten_dict(model)
    norms = {path[:-1] for path in leaves if path[-1] == "scale"}
    norms |= {path[1:-1] for path in leaves if path[0] == STATISTICS}
    kept = {p: leaf for p, leaf in leaves.items() if p[0] == STATISTICS or p[:-1] in norms}
    return unflatten_dict(kept)


@checked("personal")
def fedrep(
    *, layers: Sequence[str] = ("head",), body_epochs: PositiveInt = 1, judge: Judge = "template"
) -> Method:
    """FedRep: every client has `layers` of its own. Of its local epochs the last `body_epochs`
    train the other layers alone, all before them the client's own alone.

    `judge` is as in `fedper`. Raises InputError as `fedper` does.
    """
    method = split_layers("FedRep", layers, lambda name: name in layers, judge)

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        if local.steps is None and local.epochs <= body_epochs:
            raise InputError(
                f"personal.body_epochs={body_epochs}: of local.epochs={local.epochs} none is left"
                " for the clients' own layers; use more epochs, or personal=fedbabu"
            )
        step = train_layers(layers, lambda c: c.epoch <= c.last_epoch - body_epochs)
        assert method.train is not None
        return method.train(task, local, add_change(solve, StepChange("FedRep", step=step)))

    return method._replace(train=train)


@checked("personal")
def fedbabu(*, layers: Sequence[str] = ("head",)) -> Method:
    """FedBABU: `layers` are never trained in the run, and the same for all clients and groups;
    `evaluate.finetune` epochs at its end make every client's own model. Raises InputError as
    `fedper` does.
    """
    method = split_layers("FedBABU", layers, lambda name: name in layers, "template")

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check_layers(task, layers, lambda name: name in layers)
        step = train_layers(layers, lambda c: jnp.zeros((), bool))
        return add_change(solve, StepChange("FedBABU", step=step))

    return method._replace(rows=None, train=train, serve=None)


def train_layers(layers: Sequence[str], holds: Callable[[Step], jax.Array]) -> Callable:
    """Returns the step of one client that trains `layers` where `holds`, a function of the step,
    gives true, [] bool, and all others elsewhere.
    """

    def step(c: Step, model: Params, own: Any) -> tuple[Params, Any]:
        trains_own = holds(c)
        moved = {
            name: jax.tree.map(
                partial(jnp.where, trains_own == (name in layers)), c.sgd[name], part
            )
            for name, part in model.items()
        }
        return moved, own

    return step


def split_layers(
    name: str, layers: Sequence[str], is_own: Callable[[str], bool], judge: Judge
) -> Method:
    """Returns the personal method in which the layers for which `is_own` holds are a client's."""

    def take_own(model: Params) -> Params:
        return {layer: leaf for layer, leaf in model.items() if is_own(layer)}

    check = partial(check_layers, layers=layers, is_own=is_own)
    return split_models(name, take_own, check, judge)


def split_models(
    name: str,
    take_own: Callable[[Params], Params],
    check: Callable[[Task], None],
    judge: Judge,
) -> Method:
    """Returns the personal method in which the part `take_own` of a model is a client's; `check`
    raises InputError for a model without both parts.
    """

    def merge(own: Params, model: Params) -> Params:
        return put_part(model, own)

    def leave_own(model: Params) -> Params:
        own, leaves = flatten_dict(take_own(model)), flatten_dict(model)
        return unflatten_dict({path: leaf for path, leaf in leaves.items() if path not in own})

    def begin(c: ClientInputs) -> tuple[Params, Work]:
        return merge(c.work.rows[name], c.model), c.work

    def keep(c: ClientInputs, model: Params, upload: Upload) -> Upload:
        own = take_own(upload.delta)
        unchanged = jax.tree.map(jnp.zeros_like, own)
        rows = {**upload.rows, name: jax.tree.map(jnp.add, c.work.rows[name], own)}
        return upload.replace(delta=merge(unchanged, upload.delta), rows=rows)

    def train(task: Task, local: Local, solve: ClientFn) -> ClientFn:
        check(task)
        return change_training(solve, keep, begin)

    return Method(
        name=name,
        rows=take_own,
        train=train,
        serve=merge,
        sent_part=leave_own,
        selection_model=merge if judge == "own" else None,
    )


def check_layers(task: Task, layers: Sequence[str], is_own: Callable[[str], bool]) -> None:
    """Raises InputError for a layer that the model does not have, and where all of the model is a
    client's own, or nothing.
    """
    names = list_layers(task, layers, "personal.layers")
    if len({is_own(name) for name in names}) == 1:
        raise InputError(
            f"personal.layers={list(layers)}: some layers of {', '.join(sorted(names))} must be the"
            " clients' own, and some shared; use algorithm=nonfed or personal=none for all of them"
        )
