"""The output and the log-sum-exp of every case, backend and dtype against float64."""

from __future__ import annotations

import pytest
from helpers import BACKEND_DTYPES, forward_holds, quick_case, swept_case

from flashattn3_bench.checking import FORWARD_CASES, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.interpreted(quick=quick_case, sweep=swept_case)
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case.name)
def test_forward(case, backend, dtype, device):
    forward_holds(case, make_inputs(case, device, dtype), backend)
