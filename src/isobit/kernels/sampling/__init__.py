"""Log-probabilities, sampled tokens, and filtering of logits by top-k, top-p and min-p."""
