"""Masters, the working weights that are made of them at each sync, and a second engine's copy."""
