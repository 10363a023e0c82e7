"""Sets of XLA's options that overlap collectives with work, and the one that each chip and engine gets by itself."""

from collections.abc import Mapping
from typing import Literal

from dtrain.core.chips import Chip

Options = Mapping[str, bool | int | str]
Overlap = Literal["auto", "none", "products", "kernels", "sparsecore"]

VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""KiB of the cores' memory that one operation may take; 16 MiB by default."""

PRODUCTS: Options = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
    "xla_enable_async_reduce_scatter_fusion": True,
}
"""Collectives run beside matrix products."""

WITH_KERNELS = "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call"
KERNELS: Options = {**PRODUCTS, WITH_KERNELS: True}
"""Collectives run beside matrix products and kernels, such as attention and the products of experts."""

ALL_REDUCE = "xla_tpu_enable_sparse_core_collective_offload_all_reduce"
SPARSECORE: Options = {
    **KERNELS,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    ALL_REDUCE: True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    VMEM: 32 * 1024,
}
"""The same, with collectives on the SparseCores, where reduce-scatters run beside the step; Google's recipes for v5p
and later have these options. An operation may take more of the cores' memory (VMEM, in Google's recipes for v6e 96
MiB): with the compiler's 16 MiB some products with a gather beside them do not compile."""

TPU: Mapping[Overlap, Options] = {"none": {}, "products": PRODUCTS, "kernels": KERNELS, "sparsecore": SPARSECORE}

SCHEDULED = "xla_gpu_enable_latency_hiding_scheduler"
"""XLA runs collectives beside work on H100 and later by itself, on A100 only with this option."""


def resolved(overlap: Overlap, platform: str, chip: Chip | None) -> Overlap:
    """What is done on this hardware; "none" on all but TPUs. `auto` was replaced before, by the engine."""
    if platform != "tpu":
        return "none"
    if overlap == "sparsecore":
        return "sparsecore" if chip and chip.sparse_offload else "kernels"
    return overlap
