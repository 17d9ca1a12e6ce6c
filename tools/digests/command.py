"""Whether a change left the machine code as it was: digests of a sample of kernels, taken before and after.

    python -m tools.digests take FILE.json [--quick|--full] [--part K/N] [--only gpu|cpu|host] [--cache DIR]
    python -m tools.digests compare OLD.json NEW.json

``take`` compiles the sample (``sample.py``) with the flags that users' kernels are compiled with, without a GPU,
in two processes. It writes the file anew after each program, and goes on where it was cut as long as the sources stay
the same; so do parts of a sample, one after another. An entry is one kernel of a GPU or one function of a CPU's
library, under target/spec/kind/pass/element/option/kernel: the digest of its code, what it takes of a multiprocessor,
seconds of the assembler and of the whole program from its plan on. Others are bytes and times that ``flashgen plan``
predicts, and what Python does in a call. Kernels go to a cache of their own; ``--cache`` keeps it for other runs. Its
entries are found by their sources, flags and compilers, so that digests from there are good; they have no seconds.

``compare`` prints what differs. It exits with 1 where code does: digests, or kernels of a program that both files know.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tools.digests.elf import disassembler
from tools.digests.sample import Piece, pieces

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
SLOWER = 1.10

# What is worse the larger it is, and what is said of it.
_TAKEN = {"registers": "registers", "spill_bytes": "bytes that spill", "python_calls": "functions of Python"}
# What is said wherever it is another.
_SAME = {"shared_bytes": "bytes of shared memory", "threads": "threads", "bytes": "predicted bytes"}

Entries = Mapping[str, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        "python -m tools.digests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    taking = commands.add_parser("take")
    taking.add_argument("file", type=Path)
    size = taking.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a quarter of an hour on two idle cores; the usual sample")
    size.add_argument("--full", action="store_true", help="every head dimension and element type of every target")
    taking.add_argument("--part", type=_part, default=(1, 1), metavar="K/N")
    taking.add_argument("--only", choices=("gpu", "cpu", "host"))
    taking.add_argument("--cache", type=Path, metavar="DIR")
    taking.add_argument("--spec", action="append", metavar="NAME", help="of these specs alone")
    taking.set_defaults(run=_take)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.set_defaults(run=_compare)
    given = parser.parse_args(arguments)
    code: int = given.run(given)
    return code


# -- take --------------------------------------------------------------------------------------------------------------


def _take(given: argparse.Namespace) -> int:
    k, n = given.part
    wanted = [each for each in _gallery() if given.full or each.quick][k - 1 :: n]
    wanted = [each for each in wanted if given.only in (None, each.where) and each.spec in (given.spec or [each.spec])]
    try:
        known = _known(given.file)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    done, failed = set(known["pieces"]), 0
    left = [each for each in wanted if each.key not in done]
    start = time.monotonic()
    for count, (piece, found) in enumerate(_made(left, given.cache), 1):
        said = f"{count} of {len(left)}, {time.monotonic() - start:.0f} s: {piece.key}"
        if isinstance(found, Exception):
            failed += 1
            sys.stderr.write(f"{said}: {type(found).__name__}: {found}\n")
            continue
        known["entries"] |= {f"{piece.key}/{name}": entry for name, entry in found.items()}
        known["pieces"] = sorted({*known["pieces"], piece.key})
        _write(given.file, known)
        print(f"{said}, {len(found)}", flush=True)
    return int(failed > 0)


def _gallery() -> tuple[Piece, ...]:
    return pieces(sorted(each.stem for each in (ROOT / "specs").glob("*.attn")))


def _known(file: Path) -> dict[str, Any]:
    """What a file holds already. Raises ``ValueError`` where that is of other sources or compilers."""
    about = about_this()
    if not file.exists():
        return {"about": about, "pieces": [], "entries": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    different = [name for name in about if found["about"].get(name) != about[name] and name != "commit"]
    if different:
        raise ValueError(f"'{file}' is of other {', '.join(different)}: take digests of these into another file")
    return found


def about_this() -> dict[str, str]:
    """What decides the digests, and the commit for people."""
    compiler = os.environ.get("CXX") or "c++"
    return {
        "sources": _sources(),
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "compiler": f"{compiler}: {_said(*shlex.split(compiler), '--version')}",
        "nvrtc": _nvrtc(),
        "code of libraries": "bytes" if disassembler() is None else "instructions",
    }


def _sources() -> str:
    """A digest of all that kernels come from."""
    digest = hashlib.sha256()
    files = (each for name in ("flashgen", "templates", "specs") for each in (ROOT / name).rglob("*"))
    for file in sorted(each for each in files if each.is_file() and "__pycache__" not in each.parts):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _said(*command: str) -> str:
    """The first line that a command prints, nothing where it does not run."""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stdout.splitlines() or [""])[0]
    return ""


def _nvrtc() -> str:
    with contextlib.suppress(ImportError, RuntimeError):
        return ".".join(map(str, importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()))
    return ""


def _made(left: Sequence[Piece], cache: Path | None) -> Iterator[tuple[Piece, Mapping[str, Any] | Exception]]:
    """Every piece with its entries, or why there are none, as they are done; the host's first, while nothing else runs.

    A piece that fails is none of the file's: the next run takes it again.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="digests-") as folder:
        setting = (str(cache.resolve() if cache else Path(folder) / "kernels"), str(Path(folder) / "settings"))
        for processes, is_host in ((1, True), (PROCESSES, False)):
            own = [each for each in left if (each.where == "host") is is_host]
            if not own:
                continue
            with ProcessPoolExecutor(processes, spawn, _begin, setting) as pool:
                asked = {pool.submit(entries_of, each): each for each in own}
                try:
                    for each in as_completed(asked):
                        error = each.exception()
                        yield asked[each], each.result() if error is None else _only(error)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise


def _only(error: BaseException) -> Exception:
    """An error of a piece; raises any other, such as that of a process that was killed."""
    if not isinstance(error, Exception) or isinstance(error, BrokenProcessPool):
        raise error
    return error


def _begin(cache: str, settings: str) -> None:
    """A process with an empty cache, without anybody's own devices and tuned tiles."""
    os.environ |= {"FLASHGEN_CACHE_DIR": cache, "FLASHGEN_CONFIG_DIR": settings, "FLASHGEN_PROGRESS": "0"}


def entries_of(piece: Piece) -> Mapping[str, Any]:
    """Those of one piece, in whatever process."""
    if piece.where == "host":
        from tools.digests import host

        return host.entries_of(piece)
    from tools.digests import programs

    return programs.entries_of(piece)


def _write(file: Path, known: Mapping[str, Any]) -> None:
    """All of it, in one step."""
    beside = file.with_name(f"{file.name}.part")
    beside.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    beside.replace(file)


def _part(text: str) -> tuple[int, int]:
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError(text)
    return k, n


# -- compare -----------------------------------------------------------------------------------------------------------


def _compare(given: argparse.Namespace) -> int:
    old, new = (json.loads(each.read_text(encoding="utf-8")) for each in (given.old, given.new))
    said, differs = compare(old, new)
    print("\n".join(said))
    return int(differs)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What differs, in sentences, and whether code does."""
    said = [
        f"{name}: {old['about'].get(name)} before, {new['about'].get(name)} now"
        for name in sorted({*old["about"], *new["about"]})
        if name not in ("sources", "commit") and old["about"].get(name) != new["about"].get(name)
    ]
    both = set(old["pieces"]) & set(new["pieces"])
    for taken, other, where in ((old, new, "old"), (new, old, "new")):
        alone = len(set(taken["pieces"]) - set(other["pieces"]))
        said += [f"only the {where} file has {alone} programs, which are not compared"] if alone else []
    before, after = (_of_pieces(each["entries"], both) for each in (old, new))
    moved = _renamed(before, after)
    unequal = [
        f"other code: {key}" for key in sorted(before.keys() & after.keys()) if _is_other(before[key], after[key])
    ]
    unequal += [f"gone: {key}" for key in sorted(before.keys() - after.keys() - moved.keys())]
    unequal += [f"new: {key}" for key in sorted(after.keys() - before.keys() - set(moved.values()))]
    said += [f"renamed: {one} is {two}" for one, two in sorted(moved.items())]
    said += unequal
    for key in sorted(before.keys() & after.keys()):
        said += [f"{each}: {key}" for each in _figures(before[key], after[key])]
    code = sum("digest" in before[key] for key in before)
    said.append(f"{code} kernels and functions of {len(both)} programs; {len(unequal)} differ")
    return said, bool(unequal)


def _of_pieces(entries: Entries, wanted: set[str]) -> Entries:
    return {key: entry for key, entry in entries.items() if key.rpartition("/")[0] in wanted}


def _renamed(before: Entries, after: Entries) -> Mapping[str, str]:
    """By its key before, the entry of the same program that has the same code under a name that is new."""
    by_code = {(key.rpartition("/")[0], after[key].get("digest")): key for key in after.keys() - before.keys()}
    gone = {key: (key.rpartition("/")[0], before[key].get("digest")) for key in before.keys() - after.keys()}
    return {key: by_code[code] for key, code in gone.items() if code[1] is not None and code in by_code}


def _is_other(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.get("digest") != after.get("digest")


def _figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What an entry takes more of, or what is another."""
    for name, what in _TAKEN.items():
        if after.get(name, 0) > before.get(name, 0):
            yield f"{after[name]} {what}, {before.get(name, 0)} before"
    for name, what in _SAME.items():
        if before.get(name) != after.get(name):
            yield f"{after.get(name)} {what}, {before.get(name)} before"
    was, now = before.get("microseconds"), after.get("microseconds")
    if was is not None and now is not None and now > SLOWER * was:
        yield f"{now:.1f} µs of the host, {was:.1f} before"
