"""Fresh memory is poisoned with NaN, so that an element no kernel writes is seen."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert bool(torch.empty(4).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)
