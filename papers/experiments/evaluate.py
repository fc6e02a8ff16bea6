"""``python -m papers evaluate``."""

from __future__ import annotations

from pathlib import Path

from hessiankit.cli.options import Json, Positive
from hessiankit.cli.program import OK, command
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json

EXAMPLES = (
    ("python -m papers evaluate runs/hybridnorm-fig1 --tokenizer olmo", "Table 1 of HybridNorm, beside its print"),
    ("python -m papers evaluate runs --tasks hellaswag --tasks piqa", "two tasks on every model in a folder"),
)
app = command("evaluate", EXAMPLES)


@app.default
def run(
    runs: Path,
    /,
    *,
    tasks: tuple[str, ...] = (),
    tokenizer: Path | None = None,
    include: Path | None = None,
    limit: Positive | None = None,
    batch: Positive = 8,
    device: str = "cpu",
    output: Json = Json(),
) -> int:
    """Evaluate trained models on downstream tasks by lm-evaluation-harness, beside the papers' accuracies.

    It takes the runs that python -m papers train finished. lm-evaluation-harness (pip install lm-eval) loads the data of its
    tasks from Hugging Face's hub, or from its cache.

    Args:
        runs: A folder with finished runs.
        tasks: Tasks of lm-evaluation-harness (may be repeated); by default those of the paper's table.
        tokenizer: Folder of the tokenizer that made the shards; without it tokens are bytes.
        include: Folder of further tasks, a YAML file each.
        limit: Documents of a task; by default all.
        batch: Sequences that the model takes at once.
        device: Device of the models, e.g. cuda.
    """
    from hessiankit.support.tables import as_text, table
    from papers.experiments.downstream import evaluated, tokenizer_of
    from papers.experiments.runs import finished_in

    found, encoding = finished_in(runs), tokenizer_of(tokenizer)
    if not found:
        raise InputError(f"evaluate: {runs} has no finished run; python -m papers train --list names what makes them")
    rows = [row for one in found for row in evaluated(one, tasks, include, limit, tokenizer=encoding, batch=batch, device=device)]
    cells = [[f"{x:.4g}" if isinstance(x, float) else _words(x) for x in row.values()] for row in rows]
    print(as_text(table([*rows[0]], cells, title=str(runs))))
    write_json("evaluate", output.json, rows)
    return OK


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return "{} ({})".format(*value)
    return "" if value is None else str(value)
