"""From a scored batch to optimizer steps: packing, micro-batches, forward and backward."""
