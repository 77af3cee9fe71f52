"""Devices that nobody has, which the compilers of TPUs and GPUs compile for all the same."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}  # there is no chip to ask
os.environ |= {"TPU_MIN_LOG_LEVEL": "4", "TPU_STDERR_LOG_LEVEL": "4"}
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several may compile: there is no chip to share

import jax
from jax.experimental import topologies

import fedjax_cfl as cfl
from fedjax_cfl.sharding import mesh_over
from fedjax_cfl.simulation import memory

GIB = 2**30
CHIP_BYTES = {"v5e": 16 * GIB, "v4": 16 * GIB, "h100": 79 * GIB}  # of a device; a v4 chip is two
# What XLA's compiler asks a GPU for: an H100 as NVIDIA specifies it, CUDA 12.8, cuDNN 9.8.
H100 = """
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
"""


def make_topology_mesh(name: str) -> jax.sharding.Mesh:
    """Returns the mesh over the devices of a topology, as v5e:2x2 or h100:8, that nobody has."""
    kind, _, size = name.partition(":")
    if kind == "h100":
        given = {"target_config": H100, "topology": f"1x1x{size}"}
        found = topologies.get_topology_desc(platform="cuda", **given)
    else:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return mesh_over(found.devices)


def compile_without_gpu() -> None:
    """Lets XLA compile for a GPU where there is none, before JAX starts."""
    # untuned, some products of XLA's own cannot be tiled: those of cuBLAS always can
    flags = ["--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"]
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    except ModuleNotFoundError:
        spec = None
    if spec and spec.submodule_search_locations:
        flags.append(f"--xla_gpu_cuda_data_dir={spec.submodule_search_locations[0]}")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


@contextlib.contextmanager
def act_as_device(mesh: jax.sharding.Mesh, chip_bytes: int) -> Iterator[None]:
    """Makes the package choose what it would choose on these chips: its devices, its
    convolutions, its width by the memory of a chip.
    """
    backend = "tpu" if mesh.devices.flat[0].platform == "tpu" else "gpu"
    with (
        mock.patch.object(cfl, "make_mesh", lambda devices=None: mesh),
        mock.patch.object(cfl, "use_cpu_cores", lambda count=None: None),
        mock.patch.object(jax, "default_backend", lambda: backend),
        mock.patch.object(memory, "available_bytes", lambda mesh: chip_bytes),
    ):
        yield
