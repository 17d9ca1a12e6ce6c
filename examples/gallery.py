"""The pictures of the gallery: the mask of every spec in specs/, drawn into docs/gallery/.

    python examples/gallery.py [FOLDER]

The same bytes on every machine: tiles are those of the device 'generic', captured tensors are drawn with one seed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from flashgen.analysis.variant import analyse
from flashgen.compiler.pipeline import check_file
from flashgen.ir.shape import Shape
from flashgen.picture.mask import MaskPicture, mask_picture
from flashgen.picture.paint import paint, png, size_of
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.verification import fitting

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "gallery"

LENGTH, SEED = 1024, 4
LONGEST = 112  # pixels of a side
# Lengths at which a mask shows what it is about: a few times its window, block or image.
LENGTHS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "bigbird": (2048, 2048),
        "block_sparse": (2048, 2048),
        "chunked": (32768, 32768),
        "cross_attention": (512, 1024),
        "decode": (256, 1024),
        "dilated": (256, 256),
        "gemma2_local": (16384, 16384),
        "lightning_indexer": (4096, 4096),
        "medusa": (64, 192),
        "neighborhood_2d": (3136, 3136),
        "nsa_selected": (4096, 4096),
        "random_blocks": (4096, 4096),
        "sliding_window": (16384, 16384),
        "sparse_butterfly": (2048, 2048),
        "streaming_llm": (4096, 4096),
    }
)


def picture(file: Path) -> MaskPicture:
    """The picture of the one spec of a file."""
    (spec,) = check_file(file).specs
    q_len, kv_len = LENGTHS.get(spec.name, (LENGTH, LENGTH))
    head_dim = spec.head_dims[0]
    tiles = plan_cpu(analyse(spec, head_dim), GENERIC_CPU).forward
    shape = fitting(spec, Shape(1, 8, 8, q_len, kv_len), pairs=8 * q_len * kv_len)
    return mask_picture(spec, head_dim, shape, tiles.Br, tiles.Bc, seed=SEED)


def main(folder: Path) -> None:
    """Draw all."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((ROOT / "specs").glob("*.attn")):
        drawn = picture(file)
        (folder / f"{file.stem}.png").write_bytes(png(paint(drawn, *size_of(drawn, LONGEST))))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
