"""One Ray for the tests of the fleet: what `isobit` starts itself is tested by commands, in
test_commands.py."""

import logging
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from isobit.engine.fleet.cluster import import_ray, start_ray
from tests.documents import ROOT


@pytest.fixture(autouse=True)
def _threads() -> None:
    """One for this process: engines in separate processes, and ranks that are threads, share
    the cores with it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """Ray on this machine, with room for four engines, whatever its cores."""
    pytest.importorskip("ray", reason="the fleet's tests need Ray: pip install 'isobit[ray]'")
    module = import_ray()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        )  # for Ray's processes: of this checkout
        folder = start_ray(module, num_cpus=4, log_to_driver=False, logging_level=logging.ERROR)
    yield module
    module.shutdown()
    shutil.rmtree(folder)
