"""Which share of the masters the busiest rank keeps, by the ownership of a run (`isobit.distributed.shards`).

Beyond `MOST_SHARDS` ranks a block would be smaller than what a collective sends well, and shards are held several
times.
"""

from functools import lru_cache

from isobit.distributed import shards
from isobit.model import ModelConfig
from isobit.model.transformer import parameter_shapes

MOST_SHARDS = 128


@lru_cache
def largest_share(config: ModelConfig, ranks: int) -> int:
    """Parameters whose masters the busiest of the ranks keeps."""
    return shards.largest_share(parameter_shapes(config).values(), min(ranks, MOST_SHARDS))
