import subprocess
import sys

import phalanx.data


def test_the_exported_names_change_only_on_purpose():
    assert sorted(phalanx.data.__all__) == [
        "AutoShardPolicy",
        "DatasetCreator",
        "DistributedDataset",
        "DistributedIterator",
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
        "LocalBatch",
        "ShardedInput",
        "accepts_batch_size",
        "distribute_dataset",
        "distribute_from_function",
        "ledger",
        "local_range",
        "shard_input",
    ]


def test_importing_the_layer_imports_neither_keras_nor_a_backend():
    code = (
        "import sys, phalanx.data; "
        "print([name for name in ('keras', 'jax', 'tensorflow', 'torch', 'pandas') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert output.stdout.strip() == "[]"


def test_arrays_do_not_import_tensorflow_or_torch():
    code = (
        "import sys, os, numpy as np; os.environ['KERAS_BACKEND'] = 'jax'; from phalanx.data import shard_input; "
        "from phalanx.data.input_request import InputRequest; "
        "s = shard_input(InputRequest(np.ones((8, 2)), np.ones(8), world_size=2)); "
        "list(s.epoch(0)); print([name for name in ('tensorflow', 'torch') if name in sys.modules])"
    )
    if __import__("importlib.util").util.find_spec("jax") is None:
        import pytest

        pytest.skip("needs the JAX backend: TensorFlow's and PyTorch's import what is looked for here")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert output.stdout.strip() == "[]"
