import subprocess
import sys
from importlib.metadata import version

from trl_qarl.packages import installed


def test_versions_are_those_of_what_is_installed_in_the_order_asked_for():
    assert list(installed("torch", "no-such-package", "packaging").items()) == [
        ("torch", version("torch")),
        ("packaging", version("packaging")),
    ]


def test_no_package_is_loaded_for_its_version():
    code = "import sys\nfrom trl_qarl.packages import installed\nassert installed('torch', 'trl')\n"
    code += "assert not {'torch', 'trl', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
