"""How clients train: the settings of local work, and what each client is asked to do."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_cfl.round.faults import Faults
from fedjax_cfl.sharding import is_cpu, make_mesh
from fedjax_cfl.validation import BelowOne, Epochs, PositiveFloat, PositiveInt, check_arguments

MAX_WIDTH = 4096  # clients side by side, unless more are asked for


class Local(NamedTuple):
    """How clients train: plain SGD over reshuffled epochs; and how they fail."""

    lr: PositiveFloat | jax.Array  # step size
    epochs: Epochs  # E, passes over the client's samples
    batch_size: PositiveInt  # B; the short last batch is kept
    width: PositiveInt | None = (
        # most clients trained side by side on one device; None: 1 on a CPU, on an accelerator
        # all of its share
        None
    )
    mesh: jax.sharding.Mesh | None = None  # None: every device JAX shows
    faults: Faults = Faults()
    # how a dense first layer is trained: direct | dual (in sample space) | auto: per client the
    # cheaper
    first_layer: Literal["auto", "direct", "dual"] = "auto"
    momentum: BelowOne = (
        0.0  # v <- momentum v + gradient, w <- w - lr v; v begins at 0 in every round
    )
    vmap_runs: bool = (
        False  # True: under `vmap`, the cohorts of all members are trained as one, see `members`
    )

    def resolve(self) -> "Local":
        """Returns the same with mesh, width and first layer settled for the machine.
        Raises InputError for what is not allowed.

        Side by side, sample space would be padded to the largest client, so that there
        auto is direct.
        """
        check_arguments(Local, self._asdict(), "local")
        mesh = self.mesh or make_mesh()
        width = self.width or (1 if is_cpu(mesh) else MAX_WIDTH)
        return self._replace(
            mesh=mesh,
            width=width,
            first_layer="direct" if self.first_layer == "auto" and width > 1 else self.first_layer,
        )


class Work(NamedTuple):
    """What each client of a cohort is asked to do."""

    group: jax.Array  # [S] int32, the model it starts from
    step_fraction: jax.Array  # [S] float32, the share of its local steps that it completes
    client_extra: Any = ()  # [S, ...], what `prepare` computed for it


def full_work(group) -> Work:
    """Returns work without anything extra, all of it completed."""
    return Work(group, jnp.ones(group.shape))
