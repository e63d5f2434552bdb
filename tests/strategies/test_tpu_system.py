"""Programs for `tf.tpu`: what they are told where there is no TPU, and how a slice is described."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.strategies.tpu_system import topology_of
from tests.support import fork_server
from tests.support.backends import BACKENDS
from tests.support.commands import finish
from tests.support.programs import environment

NO_TPU = """
import phalanx
from phalanx.errors import ConfigurationError

resolver = phalanx.cluster_resolver.TPUClusterResolver(tpu="")
for make in (phalanx.tpu.experimental.initialize_tpu_system, phalanx.TPUStrategy, phalanx.experimental.TPUStrategy):
    try:
        make(resolver)
    except ConfigurationError as error:
        print(error)
"""


@pytest.mark.jax
@pytest.mark.skipif("jax" not in BACKENDS, reason="TPUs are JAX's")
def test_without_a_tpu_the_error_names_what_trains_here(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NO_TPU)
    settings = {**environment("jax"), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    code, output = finish([sys.executable, str(program)], settings, bound_s=120.0, start=fork_server.popen)
    assert code == 0, output
    assert output.count("there is no TPU") == 3
    assert "TPUStrategy: there is no TPU; JAX computes on 1 device(s) of the kind 'cpu'" in output
    assert "ModelParallelStrategy() or ShardedStrategy()" in output


def test_a_slice_is_described_by_the_places_of_its_cores() -> None:
    cores = [
        SimpleNamespace(process_index=host, coords=(chip, host, 0), core_on_chip=core)
        for host in (1, 0)
        for chip in range(2)
        for core in range(2)
    ]
    topology = topology_of(cores)
    assert (topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank) == (2, 4, 4)
    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    np.testing.assert_array_equal(topology.device_coordinates[1, 2], [1, 1, 0, 0])
