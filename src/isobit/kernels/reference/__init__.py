"""What the definitions share: sums in a fixed order, and a single rounding."""
