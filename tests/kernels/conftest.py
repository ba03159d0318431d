"""The operators that the tests compare."""

import pytest

from isobit.kernels import Ops, get_ops


@pytest.fixture(scope="module")
def native() -> Ops:
    return get_ops("native")


@pytest.fixture(scope="module")
def reference() -> Ops:
    return get_ops("reference")
