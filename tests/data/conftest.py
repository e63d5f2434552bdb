"""The input layer is the same on every backend; its tests run on the one that the environment names."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
