"""The command line as a whole: help, examples, ``--json``, exit codes, errors, colours, completion."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from curvature_reference import jacobian_rows

import hessiankit
from hessiankit import blocks
from hessiankit.blocks import GATED, PLACEMENTS
from hessiankit.cli import program as exit_codes
from hessiankit.cli.main import COMMANDS, app, main
from hessiankit.cli.options import Activation, Norm
from hessiankit.cli.program import with_dashes
from hessiankit.theory.formulas.chapters import CHAPTERS
from hessiankit.theory.formulas.theorems import CHAPTER_NAMES
from hessiankit.training.monitoring.lines import Lines
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import CheckRow

ROOT = Path(hessiankit.__file__).parents[1]
PARTS = [{"name": name, "type": name, "layer": 0, "role": "", "reason": "", "size": 2} for name in ("FFN", "Norm")]
HEADER = {"model": "Linear", "entries": 4, "parts": PARTS, "options": {}}
MODELS = """
import torch
from hessiankit import Transformer
from torch import nn
def make(): return nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 2))
def language(): return Transformer(256, 4, 8, 1, n_heads=1, causal=True, max_len=16)
def silent(): return nn.Identity()
"""
QUICK = {
    "sharpness": "--model my_models:language --text notes.txt --batch 2 --length 8 --draws 2",
    "bounds": "--tokens 2 --d-model 2 --d-ff 2",
}
"""Options that make the examples of a command quick; the last one counts."""
AS_THEY_ARE = re.compile("--(all|exact)|hessiankit study")
"""Examples that are not run: slow ones, and those that tests/cli/test_study.py and test_terminal.py run."""


EXAMPLES = [command for name in COMMANDS for command, _ in import_module(f"hessiankit.cli.{name}").EXAMPLES]


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments that the command of these words is called with."""
    return app.parse_args(with_dashes(words), exit_on_error=False, print_error=False)[1].arguments


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the examples speak of."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    lines = Lines(tmp_path / "run.jsonl", HEADER)
    lines.append({"step": 0, "loss": 2.0, "norms": {"total": 5.0, "types": {"FFN": 3.0, "Norm": 4.0}}})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    monkeypatch.setattr("hessiankit.cli.study.QUICK", {"d_model": 4, "d_ff": 5, "patch": 4, "steps": 20, "batch": 2})
    return tmp_path


def words(example: str) -> list[str]:
    first, *found = shlex.split(example)
    assert first == "hessiankit"
    return found


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches(name: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(name, capsys=capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert "--json" in text
    assert "Exit codes: 0 done; " in text
    for argument in app[name].assemble_argument_collection(parse_docstring=True):
        assert argument.parameter.help or argument.children, argument.name
    module = import_module(f"hessiankit.cli.{name}")
    assert 2 <= len(module.EXAMPLES) <= 3
    joined = " ".join(text.split())
    assert all(f"• {command} {what}" in joined for command, what in module.EXAMPLES)


def test_no_command_prints_the_help(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text == help_of(capsys=capsys)
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_parse(example: str) -> None:
    assert words(example)[0] in COMMANDS
    assert parsed(words(example)) or example in ("hessiankit sharpness", "hessiankit study", "hessiankit compile")


def test_the_page_of_the_documentation_parses() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    commands = re.findall(r"^hessiankit .*?(?= +#| 2>|$)", page, flags=re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        parsed(words(command))
    assert all(f"\n| `{name}` |" in page for name in COMMANDS)
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == {
        *(exit_codes.OK, exit_codes.FAILED, exit_codes.USAGE, exit_codes.INTERRUPTED, exit_codes.CLOSED)
    }


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in EXAMPLES if not AS_THEY_ARE.search(e)])
def test_examples_run(example: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words(example)
    quick = QUICK.get(given[0], "")
    assert main([*given, *quick.split()]) == 0
    printed = capsys.readouterr().out
    assert printed or "--out" in given
    if "--json" in given and given[-1] in ("-", "--json"):
        json.loads(printed)


@pytest.mark.parametrize(
    "command",
    [
        "check --model my_models:make --shape 2,6",
        "hessian --tokens 2",
        "derive --wrt down",
        "bounds --tokens 2 --d-model 2 --d-ff 2",
        "monitor run.jsonl",
        "sharpness --model my_models:language --text notes.txt --batch 2 --length 8 --draws 2",
    ],
)
def test_json_alone_on_standard_output(command: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert main(shlex.split(f"{command} --json -")) == 0
    alone = capfd.readouterr()
    found = json.loads(alone.out, parse_constant=refuse)
    assert found
    assert alone.err  # what people read is there


def test_files_are_refused_before_anything_is_computed(here: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["hessiankit.theory.bounding.bounds"], "bounds", lambda *_, **__: pytest.fail("computed"))
    (here / "folder").mkdir()
    (here / "locked").write_text("")
    for path, why in (("no/such/x.json", "there is no folder no/such"), ("folder", "it is a folder")):
        assert main(["bounds", "--json", path]) == exit_codes.USAGE
        assert f"hessiankit: bounds: cannot write {path}: {why}; name a file" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may write anywhere
    assert main(["bounds", "--json", "locked"]) == exit_codes.USAGE
    assert "cannot write locked: permission denied" in capsys.readouterr().err


AT_ONCE = [
    ("derive --no-such", "derive: Unknown option: --no-such."),
    ("monitor", 'monitor: Command "monitor" parameter FILE requires an argument.'),
    ("chek", 'Unknown command "chek". Did you mean "check"? Available commands: study, check, hessian, '),
    ("check --placment pre", "check: Unknown option: --placment. Did you mean --placement?"),
    (
        "derive --format latx",
        'Invalid value "latx" for --format. Choose from: "text", "explain", "latex", "json". Did you mean "latex"?',
    ),
    ("derive --wrt", "derive: "),
    ("check --seed", "check: "),
    (
        "derive --placement prenorm",
        "derive: --placement 'prenorm' is not known; did you mean 'pre'? All 49 names: --list-placements",
    ),
    ("derive --layer 7 --layers 3", "derive: --layer 7 of --layers 3; expected 1 to 3"),
    ("derive --wrt query key value", "is not one or two names"),
    ("derive --wrt down --out no/file", "derive: cannot write"),
    ("derive layernorm --heads 2", "--heads describes a block and 'layernorm' is none"),
    ("monitor nowhere.jsonl", "monitor: cannot read nowhere.jsonl: No such file"),
    ("check", "no model; add --model, or --placement for one block"),
    ("check --model my_models:make --shape 10,6 --placement pre", "--placement describes a block"),
    ("check --shape 10,6", "--shape is of a model; add --model"),
    ("check --tokens 3 --table", "--tokens is of one model or block"),
    ("hessian --model my_models:make --heads 2 --shape 10 6", "--heads describes a block"),
    ("hessian --model my_models:make --shape 10 6 --tokens 3", "--tokens does not go with --shape"),
    ("hessian --model my_models:language --text notes.txt --loss mse", "the next token is a label"),
    ("hessian --plot H.gif", "cannot draw H.gif"),
    ("hessian --plot H.png --dry-run", "--plot needs the matrix"),
    ("hessian --out notes.txt", "hessian: notes.txt exists; --resume continues it, --overwrite replaces it"),
    ("hessian --overwrite", "hessian: --overwrite is of a file; add --out"),
    ("sharpness --model nowhere", "--model 'nowhere' is not an existing path; expected 'tiny', a folder"),
    ("hessian --model tiny --text nowhere", "--text 'nowhere' is neither 'stdlib' nor an existing path"),
    ("sharpness --model . --draws 2", "--model '.' is no model; expected 'tiny', a folder"),
    ("check --model notes.txt --shape 2 3", "--model 'notes.txt' is no model; expected 'tiny', a folder"),
    ("check --model no_models:make --shape 2 3", "there is no module 'no_models' in this folder or installed; expected 'tiny'"),
    ("check --model :make --shape 2 3", "there is no module '' in this folder or installed"),
    ("bounds --heads 2 --kv-heads 3", "bounds: Attention: n_kv_heads=3 does not divide n_heads=2"),
    ("hessian --heads 3", "hessian: Attention: d_model=4 does not split into n_heads=3 equal heads"),
    ("derive --heads 2 --kv-heads 4", "derive: Attention: n_kv_heads=4 does not divide n_heads=2"),
    ("check --placement pre --heads 4 --rotary", "check: Attention: rotary positions turn pairs of features, and d_k=1 is odd"),
    ("study --out notes.txt/folder", "study: cannot make the folder notes.txt/folder: Not a directory; name another one"),
    ("derive thm3", "'thm3' is not known; did you mean 'curvature-gap/thm3'?"),
]
"""Refused before torch is imported."""
REFUSED = [
    *AT_ONCE,
    ("hessian --model my_models:mak --shape 10,6", "'my_models' has no function 'mak'; did you mean 'make'?"),
    (
        "hessian --params attention.W_q",
        "params=['attention.W_q']: this TransformerBlock has no such parameter; did you mean",
    ),
    ("hessian --model tiny --device abacus", "on device='abacus'"),
    ("hessian --model tiny --tokens 513 --text notes.txt", "hessian: length=513, and tiny takes at most 512 tokens"),
    ("study --device nowhere --quick", "nowhere"),
    ("derive --wrt queri", "derive: wrt='queri' is not known; did you mean 'query'"),
    ("check --model my_models:make", "pass the shape of the inputs that it takes with --shape"),
    ("hessian --model my_models:make", "does not take the tokens of a text (RuntimeError: mat1"),
    ("hessian --model my_models:make --shape 10 5", "does not take inputs of shape [10, 5]"),
    ("hessian --model my_models:silent --shape 2 3", "no parameter"),
    ("hessian --model tiny", "a 197,504 x 197,504 torch.float64 matrix and its work space take"),
    ("hessian --d-model 300000", "pass a smaller --d-model or --d-ff"),
    ("hessian --batch 1000000 --tokens 100000", "pass a smaller --batch, --tokens or --d-model"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_errors_are_one_line_that_names_what_was_typed_and_what_was_meant(given: str, message: str, here: Path, capsys) -> None:
    assert main(given.split()) == exit_codes.USAGE
    seen = capsys.readouterr()
    (told,) = seen.err.splitlines()
    assert message in told
    assert told.startswith("hessiankit")
    assert given.startswith("hessian") or not seen.out  # which says first what it is of


def test_help_and_errors_that_need_no_torch_come_before_it_is_imported(here: Path) -> None:
    code = f"""
import sys
from hessiankit.cli.main import main
main(["--help"])
for line in {[given for given, _ in AT_ONCE]}:
    main(line.split())
    heavy = {{'torch', 'numpy', 'scipy', 'sympy', 'matplotlib'}} & set(sys.modules)
    assert not heavy, (line, heavy)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(AT_ONCE)


def test_the_names_in_help_are_those_of_the_registries() -> None:
    assert set(get_args(Activation)) == {*blocks.ACTIVATIONS, *GATED}
    assert get_args(Norm) == blocks.NORMS
    assert tuple(CHAPTERS) == CHAPTER_NAMES


def numeric_options() -> list[tuple[str, str]]:
    """Commands with their options that take a number."""
    arguments = [(name, argument) for name in COMMANDS for argument in app[name].assemble_argument_collection()]
    numbers = [(name, a.name) for name, a in arguments if re.search(r"\b(int|float)\b", str(a.hint)) and not a.children]
    assert {"--scale", "--confidence", "--seed", "--heads", "--shape"} <= {option for _, option in numbers}
    return numbers


def test_numbers_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option in numeric_options():
        for value in ("-1", "nan", "inf", "1e400", "x"):
            assert main([name, f"{option}={value}"]) == exit_codes.USAGE
            said = capsys.readouterr().err
            assert said.startswith(f"hessiankit: {name}: Invalid value")
            assert option in said
            assert said.count("\n") == 1


def test_placements_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--list-placements"])
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == list(PLACEMENTS)


def test_interrupted(here: Path, monkeypatch, capsys) -> None:
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hessiankit.training.monitoring.log.MonitorLog.read", stopped)
    assert main(["monitor", "run.jsonl"]) == exit_codes.INTERRUPTED == 130
    assert capsys.readouterr().err == "hessiankit: interrupted\n"


@pytest.mark.parametrize("command", [["derive", "--list"], ["check", "--list-placements"]])
def test_a_reader_that_stops_reading(command: list[str]) -> None:
    given = [sys.executable, "-m", "hessiankit", *command]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == exit_codes.CLOSED


def test_python_runs_it_as_a_module() -> None:
    assert python("-m", "hessiankit", "--version").stdout == f"hessiankit {hessiankit.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    script = app.generate_completion(shell=shell)
    assert {"hessian", "kv-heads", "latex"} <= set(re.findall(r"[\w-]+", script.replace("--", " ")))


def test_hessian_is_the_library_s(here: Path) -> None:
    given = "hessian --model my_models:make --shape 10 6 --seed 3 --out H.npy --plot H.svg --json H.json --params 0.weight 2.bias"
    assert main(given.split()) == 0
    sys.path.insert(0, str(here))
    try:
        import my_models  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(here))
    torch.manual_seed(3)
    model = my_models.make().double()
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(10, n, generator=generator, dtype=torch.float64) for n in (6, 2))
    chosen = [model[0].weight, model[2].bias]
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(((model(x) - y) ** 2).mean(), chosen, create_graph=True)])
    reference = jacobian_rows(gradient, chosen).numpy()
    found = np.load("H.npy")
    assert np.abs(found - reference).max() <= 1e-10 * np.abs(reference).max()
    assert json.loads(Path("H.json").read_text())["hessian"]["parameters"] == len(reference) == 20
    assert Path("H.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_check_is_the_library_s(here: Path, capsys, monkeypatch) -> None:
    without = partial(check, formulas=False)  # which take longer than all else
    monkeypatch.setattr(sys.modules["hessiankit.verify.check"], "check", without)
    given = ["--seed", "3", "--loss", "cross_entropy", "--json", "found.json"]
    assert main(["check", "--model", "my_models:make", "--shape", "10,6", *given]) == 0
    assert "shape 10 x 6, seed 3; drawn labels; cross_entropy, float64" in capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    assert found["report"]["passed"]
    assert main(["hessian", "--model", "my_models:make", "--shape", "10", "6", *given]) == 0
    assert json.loads(Path("found.json").read_text())["data"] == found["data"]
    assert main(["check", "--placement", "qk-pre", "--heads", "2", "--params", "*.W_Q", "--json", "found.json"]) == 0
    assert json.loads(Path("found.json").read_text())["model"].startswith("TransformerBlock, qk-pre, ")


def test_a_module_that_disagrees_is_exit_code_one(here: Path, monkeypatch) -> None:
    def disagrees(*given: object, **options: object) -> CheckReport:
        wrong = CheckRow("0.weight x 0.weight", "made up", 1.0, passed=False, seconds=0.0)
        return replace(check(*given, **options), rtol=0.0, rows=(wrong,))  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["hessiankit.verify.check"], "check", disagrees)
    assert main(["check", "--model", "my_models:make", "--shape", "2,6"]) == exit_codes.FAILED


def test_a_forecast_that_does_not_fit_is_exit_code_one(here: Path, monkeypatch) -> None:
    given = ["hessian", "--model", "my_models:make", "--shape", "10", "6", "--dry-run"]
    assert main(given) == exit_codes.OK
    monkeypatch.setattr("hessiankit.curvature.forecast.available_memory", lambda _: 0)
    assert main(given) == exit_codes.FAILED
