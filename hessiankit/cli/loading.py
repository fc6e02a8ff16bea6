"""Models for the command line, and batches of text for them: a Hugging Face folder, the user's function, a tiny model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import Transformer
from hessiankit.cli.options import SOURCES
from hessiankit.cli.text import VOCAB_SIZE, TextDataset
from hessiankit.support.errors import InputError, did_you_mean

NAME = "load_model"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model", "tokenizer.model")
TINY = {"d_model": 64, "d_ff": 256, "n_layers": 3, "n_heads": 4}
TINY_LENGTH = 512


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that maps token ids to logits, in evaluation mode, and where its parameters come from.

    Attributes:
        vocabulary: Number of token ids it knows, None where that cannot be seen.
        longest: Tokens of the longest sequence it takes, None where that cannot be seen.
        tokenizer: A Hugging Face tokenizer, None where tokens are bytes.
    """

    model: nn.Module
    name: str
    origin: str
    vocabulary: int | None = None
    longest: int | None = None
    tokenizer: Any = None

    @property
    def tokens(self) -> str:
        """The kind of tokens, in words."""
        return "bytes" if self.tokenizer is None else f"tokens of its own tokenizer ({type(self.tokenizer).__name__})"

    def __str__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        return f"{self.name}: {type(self.model).__name__}, {size:,} parameters, {self.origin}"


def load_model(
    source: str, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """Return the model of a source, as --model takes it. Nothing is downloaded.

    Args:
        source: ``"tiny"``: a byte-level :class:`hessiankit.Transformer` with 3 blocks of width 64. A folder that
            ``save_pretrained`` wrote, or its ``config.json``: a causal language model of transformers; where the folder has
            no weights, or the file is named, they are drawn with the seed, and ``origin`` says so.
            ``"module:function"``: what the function returns when it is called without arguments; modules of the current folder
            are found.
        seed: Seed of parameters that are drawn.
        device: Device that the model is put on.
        dtype: Type of its floating-point parameters; None leaves them as they are.

    Raises:
        InputError: If the source is none of these, a package is missing or broken, weights do not belong to the model, or what
            the function returns is no module.

    >>> loaded = load_model("tiny")
    >>> loaded.vocabulary, loaded.origin
    (256, 'parameters drawn with seed 0')
    """
    path = Path(source).expanduser()
    if source == "tiny":
        tiny = Transformer(VOCAB_SIZE, **TINY, activation="gelu", causal=True, max_len=TINY_LENGTH, seed=seed)  # type: ignore[arg-type]
        result = LoadedModel(tiny, "tiny", f"parameters drawn with seed {seed}", VOCAB_SIZE, TINY_LENGTH)
    elif path.exists():
        model, origin, tokenizer = _from_files(path, seed)
        result = LoadedModel(model, path.resolve().name if path.is_dir() else str(path), origin, *_known(model), tokenizer)
    elif ":" in source:
        result = _from_function(source, seed)
    else:
        raise InputError(f"{NAME}: {source!r} is not an existing path; expected {SOURCES} (nothing is downloaded)")
    place(NAME, result.model.eval(), device, dtype)
    return result


def place(caller: str, model: nn.Module, device: str | torch.device, dtype: torch.dtype | None) -> None:
    """Put a model on a device, in a dtype; the error names both."""
    try:
        model.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError) as error:
        why = f"{one_line(error)}; name one that torch can use"
        raise InputError(f"{caller}: cannot put {type(model).__name__} on device={str(device)!r}: {why}") from error


def text_batch(loaded: LoadedModel, text: TextDataset, batch_size: int, length: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random windows of a text as token ids and next token ids, both ``(batch_size, length)`` of torch.int64.

    Tokens are the text's bytes, or those of the model's own tokenizer, without special ones. The seed draws where windows begin.

    Raises:
        InputError: If the model takes fewer tokens or knows fewer ids, or the text is too short.
    """
    if loaded.longest is not None and length > loaded.longest:
        raise InputError(f"text_batch: length={length}, and {loaded.name} takes at most {loaded.longest} tokens; ask for fewer")
    generator = torch.Generator().manual_seed(seed)
    if loaded.tokenizer is None:
        if loaded.vocabulary is not None and loaded.vocabulary < VOCAB_SIZE:
            give = f"bytes need {VOCAB_SIZE}: give a folder with its tokenizer, or a model of a larger vocabulary"
            raise InputError(f"{NAME}: {loaded.name} knows {loaded.vocabulary} token ids and has no tokenizer; {give}")
        return text.batch(batch_size, length, generator)
    ids = _encoded(loaded, text, batch_size, length + 1, generator)
    return ids[:, :-1], ids[:, 1:]


def _encoded(loaded: LoadedModel, text: TextDataset, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Return (batch_size, length) ids: windows of bytes that are long enough to give as many tokens."""
    state, size = generator.get_state(), 0
    ids: list[list[int]] = [[]]
    while min(map(len, ids)) < length:
        if size == len(text) - 1:
            raise InputError(f"{NAME}: {text.name} gives fewer than {length} tokens; give more text or ask for shorter windows")
        size = min(2 * size or 6 * length, len(text) - 1)
        generator.set_state(state)
        windows, _ = text.batch(batch_size, size, generator)
        strings = [bytes(row).decode("utf-8", "replace") for row in windows.tolist()]
        ids = [loaded.tokenizer(string, add_special_tokens=False)["input_ids"][:length] for string in strings]
    largest = max(map(max, ids))
    if loaded.vocabulary is not None and largest >= loaded.vocabulary:
        range_note = f"the model knows 0 to {loaded.vocabulary - 1}: they do not belong together"
        raise InputError(f"{NAME}: the tokenizer of {loaded.name} gives id {largest}, {range_note}")
    return torch.tensor(ids, device="cpu")


def _from_function(source: str, seed: int) -> LoadedModel:
    """Return the model that ``module:function`` returns."""
    module_name, _, function_name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as ``python -m`` does, and an installed command does not
    try:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever a user's module raises
            raise InputError(
                f"{NAME}: cannot import {module_name!r} for {source!r}: {one_line(error)}; expected {SOURCES}"
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            hint = did_you_mean(function_name, [name for name, value in vars(module).items() if callable(value)])
            raise InputError(
                f"{NAME}: {module_name!r} has no function {function_name!r}{hint or '; name one that returns an nn.Module'}"
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                model = function() if not isinstance(function, nn.Module) else function
            except Exception as error:
                raise InputError(f"{NAME}: {source} raised {one_line(error)}; it is called without arguments") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(model, nn.Module):
        raise InputError(f"{NAME}: {source} returned {type(model).__name__}; expected an nn.Module that maps token ids to logits")
    return LoadedModel(model, source, f"as {source} made it, torch seeded with {seed}", *_known(model))


def _known(model: nn.Module) -> tuple[int | None, int | None]:
    """Return the size of a model's vocabulary and its longest context, by configuration or embedding; None where unknown."""
    config = getattr(model, "config", None)
    rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    rows += [m.embedding.W_E.shape[0] for m in model.modules() if isinstance(m, Transformer)]
    vocabulary = getattr(config, "vocab_size", None)
    longest = getattr(config, "max_position_embeddings", None)
    return (vocabulary if isinstance(vocabulary, int) else max(rows, default=None)), longest if isinstance(longest, int) else None


def _from_files(path: Path, seed: int) -> tuple[nn.Module, str, Any]:
    """Return the model of a folder, or of a configuration file with drawn weights, their origin, and its tokenizer or None."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        why = f"which cannot be imported ({one_line(error)}); pip install 'hessiankit[models]', or pass 'module:function'"
        raise InputError(f"{NAME}: {path} is a model of transformers, {why}") from error
    folder, files = path if path.is_dir() else path.parent, {"local_files_only": True}
    weights = path.is_dir() and any((folder / name).exists() for name in WEIGHTS)
    make, info, tokenizer, part = transformers.AutoModelForCausalLM, {}, None, f"{path} as a causal language model"
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
            expectation = "expected a folder that save_pretrained wrote, or its config.json"
            hint = "(docs/howto/install.md on a torchvision of another torch)"
            raise InputError(f"{NAME}: transformers cannot load {part}: {one_line(error)}; {expectation} {hint}") from error
    model.config.use_cache = False  # keys and values of a pass are not needed again
    if absent_names := sorted(info.get("missing_keys", ())):
        count, kind = len(absent_names), type(model).__name__
        why = (
            f"{count} parameters of {kind} are not among the weights of {folder}, {absent_names[0]} for one, and would be random"
        )
        raise InputError(f"{NAME}: {why}; save the whole model with save_pretrained, or name config.json to draw all of them")
    origin = f"built from {folder / 'config.json' if path.is_dir() else path} without weights: parameters drawn with seed {seed}"
    return model, f"weights of {folder}" if weights else origin, tokenizer


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
    """Return an error and its first cause on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
