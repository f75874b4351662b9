"""Pages that name what the code has, and examples in docstrings."""

import doctest
import importlib
import json
import re
import runpy
import shlex
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from packaging.version import Version

from bench.command import make_parser
from trl_qarl import cli
from trl_qarl.scripts import train
from trl_qarl.scripts.command_line import option_names, spell, unknown_options


ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]


def test_architecture_names_every_room_and_file_outside():
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "trl_qarl").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == rooms
    outside = text[text.index("Files outside of rooms") : text.index("`benchmarks/` is next")]
    files = {path.name for path in (ROOT / "trl_qarl").glob("*.py")} - {"__init__.py", "_version.py"}
    assert set(re.findall(r"`(\w+[.]py)`", outside)) == files


def test_tests_that_the_documentation_names_are_there():
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^ *def (test_\w+)\(", code, re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`(test_\w+)`", page.read_text())
        assert [name for name in named if name not in there] == [], page.name


def anchors(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = (re.sub(r"\]\(.*?\)", "", title).lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


# Sphinx checks the links of the other pages.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != ROOT / "docs"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_out_of_the_docs_lead_to_a_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def test_tables_of_options_and_rules_are_those_of_the_code():
    pages = runpy.run_path(str(ROOT / "docs/tables.py"))["fill"]()
    assert {page.name for page in pages} == {"options.md", "health.md", "schemes.md"}
    assert [page.name for page, text in pages.items() if page.read_text() != text] == [], "run `python docs/tables.py`"


def test_only_the_named_lines_differ_from_the_grpo_script():
    theirs, ours = (block.splitlines() for block in blocks(ROOT / "examples/from_grpo.md", "python"))
    assert [line for line in theirs if line not in ours] == [
        "from trl import GRPOConfig, GRPOTrainer",
        "args = GRPOConfig(",
        "trainer = GRPOTrainer(",
        "trainer.save_model()",
    ]
    assert len(ours) == len(theirs) + 2


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def shell_commands(page):
    """Words of each command in the page's `sh` fences."""
    return [words for block in blocks(page, "sh") for words in commands_of(block)]


def commands_of(text):
    """Words of each command in lines of a shell, without prompts, comments and variables set for it."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^[\w-]*\$ ", "", line)
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_0-9]+=", words[0]):
            del words[0]
        if words:
            yield [word for word in words if word != "..."]


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=f"{p.stem}: {' '.join(words)[:60]}") for p in PAGES for words in shell_commands(p)],
)
def test_command_of_the_documentation_is_one(words, tmp_path, monkeypatch):
    # The tests are offline; whether the Hub can be reached is not a matter of spelling.
    monkeypatch.setattr("trl_qarl.checks.configuration.problem_of_push", lambda name, token: None)
    program, *arguments = words
    if "run.yaml" in arguments:
        # The page on the command line shows it.
        path = tmp_path / "run.yaml"
        path.write_text(blocks(ROOT / "docs/options.md", "yaml")[0])
        arguments[arguments.index("run.yaml")] = str(path)
    if program in CHECKS_OF_PROGRAMS:
        CHECKS_OF_PROGRAMS[program](arguments)


def check_trl_qarl(arguments):
    """The command's own parser takes the arguments."""
    command, *argv = arguments
    assert command in cli.COMMANDS
    if command == "train":
        parse_train(argv)
        return
    parser = importlib.import_module(f"trl_qarl.scripts.{command.replace('-', '_')}").make_parser(command)
    known = option_names(parser)
    if command == "vllm-serve":
        parser.parse_known_args(spell(argv, known))
    else:
        parser.parse_args(spell(argv, known))


def parse_train(argv):
    """The training script takes the arguments, and `accelerate launch` what it leaves over."""
    *_, rest = train.make_parser().parse_args_and_config(argv, return_remaining_strings=True)
    # The command finds the launch file by its name.
    assert unknown_options(rest, option_names(launch_command_parser()) | {"--accelerate_config"}) == {}


def check_install(arguments):
    """Extras of this package exist; another package is named as itself."""
    assert "install" in arguments
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        assert not word.startswith("trl-qarl"), "on no index"
        if match := re.match(r"\.\[(.*)\]", word):
            assert {*match[1].split(",")} <= {*project["optional-dependencies"]}


def test_the_oldest_versions_of_the_page_are_those_that_pip_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = map(Requirement, [*project["dependencies"], *chain(*project["optional-dependencies"].values())])
    bounds = {each.name: each.specifier for each in required if each.specifier}
    page = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| ([\w-]+)(?: \(extra\))? \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for name, oldest, used in rows:
        lowest = [Version(each.version) for each in bounds[name] if each.operator == ">="]
        assert lowest == [Version(oldest)] and used in bounds[name]


def check_make(arguments):
    assert arguments[0] in re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for argument in arguments[1:]:
        name, _, value = argument.partition("=")
        assert name in ("ARGS", "QUICKSTART_EXTRAS", "TEST_EXTRAS")
        if arguments[0] == "quickstart" and name == "ARGS" and value != "--help":
            check_trl_qarl(["quickstart", *shlex.split(value)])


def check_python(arguments):
    if arguments[:2] == ["-m", "benchmarks.bench"]:
        make_parser().parse_args(arguments[2:])
        return
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"] or (ROOT / arguments[0]).is_file()


CHECKS_OF_PROGRAMS = {
    "trl-qarl": check_trl_qarl,
    "pip": check_install,
    "uv": check_install,
    "make": check_make,
    "python": check_python,
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.name)
def test_yaml_of_the_documentation_is_what_its_command_reads(page, tmp_path):
    for text in blocks(page, "yaml"):
        path = tmp_path / "example.yaml"
        path.write_text(text)
        parse_train(["--config", str(path)])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_of_the_documentation_compiles(page):
    for code in blocks(page, "python"):
        compile(re.sub(r"^>>> ?|^\.\.\. ?", "", code, flags=re.MULTILINE), page.name, "exec")


@pytest.mark.vllm
@pytest.mark.slow
def test_the_readmes_script_runs(tmp_path, monkeypatch):
    for package in ("vllm", "math_verify"):
        pytest.importorskip(package)
    from testing_utils import make_tiny_model, start_engines_quickly
    from trl_qarl.checkpoint.export import is_export

    start_engines_quickly(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (row,) = [{"prompt": [{"role": "user", "content": "What is 1/2?"}], "solution": "$0.5$"}]
    (tmp_path / "train.jsonl").write_text(8 * (json.dumps(row) + "\n"))
    (code,) = blocks(ROOT / "README.md", "python")
    for theirs, ours in {
        '"Qwen/Qwen3-0.6B-Base"': repr(make_tiny_model(tmp_path)),
        '"trl-lib/DeepMath-103K"': '"json", data_files="train.jsonl"',
        # One epoch of the three.
        "use_vllm=True)": "use_vllm=True, num_train_epochs=1)",
    }.items():
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "master weights" in (tmp_path / "qwen3-qarl" / "README.md").read_text()
    assert is_export(tmp_path / "qwen3-qarl-w4a16")


def files_with_examples():
    files = [*(ROOT / "trl_qarl").rglob("*.py"), *(ROOT / "benchmarks" / "study").glob("*.py")]
    # These two load a model.
    needs_model = {"engines/in_process.py", "quantization/swap.py"}
    names = [str(file.relative_to(ROOT)) for file in sorted(files) if "\n    >>> " in file.read_text()]
    return [name for name in names if name.removeprefix("trl_qarl/") not in needs_model]


@pytest.mark.parametrize("name", files_with_examples())
def test_examples_in_docstrings_give_what_they_show(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "study")
    module = name.removesuffix(".py")
    module = importlib.import_module(module.replace("/", ".") if name.startswith("trl_qarl") else Path(module).name)
    runner, parse = doctest.DocTestRunner(), doctest.DocTestParser().get_doctest
    for found in doctest.DocTestFinder().find(module):
        # The fence that ends an example would be taken for its output.
        text = (found.docstring or "").replace("```", "")
        runner.run(parse(text, found.globs, found.name, found.filename, found.lineno))
    assert runner.tries and not runner.failures
