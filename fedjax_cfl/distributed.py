"""Several processes as one: each holds some of the devices, all compute the same run,
and process 0 alone reads and writes its files.
"""

import json
import os
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_cfl.errors import InputError


def connect(
    coordinator: str | None, processes: int | None = None, process: int | None = None
) -> None:
    """Joins the other processes of a run; call it before anything touches a device.

    `coordinator` None: this process is alone | auto: as the environment says (SLURM, a
    TPU pod, Open MPI, Kubernetes) | HOST:PORT of process 0, with the number of
    `processes` and which one this is. Raises InputError if they cannot be joined.
    """
    for name, value in (("processes", processes), ("process", process)):
        if coordinator is None and value is not None:
            raise InputError(f"{name}={value}: needs coordinator=HOST:PORT, of process 0")
    if coordinator is None or jax.distributed.is_initialized():
        return
    if coordinator != "auto" and (
        processes is None or process is None or not 0 <= process < processes
    ):
        raise InputError(
            f"coordinator={coordinator}: needs processes=N and process=0 .. N-1, not"
            f" processes={processes} process={process}"
        )
    address = (
        {}
        if coordinator == "auto"
        else {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
    )
    # it would take SIGTERM away from the run, which stops by itself
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**address)
    except (RuntimeError, ValueError) as error:
        hint = (
            "no cluster was found in the environment; name it, as coordinator=HOST:PORT processes=N"
            " process=I"
        )
        raise InputError(
            f"coordinator={coordinator}:"
            f" {hint if coordinator == 'auto' else str(error).splitlines()[0]}"
        ) from None


def is_primary() -> bool:
    """Returns whether this process reads and writes the files."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process. All processes must call it."""
    return (
        flag
        if jax.process_count() == 1
        else bool(multihost_utils.process_allgather(np.array(flag)).any())
    )


def broadcast_from_primary(tree: Any) -> Any:
    """Returns process 0's pytree of arrays; the others pass one of the same shapes."""
    if jax.process_count() == 1:
        return tree
    # one array at a time: those of one program may be exchanged in another order by another process
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.broadcast_one_to_all(leaf)), tree)


def gather_to_hosts(tree: Any) -> Any:
    """Returns a pytree of arrays in which those that are split over processes are whole, as
    NumPy arrays. All processes must call it.
    """
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(
        lambda leaf: (
            leaf
            if leaf.is_fully_addressable or leaf.is_fully_replicated
            else multihost_utils.process_allgather(leaf, tiled=True)
        ),
        tree,
    )


def check_same(settings: dict[str, Any]) -> None:
    """Raises InputError in every process unless all have the same settings, by name; it names
    the first that differs. All processes must call it.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(settings, default=str).encode()
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.frombuffer(text.ljust(int(sizes.max())), np.uint8)
    texts = multihost_utils.process_allgather(padded)
    each = [json.loads(np.asarray(text, np.uint8).tobytes()) for text in texts]
    for number, other in enumerate(each):
        for name in {**each[0], **other}:
            there, here = each[0].get(name, "absent"), other.get(name, "absent")
            if there != here:
                raise InputError(
                    f"{name}: {here} in process {number}, {there} in process 0; all processes of a"
                    " run need the same settings"
                )


def end_if_alone(error: Exception) -> None:
    """Ends this process at once, with one line and status 1, if the run has other processes: an
    error of a compiled program is taken as a sign that one of them has gone. Returns if there is
    no other process.

    Otherwise JAX would wait for the others, and then abort. Without process 0, which
    coordinates them, JAX aborts the others by itself, with a text of its own.
    """
    if jax.process_count() == 1:
        return
    reason = " ".join(str(error).split())[:160]
    print(
        "fedjax-cfl: another process of this run has ended or cannot be reached; start all of"
        f" them again to go on ({reason})",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
