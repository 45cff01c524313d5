"""What all tests share: testbed/, and that some run with every supported version of verl (see tests/matrix)."""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "testbed"))


def pytest_configure(config):
    config.addinivalue_line("markers", "matrix: only in `make test-matrix`")
    config.addinivalue_line("markers", "verl(since, until): the versions of verl that have what is tested")


def pytest_collection_modifyitems(config, items):
    """Leave out tests of what this version of verl does not have."""
    out = []
    for item in items:
        marker = item.get_closest_marker("verl")
        if marker is not None:
            verl = importlib.metadata.version("verl")
            if not marker.kwargs["since"] <= verl < marker.kwargs.get("until", "1"):
                out.append(item)
    items[:] = [item for item in items if item not in out]
    config.hook.pytest_deselected(items=out)
