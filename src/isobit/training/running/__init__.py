"""What a run reads and writes around its steps: inputs, machine, resolved values, restoring."""
