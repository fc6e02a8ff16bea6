"""A causal language model of transformers from files: a folder that ``save_pretrained`` wrote, or a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hessiankit.support.errors import InputError

WHO = "load_model"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model", "tokenizer.model")


def from_files(path: Path, seed: int) -> tuple[nn.Module, str, Any]:
    """Return the model of a folder or of a configuration file, where its parameters come from, and its tokenizer or None.

    Nothing is downloaded.

    Args:
        path: A folder with ``config.json``, or such a file: then its weights are drawn.
        seed: Of parameters that are drawn.

    Raises:
        InputError: If transformers is missing, the files hold no causal language model, or weights are missing.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"{WHO}: {path} is a model of transformers, which cannot be imported ({one_line(error)}); "
            "pip install 'hessiankit[models]', or pass 'module:function'"
        ) from error
    folder, files = path if path.is_dir() else path.parent, {"local_files_only": True}
    weights = path.is_dir() and any((folder / name).exists() for name in WEIGHTS)
    make, info, tokenizer = transformers.AutoModelForCausalLM, {}, None
    part = f"{path} as a causal language model"
    with _quiet(transformers), torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            config = transformers.AutoConfig.from_pretrained(path, **files)
            if weights:
                model, info = make.from_pretrained(folder, config=config, output_loading_info=True, **files)
            else:
                model = make.from_config(config)
            if any((folder / name).exists() for name in TOKENIZERS):
                part = f"the tokenizer in {folder}"
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **files)
        except Exception as error:  # transformers has no base class of its own
            raise InputError(
                f"{WHO}: transformers cannot load {part}: {one_line(error)}; expected a folder that "
                "save_pretrained wrote, or its config.json (docs/howto/install.md on a torchvision of another torch)"
            ) from error
    model.config.use_cache = False  # keys and values of a pass are not needed again
    if missing := sorted(info.get("missing_keys", ())):
        raise InputError(
            f"{WHO}: {len(missing)} parameters of {type(model).__name__} are not among the weights of {folder}, {missing[0]} for "
            "one, and would be random; save the whole model with save_pretrained, or name config.json to draw all of them"
        )
    drawn = f"built from {folder / 'config.json' if path.is_dir() else path} without weights: parameters drawn with seed {seed}"
    return model, f"weights of {folder}" if weights else drawn, tokenizer


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' own remarks and bars from the output."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """Return an error on one line, with what first caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
