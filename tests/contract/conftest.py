"""These tests run with every supported version of verl (see tests/matrix)."""

import importlib.metadata


def pytest_configure(config):
    config.addinivalue_line("markers", "verl(since): the first version of verl that has what is tested")


def pytest_collection_modifyitems(config, items):
    """Leave out tests of what this version of verl does not have."""
    verl = importlib.metadata.version("verl")
    out = [item for item in items if (marker := item.get_closest_marker("verl")) and verl < marker.kwargs["since"]]
    items[:] = [item for item in items if item not in out]
    config.hook.pytest_deselected(items=out)
