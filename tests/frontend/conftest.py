"""XLA on the CPU: libtpu, where it is installed, looks for a TPU for seconds."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
