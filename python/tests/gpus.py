"""Which GPUs the tests have."""

from __future__ import annotations

import pytest
import torch

import ferry

GPUS = torch.cuda.device_count() if torch.cuda.is_available() and ferry.has_cuda else 0
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="no GPU, or a build without the CUDA engine")
