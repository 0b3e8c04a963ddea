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
    "DivergedError": "errors",
    "Check": "certificate",
    "Certificate": "certificate",
    "TargetSpec": "target",
    "Target": "target",
    "Card": "target",
    "one_hot": "inputs",
    "save_target": "files",
    "load_target": "files",
    "SparseMachine": "embedding.sparse",
    "RandomMachine": "embedding.dense",
    "FrozenMachine": "embedding.dense",
    "Program": "embedding.program",
    "save_program": "embedding.files",
    "load_program": "embedding.files",
    "build_machine": "embedding.files",
    "widths": "embedding.widths",
    "lower_bound": "embedding.shared_attention",
    "from_hf": "imports",
    "from_torch": "imports",
    "from_transformer_lens": "imports",
    "from_tracr": "imports",
    "BlockSpec": "embedding.blocks.spec",
    "BlockTarget": "embedding.blocks.target",
    "BlockProgram": "embedding.blocks.program",
    "SparseBlockMachine": "embedding.blocks.sparse",
    "save_block_target": "embedding.blocks.files",
    "load_block_target": "embedding.blocks.files",
    "save_block_program": "embedding.blocks.files",
    "load_block_program": "embedding.blocks.files",
    "build_block_machine": "embedding.blocks.files",
    "RandomBlockMachine": "embedding.blocks.dense",
    "SharedAttentionMachine": "embedding.shared_attention",
    "LoopedApproximator": "loop.approximator",
    "LoopProgram": "loop.program",
    "lipschitz": "loop.moduli",
    "save_loop_program": "loop.files",
    "load_loop_program": "loop.files",
    "LoopedTransformer": "loop.transformer",
    "LoopedSpec": "loop.looped_spec",
    "save_looped": "loop.looped_files",
    "load_looped": "loop.looped_files",
    "AttentionSimulator": "prompt.simulator",
    "Prompt": "prompt.simulator",
    "FrozenBlocks": "schedule.blocks",
    "Schedule": "schedule.program",
    "save_schedule": "schedule.files",
    "load_schedule": "schedule.files",
    "save_search": "schedule.files",
    "load_search": "schedule.files",
    "decompile": "embedding.decompile",
    "Decompiled": "embedding.decompile",
    "shrink": "embedding.decompile",
    "hankel_spectrum": "embedding.decompile",
    "same_program": "embedding.compare",
    "certify_equal": "embedding.converse",
    "agreement": "embedding.distil",
}

if TYPE_CHECKING:
    from fixedformer.certificate import Certificate, Check
    from fixedformer.embedding.blocks.dense import RandomBlockMachine
    from fixedformer.embedding.blocks.files import (
        build_block_machine,
        load_block_program,
        load_block_target,
        save_block_program,
        save_block_target,
    )
    from fixedformer.embedding.blocks.program import BlockProgram
    from fixedformer.embedding.blocks.sparse import SparseBlockMachine
    from fixedformer.embedding.blocks.spec import BlockSpec
    from fixedformer.embedding.blocks.target import BlockTarget
    from fixedformer.embedding.compare import same_program
    from fixedformer.embedding.converse import certify_equal
    from fixedformer.embedding.decompile import Decompiled, decompile, hankel_spectrum, shrink
    from fixedformer.embedding.dense import FrozenMachine, RandomMachine
    from fixedformer.embedding.distil import agreement
    from fixedformer.embedding.files import build_machine, load_program, save_program
    from fixedformer.embedding.program import Program
    from fixedformer.embedding.shared_attention import SharedAttentionMachine, lower_bound
    from fixedformer.embedding.sparse import SparseMachine
    from fixedformer.embedding.widths import widths
    from fixedformer.errors import (
        CapacityError,
        CertificateError,
        DivergedError,
        FixedformerError,
        SpecError,
        StorageError,
    )
    from fixedformer.files import load_target, save_target
    from fixedformer.imports import from_hf, from_torch, from_tracr, from_transformer_lens
    from fixedformer.inputs import one_hot
    from fixedformer.loop.approximator import LoopedApproximator
    from fixedformer.loop.files import load_loop_program, save_loop_program
    from fixedformer.loop.looped_files import load_looped, save_looped
    from fixedformer.loop.looped_spec import LoopedSpec
    from fixedformer.loop.moduli import lipschitz
    from fixedformer.loop.program import LoopProgram
    from fixedformer.loop.transformer import LoopedTransformer
    from fixedformer.prompt.simulator import AttentionSimulator, Prompt
    from fixedformer.schedule.blocks import FrozenBlocks
    from fixedformer.schedule.files import load_schedule, load_search, save_schedule, save_search
    from fixedformer.schedule.program import Schedule
    from fixedformer.target import Card, Target, TargetSpec

__all__ = [
    "AttentionSimulator",
    "BlockProgram",
    "BlockSpec",
    "BlockTarget",
    "CapacityError",
    "Card",
    "Certificate",
    "CertificateError",
    "Check",
    "Decompiled",
    "DivergedError",
    "FixedformerError",
    "FrozenBlocks",
    "FrozenMachine",
    "LoopProgram",
    "LoopedApproximator",
    "LoopedSpec",
    "LoopedTransformer",
    "Program",
    "Prompt",
    "RandomBlockMachine",
    "RandomMachine",
    "Schedule",
    "SharedAttentionMachine",
    "SparseBlockMachine",
    "SparseMachine",
    "SpecError",
    "StorageError",
    "Target",
    "TargetSpec",
    "agreement",
    "build_block_machine",
    "build_machine",
    "certify_equal",
    "decompile",
    "from_hf",
    "from_torch",
    "from_tracr",
    "from_transformer_lens",
    "hankel_spectrum",
    "lipschitz",
    "load_block_program",
    "load_block_target",
    "load_loop_program",
    "load_looped",
    "load_program",
    "load_schedule",
    "load_search",
    "load_target",
    "lower_bound",
    "one_hot",
    "same_program",
    "save_block_program",
    "save_block_target",
    "save_loop_program",
    "save_looped",
    "save_program",
    "save_schedule",
    "save_search",
    "save_target",
    "shrink",
    "widths",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fixedformer' has no attribute '{name}'")
    value = getattr(import_module(f"fixedformer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
