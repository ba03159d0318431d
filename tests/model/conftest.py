"""The operators on the CPU, with exact sums: what float64 is expected to give."""

import pytest

from isobit.kernels import Ops, get_ops
from tests.models import require


@pytest.fixture(params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    require(request.param)
    return get_ops(request.param, "exact")
