"""Every program of examples/, run small, with the result that it promises."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, JOB_BOUND_S, Run, each_backend, environment
from tests.support.backends import BACKENDS, FIRST
from tests.support.commands import finish

pytestmark = pytest.mark.timeout(700)

PNG = b"\x89PNG\r\n\x1a\n"


def said_by(task: str, output: str) -> list[str]:
    """What a task printed of its own, without the notice of one that waits for others on a busy machine, and what
    TensorFlow says of the processor where something imports it."""
    lines = [line for line in output.splitlines() if line.startswith(f"[{task}]")]
    return [
        line
        for line in lines
        if not re.search(r"waits up to|has not connected yet|before absl::InitializeLog|oneDNN", line)
    ]


def percent(output: str, label: str) -> float:
    """The number after a label, as in `test accuracy 98.61%`."""
    return float(re.search(rf"{label}\s+([\d.]+)%", output)[1])


def losses(output: str) -> list[float]:
    """The loss of each epoch of a custom loop."""
    return [float(text) for text in re.findall(r"epoch \d+: loss ([\d.]+)", output)]


@each_backend(slow_after_the_first=True)
def test_digits_reach_97_percent_on_two_replicas(run: Run, tmp_path: Path, backend: str) -> None:
    output = run("examples/digits.py", workers=2, backend=backend)
    assert percent(output, "test accuracy") >= 97
    assert "2 replica(s)" in output
    assert float(re.search(r"speed\s+([\d,]+) samples/s", output)[1].replace(",", "")) > 0
    assert (tmp_path / "runs/digits.png").read_bytes().startswith(PNG)
    assert not said_by("worker/1", output), "only the chief prints"


@pytest.mark.slow
def test_digits_run_as_a_plain_program(run: Run, tmp_path: Path) -> None:
    output = run("examples/digits.py", "--epochs", 1, "--verbose", 0, "--out", "elsewhere")
    assert "1 replica(s)" in output
    assert (tmp_path / "elsewhere/digits.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_mnist_guide_resumes_after_its_last_checkpoint(run: Run, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    offline = {
        "HOME": str(tmp_path / "home"),
        "KERAS_HOME": str(tmp_path / "home"),
        "https_proxy": "http://127.0.0.1:9",
    }
    guide = ("examples/mnist_guide.py", "--samples", 1200, "--epochs")
    first = run(*guide, 1, workers=2, more=offline)
    assert "data: scikit-learn's digits" in first
    assert "restoring" not in first
    checkpoints = tmp_path / "runs/mnist_guide"
    assert [path.name for path in checkpoints.glob("*.keras")] == ["epoch-001.keras"]

    second = run(*guide, 3, workers=2, more=offline)
    assert "restoring runs/mnist_guide/epoch-001.keras" in second
    assert "Epoch 1/3" not in second
    assert "Epoch 2/3" in second
    assert sorted(path.name for path in checkpoints.glob("*.keras")) == [
        f"epoch-00{epoch}.keras" for epoch in (1, 2, 3)
    ]
    assert percent(second, "test accuracy") > max(80, percent(first, "test accuracy"))


@pytest.mark.slow
def test_mnist_guide_trains_on_mnist_where_there_is_one(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import runpy, keras, numpy as np
digits = np.arange(100, dtype=np.uint8) % 10
images = np.random.default_rng(0).integers(0, 256, (100, 28, 28), np.uint8)
keras.datasets.mnist.load_data = lambda: ((images, digits), (images, digits))
runpy.run_path("examples/mnist_guide.py", run_name="__main__")
"""
    )
    assert "data: MNIST" in run(program, "--epochs", 1)


@pytest.mark.slow
@each_backend()
def test_custom_loops_learn_the_same_on_one_replica_and_on_two(run: Run, backend: str) -> None:
    loop = (f"examples/custom_loop_{backend}.py", "--epochs", 5)
    alone, together = run(*loop, backend=backend), run(*loop, workers=2, backend=backend)
    assert losses(together) == pytest.approx(losses(alone), abs=2e-4)
    assert len(losses(together)) == 5
    assert percent(together, "test accuracy") > 90
    assert not said_by("worker/1", together), "only the chief prints"


@pytest.mark.slow
@each_backend("torch")
def test_custom_loop_with_an_optimizer_of_pytorch(run: Run, backend: str) -> None:
    loop = ("examples/custom_loop_torch.py", "--epochs", 3)
    ours = run(*loop, workers=2, backend=backend)
    theirs = run(*loop, "--optimizer", "torch", workers=2, backend=backend)
    assert losses(theirs) == pytest.approx(losses(ours), rel=0.01)


@pytest.mark.slow
def test_cifar_speed_prints_a_table_and_draws_a_plot(run: Run, tmp_path: Path) -> None:
    output = run(
        *("examples/cifar_speed.py", "--synthetic", "--samples", 512, "--epochs", 1, "--batch-size", 64),
        *("--workers", 1, 2, "--backend", FIRST),
    )
    rows = re.findall(r"^ +(\d+) +([\d,]+) +([\d.]+)x +([\d.]+) +([\d.]+)%$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2"]
    one, two = (float(row[3]) for row in rows)
    assert two == pytest.approx(one, rel=0.02), "the same model on the same batches"
    assert (tmp_path / "runs/cifar_speed.png").read_bytes().startswith(PNG)


@pytest.mark.slow
@each_backend(slow_after_the_first=True)
def test_digits_with_a_parameter_server_are_learned(run: Run, backend: str) -> None:
    output = run("--ps", 1, "examples/parameter_server_digits.py", "--verbose", 0, workers=2, backend=backend)
    assert percent(output, "test accuracy") >= 96
    assert "updates       900" in output, "45 batches in each of 20 epochs, each once"
    assert not said_by("worker/1", output), "only the chief prints"


@pytest.mark.slow
def test_workers_share_the_steps_of_a_line(run: Run) -> None:
    output = run("--ps", 1, "examples/parameter_server_linear.py", "--every", 20, workers=2)
    slope, intercept = re.search(r"steps 1000: y = (\S+) x \+ (\S+)", output).groups()
    assert float(slope) == pytest.approx(2, abs=0.05)
    assert float(intercept) == pytest.approx(1, abs=0.05)
    made = [sorted(map(int, re.findall(rf"worker {rank} made step (\d+)", output))) for rank in range(2)]
    assert all(len(steps) > 1 for steps in made), "both workers train"
    again = run("--ps", 1, "examples/parameter_server_linear.py", "--epochs", 12, workers=2)
    assert "steps 1200:" in again, "it goes on from the backup"


@pytest.mark.slow
def test_a_line_that_was_killed_goes_on_from_its_backup(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "phalanx", "run", "--ps", "1", "--workers", "2"]
    program += [str(EXAMPLES / "parameter_server_linear.py"), "--samples", "160", "--every", "20"]
    backup = tmp_path / "runs" / "linear" / "training_metadata.json"
    with open(tmp_path / "output", "wb") as output:
        job = subprocess.Popen(
            [*program, "--epochs", "100000"],
            cwd=tmp_path,
            env=environment(FIRST),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    with job:
        try:
            until = time.monotonic() + JOB_BOUND_S
            while not (backup.exists() and "made step" in (tmp_path / "output").read_text()):
                assert time.monotonic() < until, (tmp_path / "output").read_text()
                assert job.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.02)
        finally:
            job.kill()  # the tasks die with their launcher, as hard
    reached = json.loads(backup.read_text())["epoch"]
    code, said = finish(
        [*program, "--epochs", str(reached + 50)], environment(FIRST), folder=tmp_path, bound_s=JOB_BOUND_S
    )
    assert code == 0, said
    steps, slope = re.search(r"steps (\d+): y = (\S+) x", said).groups()
    assert int(steps) >= 10 * (reached + 50), "its steps are counted on from the backup's"
    assert min(map(int, re.findall(r"made step (\d+)", said))) >= 10 * reached
    assert float(slope) == pytest.approx(2, abs=0.1)


@pytest.mark.slow
@each_backend(slow_after_the_first=True)
def test_a_coordinated_loop_learns_the_digits(run: Run, backend: str) -> None:
    output = run("--ps", 1, "--chief", "examples/coordinator_loop.py", workers=2, backend=backend)
    assert percent(output, "test accuracy") >= 94
    assert "updates       800" in output, "10 steps in each of 8 functions in each of 10 epochs"
    found = losses(output)
    assert found[-1] < 0.2 * found[0]
    assert output.count("epoch 1:") == 1, "only the chief comes so far"


@pytest.mark.slow
@each_backend(slow_after_the_first=True)
def test_rows_of_a_large_table_travel_alone(run: Run, backend: str) -> None:
    small = ("examples/embedding_rows.py", "--samples", 20_000, "--verbose", 0, "--users", 200_000)
    output = run("--ps", 1, *small, workers=2, backend=backend)
    assert percent(output, "test accuracy") > 60
    numbers = re.search(r"a step sends ([\d,]+) bytes and receives ([\d,]+)", output).groups()
    whole = int(re.search(r"the whole model is ([\d,]+) bytes", output)[1].replace(",", ""))
    assert all(int(number.replace(",", "")) < whole / 100 for number in numbers)
    assert not said_by("worker/1", output), "only the chief prints"


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="BACKENDS leaves out jax")
def test_a_transformer_divided_over_parts_of_a_cpu_learns_the_digits(run: Run) -> None:
    options = ("--width", 64, "--blocks", 1, "--epochs", 8)
    on_two = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "4"}
    output = run("examples/tpu.py", *options, backend="jax", more=on_two)
    assert "(replica=1, shard=2)" in output
    assert percent(output, "test accuracy") >= 90


@pytest.mark.slow
def test_diloco_sends_a_part_of_what_every_step_sends(run: Run, tmp_path: Path) -> None:
    """Small, to see that it runs; the figures are those of `benchmarks/compression.py`."""
    output = run(
        *("examples/char_lm.py", "--epochs", 2, "--steps", 20, "--sync-every", 20, "--width", 32, "--layers", 1),
        *("--text-bytes", 200000, "--verbose", 0),
        workers=2,
        backend=FIRST,
    )
    plain, diloco = json.loads((tmp_path / "runs/char_lm.json").read_text())
    assert diloco["megabytes"][-1] < 0.5 * plain["megabytes"][-1]
    assert all(curve["losses"][-1] < math.log(128) for curve in (plain, diloco)), "less than of who knows nothing"
    assert "| diloco |" in output
    assert (tmp_path / "runs/char_lm.png").read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="BACKENDS leaves out jax")
def test_a_transformer_that_no_device_may_hold_trains_as_on_one_device(run: Run, tmp_path: Path) -> None:
    def trained(*options: object) -> tuple[list[float], str]:
        small = ("--epochs", 1, "--steps", 10, "--layers", 1, "--width", 64, "--text-bytes", 300000)
        output = run("examples/sharded_transformer.py", *small, *options, backend="jax")
        return [float(text) for text in re.findall(r"loss: ([\d.]+)", output)], output

    weights = tmp_path / "runs/sharded.weights.h5"
    sharded, output = trained("--cpu-devices", 4, "--budget-mb", 0.3)  # of 0.85
    assert "which each device holds 0.22 MB" in output
    weights = weights.rename(tmp_path / "first.weights.h5")
    whole, _ = trained("--cpu-devices", 1, "--strategy", "one-device")
    assert sharded == pytest.approx(whole, rel=1e-3)
    continued, _ = trained("--cpu-devices", 2, "--restore", weights)
    alone, _ = trained("--cpu-devices", 1, "--strategy", "one-device", "--restore", weights)
    assert continued == pytest.approx(alone, rel=1e-3)
    assert continued[0] < sharded[0]


@pytest.mark.slow
@pytest.mark.skipif("jax" not in BACKENDS, reason="BACKENDS leaves out jax")
def test_the_program_for_tpus_learns_the_digits_on_parts_of_a_cpu(run: Run) -> None:
    parts = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "8"}
    small = ("--width", 64, "--blocks", 1, "--epochs", 6)
    output = run("examples/tpu.py", *small, backend="jax", more=parts)
    assert "(replica=1, shard=2)" in output
    assert percent(output, "test accuracy") >= 85


@pytest.mark.slow
@each_backend(slow_after_the_first=True)
def test_horovod_keras_learns_the_digits(run: Run, tmp_path: Path, backend: str) -> None:
    output = run("examples/horovod_keras.py", workers=2, backend=backend)
    assert percent(output, "test accuracy") >= 95
    assert "finished gradual learning rate warmup to 0.002" in output
    assert (tmp_path / "runs/horovod_keras.keras").exists()
    assert not said_by("worker/1", output), "only rank 0 prints"


@pytest.mark.slow
@each_backend("tensorflow")
def test_horovod_tensorflow_learns_the_digits(run: Run, backend: str) -> None:
    output = run("examples/horovod_tensorflow.py", workers=2, backend=backend)
    assert percent(output, "test accuracy") >= 95
    assert not said_by("worker/1", output), "only rank 0 prints"


@pytest.mark.slow
@each_backend("torch")
@pytest.mark.parametrize("options", [(), ("--use-adasum",), ("--fp16-allreduce",)])
def test_horovod_torch_learns_the_digits(run: Run, backend: str, options: tuple[str, ...]) -> None:
    output = run("examples/horovod_torch.py", *options, workers=2, backend=backend)
    found = [float(text) for text in re.findall(r"test accuracy ([\d.]+)%", output)]
    assert found[-1] >= 93
    assert len(found) == 12, "only rank 0 prints"
