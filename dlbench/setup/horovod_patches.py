"""What dlbench changes in the source of Horovod 0.28.1, and why.

The timeline: HOROVOD_TIMELINE makes Horovod ready to write one, and operations on GPUs take that for writing. Rank 0,
the coordinator, then waits on the host for each message's gradients and for its end (`NCCLAllreduce::WaitForData` and
`FinalizeGPUQueue`), and negotiates nothing meanwhile. With the patch it does so only while a file is open; dlbench
opens and closes it between two steps, when no operation is under way. What stays in all steps is that each vector of
negotiated bits is twice as long: 50 bytes more for 400 gradients (`CacheCoordinator::sync`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One textual change of Horovod's source: `old` becomes `new` everywhere in `file`."""

    file: str
    old: str
    new: str
    reason: str


_READBACK = """
// Added by dlbench's build: the values in force, which no other interface tells.
long long horovod_effective_fusion_threshold_bytes() {
  if (!horovod_global.initialization_done) {
    return -1;
  }
  return (long long)horovod_global.parameter_manager.TensorFusionThresholdBytes();
}

double horovod_effective_cycle_time_ms() {
  if (!horovod_global.initialization_done) {
    return -1.0;
  }
  return horovod_global.parameter_manager.CycleTimeMs();
}

// True: a timeline without an open file leaves the operations on GPUs as they are without a timeline.
bool horovod_closed_timeline_is_free() { return true; }

"""

_ACTIVE = """
  // Added by dlbench's build: whether a file is open, so that what is noted is written.
  inline bool Active() { return Initialized() && writer_.active(); }"""

_GPU_OPERATIONS = ("nccl_operations.cc", "gpu_operations.cc", "adasum_gpu_operations.cc")
"""Files of horovod/common/ops that ask the timeline which way to take."""

PATCHES = (
    Patch(
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        reason="headers of torch >= 2.1 need C++17, newer ones C++20",
    ),
    Patch(
        file="horovod/torch/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        reason="headers of torch >= 2.1 need C++17, newer ones C++20",
    ),
    Patch(
        file="horovod/common/gloo/gloo_controller.cc",
        old="global_ranks_.reserve(size_)",
        new="global_ranks_.resize(size_)",
        reason="reserve leaves size() at 0, so the stall inspector never reports a missing rank under Gloo",
    ),
    Patch(
        file="horovod/common/operations.cc",
        old="bool horovod_gloo_built() {",
        new=_READBACK.lstrip("\n") + "bool horovod_gloo_built() {",
        reason="fusion threshold and cycle time in force can be read back into the record",
    ),
    Patch(
        file="horovod/common/timeline.h",
        old="  inline short Initialized() { return initialized_.fetch_and(1); }",
        new="  inline short Initialized() { return initialized_.fetch_and(1); }" + _ACTIVE,
        reason="a timeline that can be opened later is told from one that is open",
    ),
    *(
        Patch(
            file=f"horovod/common/ops/{file}",
            old="timeline.Initialized()",
            new="timeline.Active()",
            reason="rank 0 waits for the GPU on the host as long as it is asked so, in every step of a run",
        )
        for file in _GPU_OPERATIONS
    ),
    Patch(
        file="horovod/common/ops/cuda/CMakeLists.txt",
        old="set(CMAKE_CUDA_STANDARD 11)",
        new="set(CMAKE_CUDA_STANDARD 17)",
        reason="CUDA 13 and the headers of gcc 14 have left C++11 behind",
    ),
    Patch(
        file="horovod/torch/cuda_util.cc",
        old='dlopen("libcuda.so", RTLD_LAZY)',
        new='dlopen("libcuda.so.1", RTLD_LAZY)',
        reason="drivers install libcuda.so.1; the name without number comes with packages for development only",
    ),
    Patch(
        file="cmake/Modules/FindPytorch.cmake",
        old="(torch.version.cuda is not None) and (CUDA_HOME is not None)",
        new="(torch.version.cuda is not None) and ('HOROVOD_GPU_OPERATIONS' in __import__('os').environ)",
        reason="a torch for CUDA on a machine with some CUDA gets a half CUDA build, though none was asked for",
    ),
)
