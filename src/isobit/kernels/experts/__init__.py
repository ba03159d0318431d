"""A mixture of experts: routing, products of rows by expert, sums of a token's experts."""
