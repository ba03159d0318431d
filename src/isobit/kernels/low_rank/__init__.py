"""What adapters of low rank add to a product, each to its own rows."""
