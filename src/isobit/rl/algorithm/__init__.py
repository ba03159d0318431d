"""The algorithm as functions of numbers: advantages, losses, corrections, mismatch; no model is in
it."""
