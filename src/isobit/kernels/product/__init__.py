"""Matrix products of plain and quantized operands."""
