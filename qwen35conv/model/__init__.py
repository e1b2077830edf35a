"""The Qwen3.5 text model in MLX, over the canonical tensors of any checkpoint."""
