"""The model that comes with the package: small, trained, of Qwen3.6's architecture."""

from pathlib import Path


def embedded_checkpoint() -> Path:
    """The folder of the embedded model, in MLX-LM's format: `mlx_lm.load(folder)` reads it too."""
    return Path(__file__).parent
