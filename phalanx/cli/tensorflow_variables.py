"""Which variables that begin with TF_ are TensorFlow's: Terraform's begin so, too."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "TF_"
_GROUPS = (
    "TF_CPP_",
    "TF_CUDNN_",
    "TF_DETERMINISTIC_",
    "TF_DISABLE_",
    "TF_DUMP_",
    "TF_ENABLE_",
    "TF_FORCE_",
    "TF_GPU_",
    "TF_MLIR_",
    "TF_NUM_",
    "TF_ONEDNN_",
    "TF_USE_",
    "TF_XLA_",
)
_NAMES = ("TF_CONFIG", "TF_KERAS")


def without_others(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that begin with TF_ and are not known to be TensorFlow's."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) or name.startswith(_GROUPS) or name in _NAMES
    }
