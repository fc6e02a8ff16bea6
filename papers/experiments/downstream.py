"""Downstream tasks of trained models: the adapter to lm-evaluation-harness, and the papers' printed accuracies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hessiankit.cli.text import VOCAB_SIZE
from hessiankit.support.errors import InputError
from papers.curse_of_depth import tables as curse
from papers.experiments.catalogue import name_of
from papers.experiments.runs import Run
from papers.experiments.spec import Spec
from papers.hybridnorm import tables as hybrid

Pair = tuple[list[int], list[int]]
"""Tokens of a context, and of its continuation."""


class Tokenizer(NamedTuple):
    """Text to tokens and back, and the token before the first of a document."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    start: int


BYTES = Tokenizer(lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace"), ord("\n"))
"""Tokens of ``hessiankit.cli.text``."""


def tokenizer_of(folder: Path | None) -> Tokenizer:
    """Return the tokenizer of Hugging Face in a folder, or bytes.

    Raises:
        InputError: transformers is not installed, or the folder has no tokenizer.
    """
    if folder is None:
        return BYTES
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        why = "--tokenizer is read by transformers, which is not installed; pip install transformers"
        raise InputError(f"evaluate: {why}") from error
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"evaluate: {folder} has no tokenizer that transformers reads; pass its folder") from error
    start = found.eos_token_id if found.bos_token_id is None else found.bos_token_id
    return Tokenizer(partial(found.encode, add_special_tokens=False), lambda tokens: str(found.decode(tokens)), start)


class Likelihoods:
    """What lm-evaluation-harness asks of a causal language model: its class ``LM`` without the import.

    Args:
        model: Tokens ``(B, T)`` to logits ``(B, T, V)``.
        vocabulary: Kinds of tokens.
        length: Tokens that the model takes.
        tokenizer: Text to tokens and back.
        batch: Sequences that the model takes at once.
        device: Device of the model.
    """

    def __init__(
        self, model: Any, vocabulary: int, length: int, tokenizer: Tokenizer = BYTES, *, batch: int = 8, device: str = "cpu"
    ) -> None:
        super().__init__()
        self.model, self.place, self.batch = model.to(device).eval(), torch.device(device), batch
        self.vocabulary, self.length, self.tokens = vocabulary, length, tokenizer

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) for the ``args`` of each request, and whether each token is the likeliest."""
        return self._scores([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return log p(text) of each request; a text longer than the model takes is cut into windows, the last one full."""
        sums = []
        for request in requests:
            tokens = self._encode(request.args[0])
            before = [self.tokens.start, *tokens]
            pairs = [(before[: k + 1], tokens[k : k + self.length]) for k in range(0, len(tokens), self.length)]
            sums.append(sum(value for value, _ in self._scores(pairs)))
        return sums

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the likeliest next tokens of each context as text, up to a stop or to the number asked for."""
        texts = []
        for context, options in (request.args for request in requests):
            stops = [options["until"]] if isinstance(options["until"], str) else options["until"]
            tokens, text = self._encode(context) or [self.tokens.start], ""
            count = len(tokens)
            while len(tokens) - count < options.get("max_gen_toks", 256) and not any(stop in text for stop in stops):
                inputs = torch.tensor([tokens[-self.length :]], device=self.place)
                tokens.append(int(self.model(inputs)[0, -1].argmax()))
                text = self.tokens.decode(tokens[count:])
            texts.append(text[: min((text.index(stop) for stop in stops if stop in text), default=None)])
        return texts

    def _encode(self, text: str) -> list[int]:
        tokens = self.tokens.encode(text)
        if max(tokens, default=0) >= self.vocabulary:
            raise InputError(f"evaluate: the tokenizer gives the token {max(tokens)}; the model has {self.vocabulary} of them")
        return tokens

    def _pair(self, context: str, continuation: str) -> Pair:
        """Encode both as one text; spaces between them begin the continuation, as in training."""
        words = context.rstrip()
        before, whole = self._encode(words), self._encode(context + continuation)
        return (before, whole[len(before) :]) if before else ([self.tokens.start], whole)

    @torch.no_grad()
    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        found = []
        for k in range(0, len(pairs), self.batch):
            part = pairs[k : k + self.batch]
            rows = [[*before, *after][-self.length - 1 :] for before, after in part]
            inputs = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)  # a causal model reads no later token
            for tokens, row in zip(inputs, rows, strict=True):
                tokens[: len(row) - 1] = torch.tensor(row[:-1])
            logits = self.model(inputs.to(self.place)).float().cpu()
            for (_, after), row, values in zip(part, rows, logits, strict=True):
                if len(after) > self.length:
                    raise InputError(f"evaluate: a continuation has {len(after)} tokens; the model takes {self.length}")
                targets, own = torch.tensor(after), values[len(row) - 1 - len(after) : len(row) - 1]
                log_p = own.log_softmax(-1).gather(1, targets[:, None])
                found.append((float(log_p.sum()), bool((own.argmax(-1) == targets).all())))
        return found


TASKS = {
    "HellaSwag": "hellaswag", "SciQ": "sciq", "ARC-C": "arc_challenge", "ARC-E": "arc_easy", "ARC-e": "arc_easy", "PIQA": "piqa",
    "OpenbookQA": "openbookqa", "OBQA": "openbookqa", "COPA": "copa", "WinoGrande": "winogrande", "BoolQ": "boolq",
    "MMLU": "mmlu",
}  # fmt: skip
"""Tasks of lm-evaluation-harness by the papers' names; it has none for HybridNorm's BasicArithmetic."""
SHARPNESS_TASKS = ("ARC-E", "ARC-C", "PIQA", "HellaSwag", "OBQA", "WinoGrande", "SciQ")
SHARPNESS = {
    "AdamW": (52.69, 22.87, 68.71, 36.13, 19.40, 55.17, 77.60),
    "Blockwise LR": (54.29, 25.34, 69.53, 38.00, 22.60, 59.83, 81.60),
}
"""Table 1 of The Sharpness Disparity Principle."""


def _accuracies(rows: hybrid.Rows) -> dict[str, tuple[float, ...]]:
    """Return the accuracies of a table whose entries are losses and negative accuracies."""
    return {arm: tuple(-number for number in row[3:]) for arm, row in rows.items()}


PRINTED: dict[tuple[str, str], tuple[str, Sequence[str], Mapping[str, Sequence[float]]]] = {
    ("hybridnorm/fig1", "1.2B"): ("Table 1", hybrid.TABLE_1_TASKS, hybrid.TABLE_1),
    ("hybridnorm/fig3", "MoE-1B-7B"): ("Table 2", hybrid.TABLE_2_TASKS, hybrid.TABLE_2),
    ("hybridnorm/table4", "550M"): ("Table 4", ("HellaSwag",), _accuracies({**hybrid.TABLE_4, **hybrid.TABLE_4_OURS})),
    ("hybridnorm/table5", "550M"): ("Table 5", ("HellaSwag", "PIQA"), _accuracies(hybrid.TABLE_5[16])),
    ("hybridnorm/table5", "543M"): ("Table 5", ("HellaSwag", "PIQA"), _accuracies(hybrid.TABLE_5[29])),
    ("sharpness-disparity/fig4", "LLaMA (1.1B)"): ("Table 1", SHARPNESS_TASKS, SHARPNESS),
    ("curse-of-depth/table1", "250M"): ("Table 2, fine-tuned", curse.TASK_NAMES, curse.TABLE_2["250M"]),
    ("curse-of-depth/table1", "1B"): ("Table 2, fine-tuned", curse.TASK_NAMES, curse.TABLE_2["1B"]),
}  # fmt: skip
"""Accuracies in print, by experiment and model: their place, tasks, and percents by method."""


def printed(spec: Spec) -> dict[str, tuple[float, str]]:
    """Return the accuracies in print of a run's method, percents with their place, by task of lm-evaluation-harness."""
    place, tasks, rows = PRINTED.get((name_of(spec) or "", spec.size), ("", (), {}))
    pairs = zip(tasks, rows.get(spec.arm, ()), strict=False)
    return {TASKS[task]: (percent, place) for task, percent in pairs if task in TASKS}


def evaluated(run: Run, tasks: Sequence[str], include: Path | None, limit: int | None, **options: Any) -> list[dict[str, Any]]:
    """Return a row for each number that lm-evaluation-harness computes of a run's model, accuracies in percent.

    Args:
        run: The run.
        tasks: Names of tasks; by default those of the paper's table.
        include: Folder of further tasks, a YAML file each.
        limit: Documents of a task; by default all.
        **options: Arguments of :class:`Likelihoods`.

    Raises:
        InputError: lm-evaluation-harness is not installed or does not know a task, or the run is of images.
    """
    spec, known = run.spec, printed(run.spec)
    if spec.image:
        raise InputError(f"evaluate: {spec.name} is a classifier of images; expected a language model")
    if not tasks and not known:
        raise InputError(f"evaluate: the paper prints no downstream accuracy of {spec.name}; name tasks with --tasks")
    if options.get("tokenizer", BYTES) is BYTES and spec.vocabulary != VOCAB_SIZE:
        tokens = f"{spec.name} has {spec.vocabulary:,} kinds of tokens, which are not bytes"
        raise InputError(f"evaluate: {tokens}; pass the folder of its tokenizer with --tokenizer")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError("evaluate: lm-evaluation-harness is not installed; pip install lm-eval") from error
    manager = TaskManager(include_path=include)
    for task in tasks:
        if task not in manager.all_tasks:
            raise InputError(
                f"evaluate: lm-evaluation-harness has no task {task}; lm-eval ls tasks names them, --include adds yours"
            )
    adapter = type("Adapter", (Likelihoods, LM), {})(run.model(), spec.vocabulary, spec.length, **options)
    asked = [*tasks] or [*known]
    found = simple_evaluate(adapter, tasks=asked, limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False)
    rows = []
    for task in asked:
        for key, value in found["results"][task].items():
            metric = key.partition(",")[0]
            if isinstance(value, float) and "stderr" not in metric:
                percent = metric.startswith("acc")
                row = {"model": spec.size, "method": spec.arm, "seed": spec.seed, "task": task, "metric": metric}
                row |= {"value": 100 * value if percent else value, "in print": known.get(task) if percent else None}
                rows.append(row)
    return rows
