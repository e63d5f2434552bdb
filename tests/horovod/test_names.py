"""What each interface exports, and what importing it brings along."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys

import pytest

from tests.horovod.horovod_names import FALSE, NAMES, NOT_HERE, SIGNATURES
from tests.support.backends import BACKENDS, FIRST

SHARED = """
    Adasum Average HorovodInternalError Max Min ProcessSet Product Sum add_process_set allgather_object broadcast_object
    ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built gloo_enabled init is_homogeneous
    is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank remove_process_set
    rocm_built run shutdown size start_timeline stop_timeline
"""
ARRAYS = """
    Compression allgather allgather_async allreduce allreduce_async alltoall alltoall_async barrier broadcast
    broadcast_async grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_async
    grouped_reducescatter grouped_reducescatter_async join poll reducescatter reducescatter_async synchronize
"""
OWN = {
    "numpy": ARRAYS + "elastic",
    "jax": ARRAYS + "DistributedOptimizer broadcast_parameters elastic",
    "torch": ARRAYS
    + """
        DistributedOptimizer SyncBatchNorm allreduce_ allreduce_async_ broadcast_ broadcast_async_
        broadcast_optimizer_state broadcast_parameters elastic grouped_allreduce_ grouped_allreduce_async_
        sparse_allreduce_async
    """,
    "tensorflow": """
        BroadcastGlobalVariablesHook Compression DistributedGradientTape DistributedOptimizer
        PartialDistributedGradientTape SyncBatchNormalization allgather allreduce alltoall barrier broadcast broadcast_
        broadcast_global_variables broadcast_object_fn broadcast_variables
        check_num_rank_power_of_2 elastic grouped_allgather grouped_allreduce grouped_reducescatter join
        local_rank_op local_size_op process_set_included_op rank_op reducescatter size_op
    """,
    "keras": """
        Compression DistributedOptimizer PartialDistributedOptimizer SyncBatchNormalization allgather allreduce alltoall
        barrier broadcast broadcast_variables callbacks elastic grouped_allgather grouped_allreduce
        grouped_reducescatter join load_model reducescatter
    """,
}


@pytest.mark.parametrize("framework", [name for name in OWN if name in ("numpy", "keras", *BACKENDS)])
def test_the_names_are_as_written(framework: str) -> None:
    module = importlib.import_module(f"phalanx.horovod.{framework}")
    assert sorted(module.__all__) == sorted([*SHARED.split(), *OWN[framework].split()])
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.skipif("torch" not in BACKENDS, reason="BACKENDS leaves out torch")
def test_plain_pytorch_programs_import_no_keras() -> None:
    code = "import sys, phalanx.horovod.torch as hvd; hvd.init(); assert hvd.size() == 1; print('keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_without_init_everything_says_so() -> None:
    import phalanx.horovod.numpy as hvd

    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce([1.0]), lambda: hvd.add_process_set([0])):
        with pytest.raises(ValueError, match=r"use hvd\.init"):
            call()
    assert not hvd.is_initialized()
    hvd.shutdown()


def test_a_communicator_of_mpi_is_refused() -> None:
    import phalanx.horovod.numpy as hvd

    with pytest.raises(NotImplementedError, match="add_process_set"):
        hvd.init(comm=[0, 1])


FRAMEWORK_OF = {"torch": "torch", "tensorflow": "tensorflow"}


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_of_horovod_is_here(module: str) -> None:
    framework = module.partition(".")[0]
    if FRAMEWORK_OF.get(framework, FIRST) not in BACKENDS:
        pytest.skip(f"BACKENDS leaves out {framework}")
    ours = importlib.import_module(f"phalanx.horovod.{module}".rstrip("."))
    missing = [name for name in NAMES[module].split() if not hasattr(ours, name)]
    assert missing == [name for name in NAMES[module].split() if f"{module}.{name}" in NOT_HERE]


@pytest.mark.parametrize("module", SIGNATURES)
def test_the_collectives_have_the_signatures_of_horovod(module: str) -> None:
    if FRAMEWORK_OF.get(module, FIRST) not in BACKENDS:
        pytest.skip(f"BACKENDS leaves out {module}")
    hvd = importlib.import_module(f"phalanx.horovod.{module}")
    words = {id(hvd.Compression.none): "none", id(hvd.global_process_set): "all", id(hvd.Average): "Average"}
    for name, expected in SIGNATURES[module].items():
        function = getattr(hvd, name)
        parameters = inspect.signature(function).parameters
        defaults = [
            "" if each.default is each.empty else f"={words.get(id(each.default), repr(each.default))}"
            for each in parameters.values()
        ]
        own = " ".join(f"{each}{default}" for each, default in zip(parameters, defaults, strict=True))
        assert own.startswith(expected), name
        assert pickle.loads(pickle.dumps(function)) is function, name
        assert all(f"    {each}: " in function.__doc__ for each in parameters), name
        with pytest.raises(TypeError):
            function()
        with pytest.raises(TypeError):
            function([1.0], unknown=1)


def test_what_is_asked_of_other_libraries_is_answered_truthfully() -> None:
    import phalanx.horovod.numpy as hvd

    assert [name for name in FALSE if getattr(hvd, name)()] == []
    for name in ("mpi4py", "gloo", "nccl"):
        assert name not in sys.modules
