"""``python -m papers evaluate``: likelihoods against one token after the other, the papers' tables, and a task of one's own."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hessiankit.blocks import Transformer
from hessiankit.support.errors import InputError
from papers.__main__ import main
from papers.experiments.catalogue import EXPERIMENTS, specs
from papers.experiments.downstream import BYTES, PRINTED, TASKS, Likelihoods, Tokenizer, printed, tokenizer_of
from papers.experiments.runs import read_run, train_run
from papers.experiments.tokens import shards_of

LENGTH = 8


class Request(NamedTuple):
    """What lm-evaluation-harness passes for one document, as far as an adapter reads it."""

    args: tuple[Any, ...]


@pytest.fixture
def model() -> Transformer:
    return Transformer(256, 8, 16, 2, 2, "pre", max_len=LENGTH, causal=True, seed=3).double()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Finished runs of one experiment with accuracies in print, of one with other tokens than bytes, and of one of images."""
    for name, changes in (("hybridnorm/fig1", {}), ("curse-of-depth/table8", {"vocabulary": 300}), ("curvature-gap/mnist", {})):
        for own in list(specs(name, "tiny", steps=2, batch_size=2, windows=2, every=0, **changes).values())[:1]:
            train_run(own[0], tmp_path / name / own[0].name)
    return tmp_path


def log_p(model: Transformer, before: list[int]) -> Tensor:
    """The log probabilities of the next token, from a sequence alone."""
    return model(torch.tensor([before[-LENGTH:]]))[0, -1].log_softmax(-1)


PAIRS = {
    "a context and a continuation": ("ab", "cd"),
    "a context that is cut on the left": ("a longer text", "end"),
    "no context: the token before a document": ("", "xyz"),
    "spaces between them begin the continuation": ("ab  ", "c"),
    "as long as the model takes": ("q", "12345678"),
    "letters of several bytes": ("é", "ü"),
}


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 4])
def test_likelihoods_are_those_of_one_token_after_the_other(model: Transformer, batch: int) -> None:
    found = Likelihoods(model, 256, LENGTH, batch=batch).loglikelihood([Request(pair) for pair in PAIRS.values()])
    for (context, continuation), (value, likeliest) in zip(PAIRS.values(), found, strict=True):
        words = context.rstrip()
        tokens = list((context[len(words) :] + continuation).encode())
        row = [*(list(words.encode()) or [10]), *tokens][-LENGTH - 1 :]  # one window for all tokens of a continuation
        steps = [(log_p(model, row[:k]), row[k]) for k in range(len(row) - len(tokens), len(row))]
        assert value == pytest.approx(sum(float(p[token]) for p, token in steps), rel=1e-5)
        assert likeliest == all(int(p.argmax()) == token for p, token in steps)


@torch.no_grad()
def test_a_text_longer_than_the_model_takes_is_read_in_windows_of_which_the_last_is_full(model: Transformer) -> None:
    text = "twenty tokens, twice"
    row = [10, *text.encode()]
    # the first eight tokens after the line break, the next eight after the last of these, and the last four in a full window
    starts = [0] * 8 + [8] * 8 + [12] * 4
    expected = sum(float(log_p(model, row[starts[k] : k + 1])[row[k + 1]]) for k in range(20))
    assert Likelihoods(model, 256, LENGTH).loglikelihood_rolling([Request((text,))]) == pytest.approx([expected], rel=1e-5)


@torch.no_grad()
def test_a_generated_text_is_the_likeliest_and_ends_before_a_stop(model: Transformer) -> None:
    adapter = Likelihoods(model, 256, LENGTH, Tokenizer(BYTES.encode, lambda tokens: "".join(map(chr, tokens)), 10))
    tokens = list(b"ab")
    for _ in range(6):
        tokens.append(int(log_p(model, tokens).argmax()))
    text = "".join(map(chr, tokens[2:]))
    options = {"until": ["no such stop"], "max_gen_toks": 6}
    assert adapter.generate_until([Request(("ab", options))]) == [text]
    assert text.index(text[1]) < text.index(text[5])
    for stops in (text[5], [text[5], text[1], "none"]):
        assert adapter.generate_until([Request(("ab", {**options, "until": stops}))]) == [text[: min(map(text.find, stops[:2]))]]


def test_a_tokenizer_of_a_folder(tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    found = tokenizer_of(tmp_path)
    assert (found.encode("b a b"), found.start, found.decode([2, 1])) == ([2, 1, 2], 0, "b a")  # none of its own is added


def test_accuracies_in_print() -> None:
    for (name, size), (_, tasks, rows) in PRINTED.items():
        assert size in EXPERIMENTS[name].models
        assert rows.keys() <= EXPERIMENTS[name].arms.keys()
        assert {len(row) for row in rows.values()} == {len(tasks)}
        assert {*tasks} - TASKS.keys() <= {"BasicArithmetic", "average"}
    star = specs("hybridnorm/fig1", "tiny")["1.2B", "HybridNorm*"][0]
    assert printed(star)["hellaswag"] == (65.12, "Table 1")
    assert printed(specs("hybridnorm/table5", "tiny")["543M", "HybridNorm"][0])["piqa"] == (72.62, "Table 5")
    assert printed(replace(star, size="151M")) == {}


REFUSALS: dict[str, tuple[list[str], str]] = {
    "not installed": (["hybridnorm", "--tasks", "piqa"], "lm-evaluation-harness is not installed; pip install lm-eval"),
    "images": (["curvature-gap", "--tasks", "piqa"], "is a classifier of images; expected a language model"),
    "other tokens": (
        ["curse-of-depth", "--tasks", "piqa"],
        "has 300 kinds of tokens, which are not bytes; pass the folder of its",
    ),
    "nothing printed": (["curse-of-depth"], "the paper prints no downstream accuracy of curse-of-depth-table8-130m-pre-ln-0"),
    "no run": (["hybridnorm/none", "--tasks", "piqa"], "has no finished run; python -m papers train --list"),
    "tokenizer": (["hybridnorm", "--tokenizer", "nowhere"], "nowhere has no tokenizer that transformers reads"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder, *words), message = REFUSALS[name]
    if name == "tokenizer":
        pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(trained / folder), *words]) == 2
    assert message in capsys.readouterr().err


def test_what_a_model_does_not_take(model: Transformer) -> None:
    for adapter, pair, message in (
        (Likelihoods(model, 256, LENGTH), ("a", "123456789"), "a continuation has 9 tokens; the model takes 8"),
        (Likelihoods(model, 100, LENGTH), ("a", "~"), "the tokenizer gives the token 126; the model has 100 of them"),
    ):
        with pytest.raises(InputError, match=message):
            adapter.loglikelihood([Request(pair)])


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
"""
CHOICE = (
    TASK
    + """
output_type: multiple_choice
doc_to_choice: "{{{{endings}}}}"
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
)
ROLLING = (
    TASK.replace("context", "whole")
    + """
output_type: loglikelihood_rolling
doc_to_target: "{{{{whole}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
)


def test_a_task_of_ones_own_by_the_harness(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = pytest.importorskip("lm_eval.tasks")
    assert {*TASKS.values()} <= {*harness.TaskManager().all_tasks}
    rows = [{"context": f"for i in range({k}", "endings": ["):", ")", "zz", "\n"], "gold": k % 4} for k in range(10)]
    rows = [{**row, "whole": row["context"] + row["endings"][row["gold"]]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choice", CHOICE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(task.format(name=name, data=tmp_path / "rows.jsonl"))
    words = ["evaluate", str(trained / "hybridnorm"), "--include", str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert main([*words, "--tasks", "choice", "--tasks", "rolling"]) == 0
    accuracy, bits = json.loads((tmp_path / "found.json").read_text())
    run = read_run(next((trained / "hybridnorm").rglob("run.pt")).parent)
    adapter = Likelihoods(run.model(), 256, run.spec.length)
    right = [
        np.argmax([value for value, _ in adapter.loglikelihood([Request((row["context"], end)) for end in row["endings"]])])
        for row in rows
    ]
    assert accuracy["value"] == pytest.approx(100 * np.mean([k == row["gold"] for k, row in zip(right, rows, strict=True)]))
    nats = -sum(adapter.loglikelihood_rolling([Request((row["whole"],)) for row in rows]))
    assert bits["value"] == pytest.approx(nats / math.log(2) / sum(len(row["whole"]) for row in rows), rel=1e-5)
    assert main([*words, "--tasks", "no such task"]) == 2
    assert "has no task no such task; lm-eval ls tasks names them" in capsys.readouterr().err


def test_parquet_shards_are_read_as_bin_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for name, start, count in (("a", 0, 90), ("val", 90, 40)):
        tokens = np.arange(start, start + count) * 7 % 300
        for kind in ("bin", "parquet"):
            (tmp_path / kind).mkdir(exist_ok=True)
        tokens.astype(np.uint16).tofile(tmp_path / "bin" / f"{name}.bin")
        rows = [row.tolist() for row in np.split(tokens, [17, 30])]  # documents of several lengths, one after the other
        datasets.Dataset.from_dict({"input_ids": rows}).to_parquet(tmp_path / "parquet" / f"{name}.parquet")
    one, other = shards_of(str(tmp_path / "bin")), shards_of(str(tmp_path / "parquet"))
    assert one is not None
    assert other is not None
    for bins, parquet in zip(one, other, strict=True):
        assert len(bins) == len(parquet)
        assert [x.tolist() for x in bins.windows(8, 5)] == [x.tolist() for x in parquet.windows(8, 5)]
