"""Files: round trips, golden header, and an attack on every part of them."""

import json
import os
import signal
import struct
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

import fixedformer as ff
from fixedformer import storage

SPEC = ff.TargetSpec(heads=2, layers=1, d_in=3, d_head=2, d_out=2)


@pytest.fixture
def target():
    return ff.Target.random(SPEC, seed=1, d_model=4, dtype=torch.float32)


def read_raw(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_raw(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_target_round_trip_keeps_every_bit(tmp_path, target):
    path = tmp_path / "t.safetensors"
    card = ff.Card(("a", "b", "c"), "causal", "three letters")
    ff.save_target(ff.Target(SPEC, **target.weights.named(), card=card), path)
    back = ff.load_target(path)
    assert back.spec == SPEC
    assert back.card == card
    assert back.dtype == torch.float32
    for name, tensor in target.weights.named().items():
        assert torch.equal(tensor, back.weights.named()[name])


@pytest.mark.parametrize("machine", [
    ff.SparseMachine(SPEC), ff.SparseMachine(SPEC, looped=True, width=30),
    ff.RandomMachine(SPEC, seed=3, width=25, distribution="gaussian"),
    ff.RandomMachine(SPEC, looped=True, dtype=torch.float32),
], ids=repr)  # fmt: skip
def test_program_round_trip_and_machine_from_its_description(tmp_path, target, machine):
    program, path = machine.compile(target), tmp_path / "p.safetensors"
    ff.save_program(program, path)
    back = ff.load_program(path)
    assert torch.equal(back.embedding, program.embedding)
    assert back.report == program.report
    rebuilt = ff.build_machine(back.spec, back.machine)
    assert rebuilt.fingerprint() == back.machine_fingerprint == machine.fingerprint()
    X = torch.tensor([0, 2, 1])
    assert torch.equal(rebuilt.run(back, X), machine.run(program, X))


def test_own_weights_cannot_be_rebuilt_from_words():
    with pytest.raises(ff.SpecError, match="its weights are your own"):
        ff.build_machine(SPEC, {"kind": "frozen"})


def test_header_is_what_the_format_says(tmp_path, target):
    path = tmp_path / "t.safetensors"
    ff.save_target(target, path)
    header, _ = read_raw(path)
    meta = header["__metadata__"]
    assert (meta["format"], meta["version"], meta["kind"]) == ("fixedformer", "1", "target")
    body = json.loads(meta["body"])
    assert body["spec"] == {"heads": 2, "layers": 1, "d_in": 3, "d_head": 2, "d_out": 2, "residual": False,
                            "positions": None, "rotary_base": 10000.0}  # fmt: skip
    assert storage.read_header(path).shapes["query"] == (1, 2, 4, 2)


def test_attacks(tmp_path, target):
    """Truncated, foreign, wrong kind, wrong version, lying shapes, flipped bits, malformed headers: StorageError."""
    path = tmp_path / "t.safetensors"
    ff.save_target(target, path)
    whole = path.read_bytes()
    header, body = read_raw(path)

    def refused(message, load=ff.load_target):
        with pytest.raises(ff.StorageError, match=message):
            load(path)

    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused("not a whole safetensors file")
    path.write_bytes(b"\x80\x04\x95 a pickle, say" * 10)
    refused("not a whole safetensors file")
    save_file({"query": torch.ones(2)}, path)
    refused("not one of fixedformer's")
    path.write_bytes(whole)
    refused("holds a target, a program was needed", ff.load_program)

    def with_metadata(**changes):
        changed = {**header, "__metadata__": {**header["__metadata__"], **changes}}
        write_raw(path, changed, body)

    with_metadata(version="2")
    refused("file version 2, this release reads version 1")
    with_metadata(body="[]")
    refused("no JSON object")
    with_metadata(body="{")
    refused("not a whole safetensors file")
    info = json.loads(header["__metadata__"]["body"])
    with_metadata(body=json.dumps(info | {"d_model": 5}))
    refused("tensor 'embed' should be .*by the header")
    with_metadata(body=json.dumps(info | {"spec": info["spec"] | {"heads": 0}}))
    refused("the header is malformed .heads must be a whole number")
    with_metadata(body=json.dumps(info | {"spec": {"heads": 1}}))
    refused("the header is malformed")
    with_metadata(body=json.dumps({}))
    refused("the header is malformed")
    with_metadata(body=json.dumps(info | {"card": info["card"] | {"mask": "odd"}}))
    refused("does not match its digest")
    del header["__metadata__"]["digest"]
    write_raw(path, header, body)
    refused("the header lacks digest")
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(bytes(flipped))
    refused("does not match its digest")
    path.unlink()
    refused("no such file")


def test_lying_shapes_are_seen_before_a_tensor_is_loaded(tmp_path, target, monkeypatch):
    path = tmp_path / "p.safetensors"
    ff.save_program(ff.SparseMachine(SPEC).compile(target), path)
    header, body = read_raw(path)
    info = json.loads(header["__metadata__"]["body"])
    info["machine"]["width"] = 19
    header["__metadata__"]["body"] = json.dumps(info)
    write_raw(path, header, body)

    def loaded(*_):
        raise AssertionError("a tensor was loaded before the shapes were checked")

    monkeypatch.setattr(storage, "digest", loaded)
    with pytest.raises(ff.StorageError, match=r"tensor 'embedding' should be \(3, 19\) by the header"):
        ff.load_program(path)


def test_no_place_to_write(tmp_path):
    with pytest.raises(ff.StorageError, match="is the folder there and writable"):
        storage.write_atomic(tmp_path / "none" / "x", b"1")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "x"
    storage.write_atomic(path, b"old")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ff.StorageError, match="No space left on device"):
        storage.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_kill_in_the_middle_leaves_a_whole_file(tmp_path):
    """A writer that rewrites the same file for ever is killed at four moments: what is there is always whole."""
    path = tmp_path / "t.safetensors"
    code = (
        "import sys, torch, fixedformer as ff\n"
        "spec = ff.TargetSpec(heads=2, layers=2, d_in=50, d_head=40)\n"
        "targets = [ff.Target.random(spec, seed=s) for s in range(2)]\n"
        "step = 0\n"
        "while True:\n"
        "    ff.save_target(targets[step % 2], sys.argv[1])\n"
        "    step += 1\n"
        "    print(step, flush=True)\n"
    )
    for moment in range(4):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()  # one whole file is there
            time.sleep(0.003 * moment)
            writer.send_signal(signal.SIGKILL)
        assert ff.load_target(path).spec.d_in == 50
