"""What a Hugging Face directory says: config.json, names and shapes of tensors, weights in their
formats."""
