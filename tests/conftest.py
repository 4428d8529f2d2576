"""Shared by all tests: import path, determinism, no hypothesis database in the tree."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

torch.set_num_threads(1)  # small tensors: OpenMP would only wait for busy cores
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool():
    """One compile worker for the whole session; tests that break a worker start their own."""
    from verifier.pool import Pool

    with Pool() as shared:
        yield shared
