"""How state reaches the disk and comes back: the only writer of safetensors."""
