"""What is read from the text of compiled programs. The lines are those that XLA printed for TPUs, GPUs and CPUs."""

from __future__ import annotations

import pytest

from phalanx.planning.hlo_collectives import HloCollective, find_collectives, find_host_calls

TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.19 (param_0.29: bf16[1024,2048]) -> (bf16[1024,2048], bf16[2048,2048]) {
  %all-gather.19 = bf16[2048,2048]{1,0:T(8,128)(2,1)} all-gather(%param_0.29), channel_id=4, \
replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}, dimensions={0}, use_global_device_ids=true
}

%async_collective_fusion.24 (param_0.32: bf16[1024,2048]) -> (f32[16,2048], bf16[1024,2048]) {
  %all-gather.21 = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.32), channel_id=4, \
replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}, dimensions={0}, use_global_device_ids=true
}

%all-reduce-scatter (input: f32[2048,2048]) -> f32[1024,2048] {
  %all-reduce.4 = f32[2048,2048]{1,0:T(8,128)} all-reduce(%input), channel_id=9, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, to_apply=%add.clone
}

ENTRY %main.1_spmd (param: f32[1024,2048]) -> (f32[1024,2048], f32[1024,2048]) {
  %all-to-all = bf16[1,2,16,1024]{3,2,0,1:T(8,128)(2,1)S(1)} all-to-all(%bitcast.26), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=2,'axis_2'=1], device_ids=([2,4]T(1,0)) {'axis_1'}, dimensions={1}
  %collective-permute-start = (bf16[1,16,2048]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,16,2048]{2,1,0:T(8,128)(2,1)S(1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%bitcast.28), channel_id=8, source_target_pairs={{0,0},{4,1}}
  %fusion = f32[1024,2048]{1,0:T(8,128)S(1)} fusion(%fusion.2), kind=kCustom, calls=%all-reduce-scatter
  %collective-permute-done = bf16[1,16,2048]{2,1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start)
  %all-reduce.6 = (f32[1024,2048]{1,0:T(8,128)S(1)}, f32[1024,2048]{1,0:T(8,128)S(1)}) all-reduce(%fusion, %fusion.1), \
channel_id=10, replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}, to_apply=%add.1.clone, \
metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=7}
  %all-gather.31 = bf16[64,2048]{1,0:T(8,128)(2,1)S(1)} all-gather(%convert.2), channel_id=1, replica_groups=[2,4]<=[8]
  %all-reduce.9 = f32[]{:T(128)} all-reduce(%x), channel_id=11, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}
  %get-tuple-element = f32[1024,2048]{1,0:T(8,128)S(1)} get-tuple-element(%all-reduce.6), index=0
}
"""

GPU = """\
ENTRY %main.1_spmd (param: f32[512,1024]) -> f32[512,1024] {
  %reduce-scatter-start = ((f32[2048,1024]{1,0}, f32[2048,16]{1,0}), (f32[512,1024]{1,0}, f32[512,16]{1,0})) \
reduce-scatter-start(%bitcast.94, %gemm_fusion_dot.18), channel_id=12, replica_groups=mesh['axis_0'=4] {'axis_0'}, \
use_global_device_ids=true, dimensions={0}, to_apply=%add.clone
  %reduce-scatter-done = (f32[512,1024]{1,0}, f32[512,16]{1,0}) reduce-scatter-done(%reduce-scatter-start)
}
"""

CPU = """\
%region_0.1_spmd (arg: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %all-gather.1 = f32[256,256]{1,0} all-gather(%get-tuple-element.30), channel_id=2, \
replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
}

ENTRY %main (param: f32[64,256]) -> f32[64,256] {
  %reduce-scatter = f32[64,256]{1,0} reduce-scatter(%dot), channel_id=5, replica_groups={{0,1,2,3}}, to_apply=%add
  %all-gather-start = (f32[64,8]{1,0}, f32[256,8]{1,0}) all-gather-start(%p), channel_id=6, replica_groups={{0,1,2,3}}
  %all-gather-done = f32[256,8]{1,0} all-gather-done(%all-gather-start)
  %all-reduce.2 = pred[] all-reduce(%q), channel_id=8, replica_groups={}, to_apply=%or
  %while.3 = (s32[], f32[64,256]{1,0}) while(%tuple.13), condition=%region_1.2_spmd, body=%region_0.1_spmd, \
backend_config={"known_trip_count":{"n":"3"}}
  %debug_callback.2 = () custom-call(%g), custom_call_target="xla_ffi_python_cpu_callback", api_version=4
}
"""


def brief(collectives: list[HloCollective]) -> list[tuple[str, str, int, int]]:
    return [(each.kind, each.dtype, each.nbytes, each.group) for each in collectives]


def test_the_collectives_of_a_tpu_program() -> None:
    assert brief(find_collectives(TPU, 8)) == [
        ("all-gather", "bf16", 2048 * 2048 * 2, 2),  # once, of the two parts that it is cut into
        ("reduce-scatter", "f32", 2048 * 2048 * 4, 2),
        ("all-to-all", "bf16", 2 * 16 * 1024 * 2, 2),
        ("collective-permute", "bf16", 16 * 2048 * 2, 8),
        ("all-reduce", "f32", 2 * 1024 * 2048 * 4, 4),
        ("all-gather", "bf16", 64 * 2048 * 2, 4),
    ]


def test_the_collectives_of_a_cpu_program_with_a_loop() -> None:
    found = find_collectives(CPU, 4)
    assert brief(found) == [
        ("all-gather", "f32", 256 * 256 * 4, 4),
        ("reduce-scatter", "f32", 256 * 256 * 4, 4),
        ("all-gather", "f32", 256 * 8 * 4, 4),
        ("all-reduce", "pred", 1, 4),
    ]
    assert [each.count for each in found] == [3, 1, 1, 1]


def test_where_a_collective_comes_from() -> None:
    (merge,) = [each for each in find_collectives(TPU, 8) if each.kind == "all-reduce"]
    assert merge.origin == "jit(step)/transpose(jvp())/dot_general"


@pytest.mark.parametrize(
    ("kind", "sent"), [("all-reduce", 1500), ("all-gather", 750), ("reduce-scatter", 750), ("collective-permute", 1000)]
)
def test_what_each_device_sends(kind: str, sent: int) -> None:
    assert HloCollective(kind, "f32", 1000, group=4).sent_bytes == sent
    assert HloCollective(kind, "f32", 1000, group=4, count=3).sent_bytes == 3 * sent


def test_callbacks_and_transfers_are_found() -> None:
    assert find_host_calls(CPU) == ["xla_ffi_python_cpu_callback"]
    assert find_host_calls(TPU) == []
    assert find_host_calls("%s = token[] send(%a, %b), channel_id=1, is_host_transfer=true") == ["host transfer"]
    assert find_host_calls("%i = ((f32[]), token[]) infeed(%t)") == ["infeed"]


def test_an_asynchronous_reduce_scatter_shows_its_operands_too() -> None:
    [found] = find_collectives(GPU, 4)
    assert (found.kind, found.group) == ("reduce-scatter", 4)
    assert found.nbytes == 4 * (2048 * 1024 + 2048 * 16)
