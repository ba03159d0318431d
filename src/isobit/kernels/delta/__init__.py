"""Linear attention by the gated delta rule, and the short convolution before it."""
