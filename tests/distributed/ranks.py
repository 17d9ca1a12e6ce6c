"""Runs a function in processes that are ranks of a gloo group, and returns what each returned."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run(function: Callable[..., Any], world: int, *arguments: Any, seconds: float = 60) -> list[Any]:
    """``function(*arguments)`` on each of ``world`` ranks. Raises what a rank raised, with its traceback."""
    with TemporaryDirectory() as folder:
        spawn(_rank, (world, folder, seconds, function, arguments), nprocs=world)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, seconds: float, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    try:
        found = function(*arguments)
    except Exception as error:
        traceback.print_exc()
        raise RuntimeError(f"rank {rank}: {error}") from error
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
