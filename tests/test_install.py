"""The installer's one decision."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("install", Path(__file__).parents[1] / "install.py")
install = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install)


@pytest.mark.parametrize(
    ("platform", "gpu", "chosen", "wanted"),
    [
        ("linux", False, "2.13.0", True),
        ("linux", False, "2.13.0+cpu", False),
        ("linux", True, "2.13.0", False),
        ("darwin", False, "2.13.0", False),
        ("win32", False, "2.13.0", False),
    ],
)
def test_cpu_index_only_where_pip_would_take_cuda(platform, gpu, chosen, wanted):
    assert install.needs_cpu_index(platform, gpu, chosen) is wanted
