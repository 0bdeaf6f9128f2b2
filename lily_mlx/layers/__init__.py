"""Fused layers: subclasses of mlx_lm's that pick a path by the number of tokens and call ops."""
