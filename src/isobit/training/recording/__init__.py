"""What a step leaves behind: metrics, and rows of completions."""
