"""The built-in checkpoint: a small trained Qwen3-MoE model; see README.md beside this file."""
