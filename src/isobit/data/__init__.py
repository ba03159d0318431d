"""Files to rows, rows to examples, and the order in which training sees them. Imports no torch."""
