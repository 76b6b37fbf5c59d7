"""What is read of the dumps of a TPU's compiler, and the slices that meshes of absent TPUs need."""

import pytest

from penelope_jax.experiments import aot_tpu

CALL = (
    '  ROOT %paged_attention.1 = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
    'backend_config={"flag_configs":[],"scoped_memory_configs":[{"memory_space":"1","offset":"64","size":"4096"}]}'
)
ALLOCATIONS = """
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'core index']
  #allocation2 [shape = 'u32[144,128]{1,0:T(1,128)}', space=vmem, size = 0x400, scoped, tag = 'internal scratch']
    #allocation4 [shape = 'u8[256]{0}', space=vmem, size = 0x100, scoped, tag = 'input window']
    #allocation5 [shape = 's32[2]{0}', space=smem, size = 0x8, scoped, tag = 'scratch operand']
"""
UTILIZATION = """== CAPACTIY:
MXU, XLU, VSTORE, VSTORE:SPILL
    2     2     2     2
== UTILIZATION:
0 0 1 0
2 0 0 1
1 1 0 2
"""


def test_kernels_are_read():
    (call,) = aot_tpu._kernel_calls(f'{CALL}\n  %x = f32[8]{{0}} custom-call(), custom_call_target="Sharding"')
    dumps = {
        "paged_attention.1-00-post-ra.txt": ALLOCATIONS,
        "paged_attention.1-01-final_hlo-static-per-bundle-utilization.txt": UTILIZATION,
        "paged_attention.10-00-post-ra.txt": "#allocation1 [shape = 'x', space=vmem, size = 0x9, scoped, tag]",
    }
    report = aot_tpu._read_kernel(call, dumps)
    assert report == aot_tpu.KernelReport(
        name="paged_attention.1",
        vmem_limit_bytes=4096,
        vmem_bytes=0x500,
        smem_bytes=8,
        bundles=3,
        spill_stores=3,
        mxu_bundles=2,
    )
    assert aot_tpu._read_kernel(call, {}).vmem_bytes is None


@pytest.mark.parametrize(
    ("generation", "num_devices", "topology"),
    [
        ("v5e", 1, "1x1"),
        ("v6e", 8, "2x4"),
        ("v5p", 4, "2x2x1"),
        ("v5p", 64, "4x4x4"),
        ("tpu7x", 2, "1x1x1"),
        ("v6e", 48, "8x8"),
    ],
)
def test_slices(generation, num_devices, topology):
    assert aot_tpu._smallest_topology(generation, num_devices) == topology
