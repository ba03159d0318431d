"""Text to tokens and back: tokenizers, chat templates, and special tokens in what others wrote."""
