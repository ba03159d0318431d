"""LoRA: which matrices have factors, their arithmetic, PEFT's folders, and several adapters at
once."""
