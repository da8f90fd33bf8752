"""The output and the log-sum-exp of every case, backend and dtype against float64."""

from __future__ import annotations

import pytest
from helpers import BACKEND_DTYPES, FEATURE_CASES, forward_holds

from flashattn3_bench.checking import FORWARD_CASES, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# test_backward.py holds out and lse of the others.
@pytest.mark.interpreted(sweep=lambda case, **_: case.name not in FEATURE_CASES)
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case.name)
def test_forward(case, backend, dtype, device):
    forward_holds(case, make_inputs(case, device, dtype), backend)
