"""Models for the command line: what is loaded, from where, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from hessiankit.cli.loading import LoadedModel, load_model, text_batch
from hessiankit.cli.text import TextDataset
from hessiankit.support.errors import InputError

TEXT = TextDataset(torch.tensor(list(b"the quick brown fox jumps over the lazy dog\n" * 40), dtype=torch.uint8), ("fox",), "fox")
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODULE = """
import torch
def model(): return torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Linear(4, 256))

def three(): return 3
def broken(): raise ValueError("no such layer")
number = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)


def parameters(loaded: LoadedModel) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in loaded.model.parameters()])


def test_tiny_and_its_batch_of_bytes() -> None:
    one, again, other = (load_model("tiny", seed=seed, dtype=torch.float64) for seed in (1, 1, 2))
    assert parameters(one).dtype == torch.float64
    assert torch.equal(parameters(one), parameters(again))
    assert not torch.equal(parameters(one), parameters(other))
    assert not one.model.training
    inputs, targets = text_batch(one, TEXT, 3, 10, seed=4)
    assert inputs.shape == targets.shape == (3, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in bytes(TEXT.tokens.tolist())
    assert torch.equal(inputs, text_batch(one, TEXT, 3, 10, seed=4)[0])
    assert not torch.equal(inputs, text_batch(one, TEXT, 3, 10, seed=5)[0])


@pytest.mark.usefixtures("here")
class TestFunction:
    def test_module_of_the_current_folder(self) -> None:
        state = torch.get_rng_state()
        one, again = (load_model("models_of_mine:model", seed=3) for _ in range(2))
        assert torch.equal(parameters(one), parameters(again))
        assert torch.equal(torch.get_rng_state(), state)
        assert one.vocabulary == 256
        assert text_batch(one, TEXT, 2, 5)[0].shape == (2, 5)
        assert str(Path.cwd()) not in sys.path

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("models_of_mine:three", "returned int; expected an nn.Module"),
            ("models_of_mine:broken", "raised ValueError: no such layer"),
            ("models_of_mine:number", "has no function 'number'"),
            ("no_such_module:f", "cannot import 'no_such_module'"),
        ],
    )
    def test_errors(self, source: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            load_model(source)


class TestFiles:
    def test_a_configuration_without_weights_says_so(self, config: Path) -> None:
        pytest.importorskip("transformers")
        for source in (config, config / "config.json"):
            one, other = (load_model(str(source), seed=seed) for seed in (5, 6))
            assert "without weights: parameters drawn with seed 5" in one.origin
            assert not torch.equal(parameters(one), parameters(other))
            assert (one.vocabulary, one.longest, one.tokenizer) == (256, 32, None)

    def test_saved_weights_and_those_of_a_smaller_model(self, config: Path, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        one = load_model(str(config), seed=5)
        one.model.save_pretrained(tmp_path / "saved")
        again = load_model(str(tmp_path / "saved"), seed=7)
        assert torch.equal(parameters(one), parameters(again))
        assert again.origin == f"weights of {tmp_path / 'saved'}"
        file = tmp_path / "saved" / "config.json"
        drawn = load_model(str(file), seed=7)  # the file alone asks for the configuration
        assert not torch.equal(parameters(one), parameters(drawn))
        file.write_text(json.dumps({**json.loads(file.read_text()), "n_layer": 2}))  # transformers would draw what is missing
        with pytest.raises(InputError, match=r"12 parameters of GPT2LMHeadModel are not among the weights of .*h\.1\.attn"):
            load_model(str(tmp_path / "saved"))

    def test_own_tokenizer(self, config: Path) -> None:
        transformers = pytest.importorskip("transformers")
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2, "lazy": 3}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(config)
        loaded = load_model(str(config))
        assert "own tokenizer" in loaded.tokens
        inputs, targets = text_batch(loaded, TEXT, 2, 20)
        assert inputs.shape == targets.shape == (2, 20)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert set(inputs.unique().tolist()) == {0, 1, 2, 3}
        with pytest.raises(InputError, match="fox gives fewer than 1001 tokens"):
            text_batch(LoadedModel(loaded.model, "m", "", 256, None, loaded.tokenizer), TEXT, 1, 1000)
        with pytest.raises(InputError, match="gives id 3, the model knows 0 to 2: they do not belong together"):
            text_batch(LoadedModel(loaded.model, "m", "", 3, None, loaded.tokenizer), TEXT, 2, 20)

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("config.json", "{", "not a valid JSON file"),
            ("config.json", '{"vocab_size": 256}', "`model_type` key in its config.json"),
            ("config.json", '{"model_type": "vit"}', "ViTConfig"),
            ("tokenizer.json", "{", "the tokenizer in .*JSON"),
        ],
    )
    def test_files_that_transformers_cannot_load(self, config: Path, file: str, content: str, message: str) -> None:
        pytest.importorskip("transformers")
        (config / file).write_text(content)
        with pytest.raises(InputError, match=f"transformers cannot load .*{message}.*; expected a folder"):
            load_model(str(config))


def test_no_transformers(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'hessiankit\[models\]', or pass 'module:function'"):
        load_model(str(config))
