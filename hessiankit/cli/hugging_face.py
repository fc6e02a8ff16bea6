"""A causal language model of transformers from files: a folder that ``save_pretrained`` wrote, or a configuration."""

from __future__ import annotations

import importlib
import json
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
    config_file = path / "config.json" if path.is_dir() else path
    folder = config_file.parent
    kind = _model_type(config_file)
    transformers = _transformers(path)
    weights = path.is_dir() and any((folder / name).exists() for name in WEIGHTS)
    with _quiet(transformers), torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            config = transformers.AutoConfig.from_pretrained(folder if path.is_dir() else path, local_files_only=True)
            make = transformers.AutoModelForCausalLM
            if weights:
                model, info = make.from_pretrained(folder, config=config, local_files_only=True, output_loading_info=True)
            else:
                model, info = make.from_config(config), {}
        except Exception as error:  # transformers has no base class of its own
            raise InputError(
                f"{WHO}: transformers cannot make a causal language model of {path} (model_type {kind!r}): {one_line(error)}"
            ) from error
        tokenizer = _tokenizer(transformers, folder)
    model.config.use_cache = False  # keys and values of a pass are not needed again
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise InputError(
            f"{WHO}: {len(missing)} parameters of {type(model).__name__} are not among the weights of {folder}, {missing[0]} for "
            "one, and would be random; save the whole model with save_pretrained, or name config.json to draw all of them"
        )
    origin = f"weights of {folder}" if weights else f"built from {config_file} without weights: parameters drawn with seed {seed}"
    return model, origin, tokenizer


def _model_type(config_file: Path) -> str:
    """Return what the configuration says the model is."""
    if not config_file.is_file():
        raise InputError(f"{WHO}: {config_file.parent} has no config.json; expected a folder that save_pretrained wrote")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{WHO}: cannot read {config_file} as JSON: {one_line(error)}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{WHO}: {config_file} names no 'model_type'; expected the config.json of a transformers model")
    return kind


def _transformers(path: Path) -> Any:
    """Import transformers, which takes in a torchvision that it finds, and with one built for another torch fails by any name."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    except Exception as error:
        raise InputError(
            f"{WHO}: {path} is a model of transformers, which imports the torchvision that it finds, and that one is built for "
            f"another torch than {torch.__version__} ({one_line(error)}); pip uninstall torchvision, which no language model "
            "needs, or install the two as a pair (docs/howto/install.md)"
        ) from error
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"{WHO}: {path} is a model of transformers, which cannot be imported ({one_line(error)}); "
            "pip install 'hessiankit[models]', or pass 'module:function'"
        ) from error


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


def _tokenizer(transformers: Any, folder: Path) -> Any:
    """Return the folder's tokenizer, None where it has no file of one."""
    if not any((folder / name).exists() for name in TOKENIZERS):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError(
            f"{WHO}: cannot load the tokenizer in {folder}: {one_line(error)}; remove its files to use bytes"
        ) from error


def one_line(error: BaseException) -> str:
    """Return an error on one line, with what first caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
