"""The one training loop of all learners, and what it needs: the only door to Accelerate and safetensors."""
