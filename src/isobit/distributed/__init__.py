"""Several processes that train one model: who keeps which rows, and how gradients and weights
travel.

Every rank runs the whole program on its own samples; what they compute has the same bits at every
number of ranks (tests/distributed/test_runs.py).
"""

from isobit.distributed.ranks import ALONE, Alone, Ranks
from isobit.distributed.shards import Shards

__all__ = ["ALONE", "Alone", "Ranks", "Shards"]
