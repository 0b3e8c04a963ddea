"""fixedformer: a fixed transformer runs another computation because a program tells it to.

Names are loaded on first use, so that `import fixedformer` and `fixedformer --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module. Each family adds its lines here and below for type checkers.
_HOME = {
    "FixedformerError": "errors",
    "SpecError": "errors",
    "CapacityError": "errors",
    "CertificateError": "errors",
    "StorageError": "errors",
    "Check": "certificate",
    "Certificate": "certificate",
    "TargetSpec": "target",
    "Target": "target",
    "Card": "target",
    "one_hot": "inputs",
    "AttentionSimulator": "prompt.simulator",
    "Prompt": "prompt.simulator",
}

if TYPE_CHECKING:
    from fixedformer.certificate import Certificate, Check
    from fixedformer.errors import CapacityError, CertificateError, FixedformerError, SpecError, StorageError
    from fixedformer.inputs import one_hot
    from fixedformer.prompt.simulator import AttentionSimulator, Prompt
    from fixedformer.target import Card, Target, TargetSpec

__all__ = [
    "AttentionSimulator",
    "CapacityError",
    "Card",
    "Certificate",
    "CertificateError",
    "Check",
    "FixedformerError",
    "Prompt",
    "SpecError",
    "StorageError",
    "Target",
    "TargetSpec",
    "one_hot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fixedformer' has no attribute '{name}'")
    value = getattr(import_module(f"fixedformer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
