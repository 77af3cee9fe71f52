"""How programs are compiled: side by side, quickly where nothing is lost, and once for all
runs of a user.
"""

import contextlib
import hashlib
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import platformdirs
from jax.sharding import Mesh

from fedjax_cfl.errors import InputError, warn_of_file
from fedjax_cfl.types import Task

# XLA's older emitters of CPU kernels compile in half the time. Training behind a dense first
# layer of 784 x 128 is 10 to 14 % slower with them, training of convolutions a quarter faster.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
# A GPU runs a loop by itself, as one recorded graph, in place of asking the host after each step
# and for each kernel: two to eight times as fast with 20 clients a round, by the host.
COMMAND_BUFFERS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
    ),
    "xla_gpu_graph_min_graph_size": 1,
}
SMALL_KERNEL = 4096  # parameters: a first layer's, which train in less time than compiling saves
CACHE_HIT = "/jax/compilation_cache/cache_hits"
AUTOTUNING = "xla_gpu_per_fusion_autotune_cache_dir"
CACHE_SECONDS = 0.1  # what took less to compile is not kept


# what random draws and types depend on; other generators draw other numbers in a grid than alone
JAX_SETTINGS = {
    "jax_enable_x64": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    # these do not compile, or stop at a number that the run counts and leaves out
    "jax_disable_jit": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
}


@contextlib.contextmanager
def parallel_compiler() -> Iterator[Callable[..., Future]]:
    """Yields f(lowered, options) -> the future of the compiled program. Programs compile side
    by side and while the next is traced, because XLA uses few cores for one program.

    Several hosts compile one after another, all in the same order.
    """
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else None) as pool:
        yield lambda lowered, options: pool.submit(lowered.compile, options)


@contextlib.contextmanager
def count_cache_hits() -> Iterator[Callable[[], int]]:
    """Yields a function that returns how many programs have been read from the user's cache
    since, instead of being compiled.
    """
    hits = []

    def listen(event: str, **_: object) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield lambda: len(hits)
    finally:
        jax.monitoring.unregister_event_listener(listen)


@contextlib.contextmanager
def explain_cache() -> Iterator[None]:
    """Says in one line that the user's cache cannot be used, where JAX warns of each program: XLA
    refuses programs of another processor, or the disk is full.
    """
    show = warnings.showwarning

    def say(message: Warning | str, *rest: Any, **more: Any) -> None:
        if "persistent compilation cache" not in str(message):
            return show(message, *rest, **more)
        folder = find_compile_cache()
        warn_of_file(
            f"{folder}: programs in it cannot be used here, so they are compiled again; remove it"
        )

    warnings.showwarning = say
    try:
        yield
    finally:
        warnings.showwarning = show


def compiler_options(mesh: Mesh, task: Task | None = None) -> dict[str, bool | int | str]:
    """Returns the options that a program is compiled with; of a training program, if its
    `task` is given.

    They do not depend on the length of a run, so that an extended run goes on with the
    same numbers. What XLA_FLAGS names stays as it says there.
    """
    device, flags = mesh.devices.flat[0], os.environ.get("XLA_FLAGS", "")
    found: dict[str, bool | int | str] = {}
    if device.platform in ("gpu", "cuda") and "NVIDIA" in device.device_kind:
        found = COMMAND_BUFFERS
    elif device.platform == "cpu" and jaxlib.version.__version__.startswith("0.10."):
        # later versions have only one kind of emitter
        large = task and task.first_layer and math.prod(task.first_layer.shape) > SMALL_KERNEL
        found = {} if large else QUICK
    return {name: value for name, value in found.items() if name not in flags}


def check_jax_settings() -> None:
    """Raises InputError where JAX would draw or compute other numbers than a run does: what an
    environment variable changes is in no setting, and a run that goes on would mix both.
    """
    for name, value in JAX_SETTINGS.items():
        found = getattr(jax.config, name)
        if found != value:
            raise InputError(
                f"{name.upper()}={found}: runs need {value}, which JAX has by default; unset it"
            )


def find_compile_cache() -> Path:
    """Returns the folder of compiled programs in the user's cache, one for each kind of
    processor and version of jaxlib.
    """
    try:
        flags = next(
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    kind = hashlib.sha256(f"{jaxlib.version.__version__} {flags}".encode()).hexdigest()[:12]
    cache = Path(platformdirs.user_cache_dir("fedjax_cfl"))
    return cache / "compiled" / f"{platform.machine()}-{kind}"


def use_compile_cache() -> None:
    """Keeps compiled programs in `find_compile_cache`, readable by no other user. What XLA measured
    of a GPU's kernels to choose between them is kept there, too.
    """
    folder = find_compile_cache()
    with contextlib.suppress(OSError):  # without a home, programs are compiled every time
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES" not in os.environ:
            jax.config.update("jax_persistent_cache_enable_xla_caches", AUTOTUNING)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_SECONDS)
