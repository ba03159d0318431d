"""The output head: log-probabilities and sampled tokens of hidden states."""
