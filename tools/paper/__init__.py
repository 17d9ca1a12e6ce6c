"""The algorithms of the FlashAttention paper in tiled PyTorch, for any spec, with every HBM access counted.

    algorithm_0   standard attention                         algorithm_3   its backward pass
    algorithm_1   FlashAttention                             algorithm_4   its backward pass
    algorithm_2   the same with masking and dropout          algorithm_5   the same, block-sparse
    flash2_forward, flash2_backward   the loop order of FlashAttention-2
    rabe_staats_forward, rabe_staats_backward   attention in chunks that are summarized, with checkpoints

They are for reading, for counting and for checking one another; ``dense.attention`` stays the judge.
"""

from flashgen.plan.paper import BlockSizes, paper_blocks, rabe_staats_blocks
from flashgen.reference.tiled import Problem
from tools.paper.flash import Step, algorithm_1, algorithm_2, algorithm_4, algorithm_5, kept_blocks
from tools.paper.flash2 import flash2_backward, flash2_forward
from tools.paper.hbm import Hbm
from tools.paper.rabe_staats import rabe_staats_backward, rabe_staats_forward
from tools.paper.results import Backward, Forward
from tools.paper.standard import Standard, algorithm_0, algorithm_3

__all__ = [
    "Problem",
    "BlockSizes",
    "paper_blocks",
    "rabe_staats_blocks",
    "algorithm_0",
    "algorithm_1",
    "algorithm_2",
    "algorithm_3",
    "algorithm_4",
    "algorithm_5",
    "kept_blocks",
    "flash2_forward",
    "flash2_backward",
    "rabe_staats_forward",
    "rabe_staats_backward",
    "Standard",
    "Forward",
    "Backward",
    "Step",
    "Hbm",
]
