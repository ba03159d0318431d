"""What an optimizer's step needs: sums of squares, and stochastic rounding to BF16."""
