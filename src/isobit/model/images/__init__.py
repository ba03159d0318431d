"""Images: rows that a frozen tower made of each, once, for rollout and learner alike."""
