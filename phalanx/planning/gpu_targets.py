"""Descriptions of GPUs that let XLA compile for them on machines without GPUs.

XLA takes a `GpuTargetConfigProto` as text. The figures of the H200 were recorded on an H200 (`--xla_dump_to` writes
them); the others are from NVIDIA. https://openxla.org/xla/gpu_aot_compilation
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """Specification of a GPU.

    Attributes:
        name: Name that its driver reports.
        compute_capability: Major and minor version.
        cores: Number of multiprocessors.
        fpus: Float32 units per multiprocessor.
        shared_memory_bytes: Shared memory per multiprocessor.
        l2_bytes: Size of the L2 cache.
        memory_bytes, memory_bytes_per_s: Size and bandwidth of the device's memory.
        clock_ghz: Clock rate of the multiprocessors.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int
    fpus: int
    shared_memory_bytes: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_s: int
    clock_ghz: float

    def as_text(self) -> str:
        """Return the `GpuTargetConfigProto` of this GPU."""
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_bytes}
  shared_memory_per_block_optin: {self.shared_memory_bytes - 1024}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bytes_per_s}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 19 }}
device_description_str: "{self.name}"
"""


A100 = GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167_936, 41_943_040, 85_094_825_984, 2_039_000_000_000, 1.41)
H100 = GpuTarget(
    "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233_472, 52_428_800, 85_017_493_504, 3_352_320_000_000, 1.98
)
H200 = GpuTarget("NVIDIA H200", (9, 0), 132, 128, 233_472, 62_914_560, 150_109_880_320, 4_814_304_000_000, 1.98)
