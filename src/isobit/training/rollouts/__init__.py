"""Where the batches of a run come from: sampled now, recorded, ahead of the learner, by a fleet."""
