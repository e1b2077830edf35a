"""Which generation a checkpoint is: its gains measured, weighed against the facts, and judged."""
