"""Data types and axis letters: read this file first.

Axis letters of shape comments: K clients, S cohort slots (clients of one round, padded), m groups
(static maximum), P parameters, N samples, B batch, C classes (of a regression 1, its output), T
labels a sample. What another letter stands for is said where it is used. A pytree with a leading
axis is written like an array: `groups [m, ...]` is a parameter pytree whose every leaf has a
leading axis m.

What a compiled round carries or edits is a frozen dataclass that changes by `.replace`; the rest,
as functions that travel together, are NamedTuples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from fedjax_cfl.tasks import CLASSIFICATION, Targets

Key = jax.Array
Params = Any  # a pytree of float arrays


class FirstLayer(NamedTuple):
    """What SGD in sample space needs of a model whose first layer is dense, and is the only
    one that gets the sample, flattened.
    """

    name: str  # params[name]["kernel"] is [F, H]
    shape: tuple[int, int]  # (F, H)
    l2: float  # weight of its kernel's squared norm in the loss
    # (x [B, ...]) -> [B, F], what the kernel is multiplied with
    inputs: Callable[..., jax.Array]
    # (params without the kernel, inputs @ kernel [B, H], y [B], key) -> [B], without L2
    loss: Callable[..., jax.Array]
    penalty: Callable[[Params], ArrayLike]  # (params without the kernel) -> [], their L2


class Task(NamedTuple):
    """A supervised problem: all that an algorithm knows of Flax.

    `owner` [B] int32 says whose sample each is, -1 for padding, None: all are one
    client's. Only a model that normalises over a batch reads it.
    """

    init: Callable[[Key], Params]  # random initial parameters
    # (params, x [B, ...], y [B], key or None, owner [B] = None) -> [B]: that of `targets`, as
    # cross-entropy, + L2; dropout only with a key
    loss: Callable[..., jax.Array]
    # (params, x [B, ...], owner [B] = None) -> [B, C] logits, [B, 1] numbers, or [B, T] logits of
    # labels; no dropout
    predict: Callable[..., jax.Array]
    # `loss` without its part that depends on the model alone, and that part: (params) -> []. None:
    # there is none
    sample_loss: Callable[..., jax.Array] | None = None
    penalty: Callable[[Params], ArrayLike] | None = None
    first_layer: FirstLayer | None = None  # None: not dense, or not known to be
    targets: Targets = CLASSIFICATION  # what y are, see `tasks`


class Pool(NamedTuple):
    """Labelled samples on the host, before clients hold them."""

    # [N, ...] uint8 (read as x / 255) or float32; [N, F] also float64, where float32 rounds it
    x: np.ndarray
    # [N] int32, 0 .. num_classes - 1; without classes float32, [N] any numbers or [N, T] labels
    y: np.ndarray
    num_classes: int  # C; 0: there are no classes, y are numbers to regress, or labels, 0 or 1
    # [N] int32, the natural owner of each sample, where the source names one
    client: np.ndarray | None = None
    # [N] bool, True in the source's own test split, where it has one
    test: np.ndarray | None = None
    client_names: tuple[str | int, ...] | None = None  # [K] as the source has it, None: numbers
    # [K] int32, the true group of each natural owner; [T, K]: in each stage, which `time` names
    concept: np.ndarray | None = None
    source: np.ndarray | None = None  # [N] int32, where each sample is from, if from several
    # [N] int32, when each sample came into being, in units of the source; None: not known
    time: np.ndarray | None = None
    # of class 0, 1, ... as the source has them, for as many as have samples; None: numbers
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None  # of features [F], as a table has them; None: no names


class Partition(NamedTuple):
    """Which client has which sample of a pool. Several clients may have the same sample."""

    sample: np.ndarray  # [N] int64, index into the pool
    owner: np.ndarray  # [N] int32, client 0 .. K - 1
    test: np.ndarray  # [N] bool, True for test samples
    # [K] int32, the true group of each client; [T, K]: in each stage
    concept: np.ndarray | None = None
    client_names: tuple[str | int, ...] | None = None  # [K] as the source gives them
    turns: np.ndarray | None = None  # [N] int32, quarter turns with which a sample is read
    labels: np.ndarray | None = None  # [N] int32, as clients see them; None: those of the pool
    shared: np.ndarray | None = None  # [N] bool, True for copies that the server gave out
    # [N] bool, True for samples that nobody trains on, to choose a round by; None: there are none
    validation: np.ndarray | None = None


class ClientIndex(struct.PyTreeNode):
    """Sample indices grouped by client (CSR): client k has order[start[k] : start[k] +
    size[k]].
    """

    order: jax.Array  # [N] int32, numbers of holdings, grouped by client
    start: jax.Array  # [K] int32
    size: jax.Array  # [K] int32


class SourceNames:
    """Names of clients [K] or features [F], as their source gives them. No program depends on
    them: all of them count as equal, so that nothing is compiled again for other names.
    """

    def __init__(self, names: tuple[str | int, ...]):
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceNames)

    def __hash__(self) -> int:
        return 0


class ExactSamples:
    """Samples x [rows, F] float64 as their source gives them. No program depends on them, as on
    `SourceNames`.
    """

    def __init__(self, x: np.ndarray):
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactSamples)

    def __hash__(self) -> int:
        return 0


class FederatedData(struct.PyTreeNode):
    """A pool of samples x, and N holdings: which client holds which sample, with which label.

    A sample that several clients hold is stored once. Nothing is padded.
    """

    x: jax.Array  # [rows, ...] uint8 (read as x / 255) or float32
    y: jax.Array  # [N] the label of each holding, int32, or a number to regress, float32
    owner: jax.Array  # [N] int32, -1 = not visible
    train: ClientIndex
    test: ClientIndex
    concept: jax.Array  # [K] int32, ground-truth group, -1 where unknown
    shifted: jax.Array  # [K] bool, the client's data changed at the start of this round
    num_classes: int = struct.field(pytree_node=False)  # C; 0: y are numbers or labels
    # the most training samples that one client may ever hold
    max_client_samples: int = struct.field(pytree_node=False)
    # False: no client's samples ever change
    has_drift: bool = struct.field(pytree_node=False, default=True)
    # [N] int32, the row of x that each holding is; None: row n is holding n
    sample: jax.Array | None = None
    # [N] int32, quarter turns with which each holding is read; None: nothing is turned
    turns: jax.Array | None = None
    # [N] int32, when each holding came into being, -1: before the run, and it never leaves;
    # None: not known
    time: jax.Array | None = None
    # [T, K] int32, ground-truth groups in stage 0, 1, ..., which `time` names; None: no stages
    concepts: jax.Array | None = None
    # samples to choose a round by, as `test`; they do not drift; None: there are none
    validation: ClientIndex | None = None
    # what the source calls its clients; None: their numbers
    client_names: SourceNames | None = struct.field(pytree_node=False, default=None)
    # what the source calls class 0, 1, ...; None: their numbers
    class_names: tuple[str, ...] | None = struct.field(pytree_node=False, default=None)
    # x before it became float32, which `standardize` reads; None: as good as x
    exact: ExactSamples | None = struct.field(pytree_node=False, default=None)
    # what the source calls its features [F]; None: it has no names for them
    columns: SourceNames | None = struct.field(pytree_node=False, default=None)
    # the source has x as uint8, which are read as x / 255
    pixels: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_clients(self) -> int:
        """K, static."""
        return self.train.size.shape[0]


class Cohort(struct.PyTreeNode):
    """The clients of one round, in the slots in which they are trained."""

    ids: jax.Array  # [S] int32, K in an empty slot
    rank: jax.Array  # [S] int32, position in the order of selection

    def take(self, table: Any) -> Any:
        """Returns the rows [S, ...] of its clients of a `table` [K, ...], an array or a pytree;
        an empty slot gets the last row.
        """
        return jax.tree.map(lambda leaf: leaf[jnp.minimum(self.ids, len(leaf) - 1)], table)

    def keep(self, who: jax.Array, num_clients: int) -> "Cohort":
        """Returns the cohort with the slots of clients that are not in `who` [S] bool empty."""
        return self.replace(ids=jnp.where(who, self.ids, num_clients))

    def put(self, table: jax.Array, rows: ArrayLike, where: jax.Array | None = None) -> jax.Array:
        """Returns the `table` [K, ...] with the `rows` [S, ...] of its clients written into it;
        those of empty slots are dropped, and those of slots that are not in `where` [S] bool.
        """
        ids = self.ids if where is None else jnp.where(where, self.ids, len(table))
        return table.at[ids].set(rows, mode="drop")


class Work(NamedTuple):
    """The work of each client of a cohort."""

    group: jax.Array  # [S] int32, the model it starts from
    step_fraction: jax.Array  # [S] float32, the share of its local steps that it completes
    lr_scale: jax.Array  # [S] float32, the factor of its step size
    client_extra: Any = ()  # [S, ...], what `prepare` computed for each client
    rows: dict[str, Any] = {}  # noqa: RUF012, by layer, [S, ...], what each client keeps


class Upload(struct.PyTreeNode):
    """What the cohort sends back."""

    # [S, ...], trained minus start, 0 in an empty slot; [S, m, ...] where clients train all models
    delta: Params
    weight: jax.Array  # [S] float32, training samples, 0 in an empty slot
    loss: jax.Array  # [S] float32, mean training loss over the first local epoch
    last_loss: jax.Array  # [S] float32, the same over the last local epoch
    steps: jax.Array  # [S] int32, local SGD steps taken, of models of clients' own, too
    # [S] int32, the group whose model was trained from, 0 where nothing was
    start_group: jax.Array
    squared_norm: Any = None  # [S] float32, ||delta||^2, set by `faults.guard_nonfinite`
    # [S, ...], what the method's clients send in addition: finite numbers, 0 in the slots of
    # updates that are not used
    extra: Any = ()
    rows: dict[str, Any] = struct.field(default_factory=dict)  # by layer, what each client keeps
    model_steps: Any = None  # [S] int32, steps of the group's model alone, where clients do SGD
    inferred: Any = None  # [S] int32, samples that other models predicted meanwhile, None: 0


class FaultCounts(struct.PyTreeNode):
    """What went wrong in a round; of each client [S] before it is added up."""

    # [] int32, clients that trained but never answered, or were offline before they could
    dropped: jax.Array
    # [] int32, clients whose update, what they sent in addition or what a layer keeps of them was
    # not finite
    nonfinite: jax.Array
    byzantine: jax.Array  # [] int32, clients that attacked
    # [2] int32, the first client with an update that was not finite and the number of the leaf,
    # that after the last leaf for `Upload.extra`; -1 if none
    first_nonfinite: jax.Array


class Bill(struct.PyTreeNode):
    """What each of n payers receives, sends and infers: whole models (unit u = one model), 4-byte
    words of everything else, and samples, of which one that is trained on counts as
    `clock.TRAIN_TO_INFERENCE`. Payers are the slots [S] of a cohort, all clients [K], or, before
    round 0, any number; n = 0: nobody pays.
    """

    units_down: jax.Array  # [n] int32
    units_up: jax.Array  # [n] int32
    words_down: jax.Array  # [n] int32
    words_up: jax.Array  # [n] int32
    samples: jax.Array  # [n] float32


class Traffic(struct.PyTreeNode):
    """All units and words of a run so far. A count is two uint32, (high, low): exact up to 2^64,
    see `system/reports.py`.
    """

    units_down: jax.Array  # [2] uint32
    units_up: jax.Array  # [2] uint32
    words_down: jax.Array  # [2] uint32
    words_up: jax.Array  # [2] uint32


class Report(struct.PyTreeNode):
    """What was sent and inferred, and what went wrong, in one step of a round or at the start.

    What a slot of a cohort sends up by `bill` goes with its update: it is not counted if that does
    not arrive.
    """

    bill: Bill  # of all clients [K] before the selection, of the slots [S] after it
    # the same, of what is sent up before training, and arrives whatever happens to the update
    early: Bill
    migrated: jax.Array  # [] int32, clients that changed group
    reclustered: jax.Array  # [] int32, how often all clients were clustered again
    fault_counts: FaultCounts


class Rows(struct.PyTreeNode):
    """What each client keeps, of one layer."""

    values: Any  # [K, ...]
    trained: jax.Array  # [K] bool, False: not yet, so that the client uses its group's model
    # [K] int32, the group that each row is about, -1: none; () where rows are about clients alone
    group: Any = ()
    # [K] int32, where each client's row is, if there are those of some clients alone; (): row k is
    # client k's
    place: Any = ()


class State(struct.PyTreeNode):
    """Everything that a run carries from round to round.

    A checkpoint is this and `rounds.DataState`; the key comes from the seed.
    """

    round: jax.Array  # [] int32, rounds finished
    groups: Params  # [m, ...]
    server: Any  # [m, ...], the server optimizer's state of each group
    active: jax.Array  # [m] bool
    assignment: jax.Array  # [K] int32, -1: the client has no group yet
    traffic: Traffic  # everything sent so far
    memory: Any  # what the method remembers, () if nothing; no axis of it is of clients
    selection: Any  # what the selection remembers, () if nothing
    # [2] uint32 (high, low), simulated milliseconds so far; [m, 2] with a clock for each group
    clock_ms: jax.Array
    start_faults: FaultCounts  # what went wrong at the start; the first round reports it
    # by name, what there is of each client beside its group: `Rows` of each layer, and pytrees
    # [K, ...] of the method
    rows: dict[str, Any] = struct.field(default_factory=dict)

    def put_rows(self, rows: dict[str, Any]) -> "State":
        """Returns the state with the `rows` of some names changed."""
        return self.replace(rows={**self.rows, **rows})


class Info(struct.PyTreeNode):
    """What a round reports; nothing of it is carried. Means over clients, of all or of a
    group, are NaN where no update was used.
    """

    loss: jax.Array  # [] mean training loss of the cohort, first local epoch, weighted by samples
    last_loss: jax.Array  # [] the same, last local epoch
    # [] mean L2 distance of the trained models from their own group's new model
    discrepancy: jax.Array
    group_discrepancy: jax.Array  # [m]
    dissimilarity: jax.Array  # [] mean (1 - cos(delta, own group's step)) / 2
    selected: jax.Array  # [] int32, clients selected
    clients: jax.Array  # [] int32, clients whose update was used
    steps: jax.Array  # [2] uint32 (high, low), local SGD steps taken
    cold: jax.Array  # [] int32, clients of the cohort that had no group before
    shifted: jax.Array  # [] int32, clients whose data changed at the start of the round
    # [] int32, clients that changed group before the round, because their data or the centers
    # changed
    migrated: jax.Array
    reclustered: jax.Array  # [] int32, 1 if all clients were clustered again before the round
    fault_counts: FaultCounts
    # [] int32, groups with clients in the cohort but no usable update: their model stayed
    idle_groups: jax.Array
    late: jax.Array  # [] int32, clients whose answer came after the round had ended
    seconds: jax.Array  # [] float32, simulated duration of the round, 0 without a clock


class ServedModels(NamedTuple):
    """Which model each client would use now, or which mixture of all of them."""

    models: Params  # [M, ...]
    # [K] int32 into models, -1 = the client has none yet and is not evaluated. With `weights` it
    # names the heaviest one, for what is reported of groups
    model_index: jax.Array
    # [K, M] >= 0, rows sum to 1: a client predicts by the mean of the models' PROBABILITIES with
    # these weights; None: by its one model
    weights: jax.Array | None = None
    # [M, C] > 0, the shares of the labels that each model is for, by which a new client divides the
    # models' likelihoods when it finds its weights (FedRC); None: it does not
    label_shares: jax.Array | None = None


class Selection(NamedTuple):
    """Which clients take part in a round, and what is remembered of it from round to round."""

    init: Callable[[FederatedData], Any]  # (data) -> memory
    # (key, memory, state, data) -> ids [k] int32 without repeats, in order of selection; K in a
    # place that stays empty
    select: Callable[..., jax.Array]
    # (memory, state, cohort, upload, seconds [S] or None) -> memory, once the cohort has answered
    update: Callable[..., Any]
    # (key, round, size [K]) -> ids, where nothing is remembered, so that cohorts are known before
    # the run, by who has training samples
    draw: Callable[..., jax.Array] | None = None
    # (key, state, data) -> Bill [K] of what `select` of the same arguments makes clients do before
    # it selects; one that got a model trains that one if it is selected. None: nothing
    poll: Callable[..., Bill] | None = None


class Algorithm(NamedTuple):
    """THE contract. Its first three fields are pure functions that every method has; the rest
    says how a run treats them. `engine.federated` builds one from parts.
    """

    init: Callable[..., State]  # (key, data) -> state
    round: Callable[..., tuple[State, Info]]  # (key, state, data) -> (state, info)
    serve: Callable[..., ServedModels]  # (state) -> models and who uses which
    # True: a client is served a model only once it has a group
    clustered: bool = False
    # (key, round, size [K]) -> ids, whose samples a round (None: init) reads; None: any client's
    data_clients: Callable[..., jax.Array] | None = None
    # what the run does about updates that are not finite, see `faults.Faults`
    nonfinite: str = "skip"
    # names of the method's rows that hold a model of each client; devices split them
    split_rows: tuple[str, ...] = ()
    # (state, data, clients [n] or None: all) -> models [n, ...] that these clients are tested on
    # and use; None: those that `serve` serves
    personal_models: Callable[..., Params] | None = None
    # (state) -> by layer, the rows [m, ...] that clients of each group keep at the start, of layers
    # whose rows a round reads of its cohort alone. None: there are none
    first_rows: Callable[[State], dict[str, Any]] | None = None
    # (models or their shapes) -> the part of them that is sent; None: all
    sent_part: Callable[[Params], Params] | None = None
    # False: the method has no rule for clients that first take part after the start
    takes_newcomers: bool = True
    # (data) -> None; raises InputError for data that the method cannot use. None: it uses any
    check_data: Callable[[FederatedData], None] | None = None
