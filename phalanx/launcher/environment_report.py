"""`phalanx env`: the information that a bug report needs, as text to copy."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.config.keras_backends import keras_backend
from phalanx.launcher.machine import Machine, as_gib, describe_quota
from phalanx.launcher.worker_environment import FORWARDED_PREFIXES

# Other variables that begin with TF_ do not belong to TensorFlow, but to Terraform, for example.
_OF_TENSORFLOW = (
    "TF_CONFIG",
    "TF_CPP_",
    "TF_CUDNN_",
    "TF_DETERMINISTIC_",
    "TF_DISABLE_",
    "TF_DUMP_",
    "TF_ENABLE_",
    "TF_FORCE_",
    "TF_GPU_",
    "TF_KERAS",
    "TF_MLIR_",
    "TF_NUM_",
    "TF_ONEDNN_",
    "TF_USE_",
    "TF_XLA_",
)
_OTHERS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NO_COLOR", "PYTHONPATH")
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE)_KEY", re.IGNORECASE)
# Passwords in URLs, and after `sshpass -p` in PHALANX_SSH.
_PASSWORD = re.compile(r"(?<=//)[^/@\s]+(?=@)|(?<=\bsshpass -p)\s*\S+")
HIDDEN = "(set, hidden)"


def render(machine: Machine, environment: Mapping[str, str]) -> str:
    """Render the report: versions, the machine, and the variables that are set. Values of secrets are hidden."""
    known = {name: environment[name] for name in environment if name.startswith(_OF_TENSORFLOW) or name[:3] != "TF_"}
    packages = "\n".join(f"  {name} {version}" for name, version in machine.packages.items())
    lines = [
        f"Python {machine.python}",
        f"System: {machine.system}",
        f"Cores: {machine.cores}{describe_quota(machine)}",
        f"Memory: {as_gib(machine.memory)}, {as_gib(machine.free_memory)} free; /dev/shm: {_shared(machine)}",
        f"GPUs: {', '.join(machine.gpus) or 'none'}",
        f"Keras backend: {keras_backend(environment)}",
        f"Packages:\n{packages}",
        "Variables:",
        *(f"  {name}={value}" for name, value in shown_variables(known).items()),
    ]
    return "\n".join(lines) + "\n"


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that Phalanx, Keras and the backends read, by name, with the values of secrets hidden."""
    names = sorted(name for name in environment if name.startswith(FORWARDED_PREFIXES) or name in _OTHERS)
    return {name: HIDDEN if _SECRET.search(name) else _PASSWORD.sub("(hidden)", environment[name]) for name in names}


def _shared(machine: Machine) -> str:
    return "cannot be written to" if machine.shared_memory is None else f"{as_gib(machine.shared_memory)} free"
