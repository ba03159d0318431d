"""Which share of the masters the busiest rank keeps.

Rows are owned in blocks of 128, so shares are not quite equal. Beyond `MOST_SHARDS` ranks a block would be smaller than
what a collective sends well, and shards are held several times.
"""

import heapq
import math
from functools import lru_cache
from itertools import pairwise

from isobit.model import ModelConfig
from isobit.model.transformer import parameter_shapes

BLOCK_ROWS, MOST_SHARDS = 128, 128


@lru_cache
def largest_share(config: ModelConfig, ranks: int) -> int:
    """Parameters whose masters the busiest of the ranks keeps."""
    size = min(ranks, MOST_SHARDS)
    kept = [0] * size
    for shape in parameter_shapes(config).values():
        width = math.prod(shape[1:])
        blocks = -(-shape[0] // BLOCK_ROWS)
        parts = min(blocks, size)
        cuts = [min(blocks * part // parts * BLOCK_ROWS, shape[0]) for part in range(parts + 1)]
        ranges = sorted((high - low for low, high in pairwise(cuts)), reverse=True)
        for rank, rows in zip(heapq.nsmallest(parts, range(size), key=kept.__getitem__), ranges):
            kept[rank] += rows * width
    return max(kept)
