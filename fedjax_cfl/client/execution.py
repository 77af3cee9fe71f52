"""Where clients are trained, and by whom: devices, executor, lanes."""

from typing import Literal, NamedTuple

from jax.sharding import Mesh

from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import is_cpu, make_mesh
from fedjax_cfl.validation import PositiveInt, checked

LANES = 64  # of an accelerator, unless chosen for the data (`simulation.width`)


class Execution(NamedTuple):
    """Where clients are trained, and by whom. `make_execution` chooses for the machine."""

    mesh: Mesh
    # who runs the clients: sequential (one after another) | lanes (side by side) | debug (a Python
    # loop, outside of `jit`)
    executor: Literal["sequential", "lanes", "debug"]
    width: int  # lanes: clients side by side on one device; 1 unless the executor is lanes
    # how a dense first layer is trained: direct | dual (in sample space) | auto (the cheaper one,
    # for each client)
    first_layer: Literal["auto", "direct", "dual"]
    # under `vmap` over runs, the cohorts of all runs are trained as one, see `cohort`
    runs_as_one: bool = False


@checked("local")
def make_execution(
    mesh: Mesh | None = None,
    width: PositiveInt | None = None,
    executor: Literal["auto", "sequential", "lanes", "debug"] = "auto",
    first_layer: Literal["auto", "direct", "dual"] = "auto",
) -> Execution:
    """Chooses where clients are trained: what is not given is chosen for the machine.

    Args: `mesh` of None: every device that JAX shows; `width` of None: 1 on a CPU, `LANES` on an
    accelerator; `executor` of auto: sequential with a width of 1, else lanes.
    Raises InputError for a value that is not allowed, and for two that contradict each other.
    """
    mesh = mesh or make_mesh()
    lanes = width or (1 if is_cpu(mesh) and executor != "lanes" else LANES)
    if executor == "auto":
        executor = "sequential" if lanes == 1 else "lanes"
    if executor == "debug" and mesh.size > 1:
        raise InputError(
            f"local.executor=debug: needs one device, there are {mesh.size}; use"
            " mesh=fedjax_cfl.make_mesh(1)"
        )
    if executor != "lanes" and (width or 1) > 1:
        raise InputError(
            f"local.width={width}: executor={executor} runs one client at a time; use width=1, or"
            " executor=lanes"
        )
    return Execution(mesh, executor, lanes if executor == "lanes" else 1, first_layer)
