"""The operators of a second engine, which rounds as inference engines do."""
