"""lily_mlx: MLX-LM, faster on Apple Silicon, with no change to your program.

    from lily_mlx import load, generate           # in place of mlx_lm's
    lily_mlx.accelerate(model)                    # a model you loaded with mlx_lm
    lily_mlx.install()                            # every mlx_lm.load from here on

Importing it changes nothing in mlx_lm.
"""

from .checkpoint import embedded_checkpoint
from .generate import batch_generate, generate, load, stream_generate
from .hook import Report, accelerate, install, restore, uninstall

__all__ = [
    "Report",
    "accelerate",
    "batch_generate",
    "embedded_checkpoint",
    "generate",
    "install",
    "load",
    "restore",
    "stream_generate",
    "uninstall",
]
