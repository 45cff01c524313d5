"""The configurations of the stack: those of `collector/` and `deploy/`, with the addresses of this machine."""

from collections.abc import Mapping
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parents[1]

FILES = _CHECKOUT if (_CHECKOUT / "collector" / "local.yaml").is_file() else _HERE / "files"
"""The folder with `collector/` and `deploy/`: the checkout, or in an installed package the copies in it."""

COLLECTOR = FILES / "collector"
DEPLOY = FILES / "deploy"


def for_this_machine(path: Path, addresses: Mapping[str, str]) -> str:
    """The text of a file in which containers have names, such as `alertmanager:9093`.

    Args:
        addresses: by what is in the file, what shall be in its place.
    """
    text = path.read_text(encoding="utf-8")
    for name, address in addresses.items():
        text = text.replace(name, address)
    return text
