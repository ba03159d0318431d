"""The operators on the CPU."""

import pytest

from isobit.kernels import Ops, get_ops
from tests.models import require


@pytest.fixture(params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    require(request.param)
    return get_ops(request.param)
