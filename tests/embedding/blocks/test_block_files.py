"""Round trips, and files that are not what they say."""

import pytest
import torch
from cases import KINDS, inputs

import fixedformer as ff
from fixedformer import storage


@pytest.mark.parametrize("name", ["GPT-2-like", "SwiGLU"])
def test_target_round_trip_keeps_every_bit(name, tmp_path):
    spec, path = KINDS[name], tmp_path / "t.safetensors"
    card = ff.Card(("a", "b"), "causal", "two letters")
    target = ff.BlockTarget(spec, card=card, **ff.BlockTarget.random(spec, dtype=torch.float32).weights)
    ff.save_block_target(target, path)
    back = ff.load_block_target(path)
    assert (back.spec, back.card, back.dtype) == (spec, card, torch.float32)
    assert back.weights.keys() == target.weights.keys()
    assert all(torch.equal(back.weights[name], tensor) for name, tensor in target.weights.items())
    with pytest.raises(ff.StorageError, match="holds a block target, a target was needed"):
        ff.load_target(path)


@pytest.mark.parametrize("name", ["ReLU MLP, biases, no skip", "SwiGLU, no skip"])
@pytest.mark.parametrize("build", [
    ff.SparseBlockMachine,
    lambda spec: ff.RandomBlockMachine(spec, seed=3, width=600, neurons_per_target=1.25, distribution="uniform"),
], ids=["sparse", "random"])  # fmt: skip
def test_program_round_trip_and_machine_from_its_description(build, name, tmp_path):
    machine, path = build(KINDS[name]), tmp_path / "p.safetensors"
    program = machine.compile(ff.BlockTarget.random(machine.spec))
    ff.save_block_program(program, path)
    back = ff.load_block_program(path)
    assert back.report == program.report
    again = ff.build_block_machine(back.spec, back.machine)
    assert again.fingerprint() == back.machine_fingerprint == machine.fingerprint()
    X = inputs(machine.spec)
    assert torch.equal(again.run(back, X), machine.run(program, X))
    with pytest.raises(ff.StorageError, match="a program was needed"):
        ff.load_program(path)


def test_files_that_lie(tmp_path):
    machine, path = ff.SparseBlockMachine(KINDS["SwiGLU"]), tmp_path / "p.safetensors"
    program = machine.compile(ff.BlockTarget.random(machine.spec))
    program.embedding[0, 0] = torch.nan
    ff.save_block_program(program, path)
    with pytest.raises(ff.StorageError, match="embedding holds NaN"):
        ff.load_block_program(path)
    header = storage.read_header(path)
    storage.write(path, "block program", {"embedding": program.embedding}, header.body)
    with pytest.raises(ff.StorageError, match="constants"):
        ff.load_block_program(path)
    storage.write(path, "block program", {"embedding": program.embedding}, header.body | {"spec": {"heads": 0}})
    with pytest.raises(ff.StorageError, match="header is malformed"):
        ff.load_block_program(path)
    with pytest.raises(ff.SpecError, match="no machine with MLPs"):
        ff.build_block_machine(machine.spec, {"kind": "sparse"})
