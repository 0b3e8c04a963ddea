"""`fixedformer bounds`: numbers a person can check by hand, and a picture."""

import json

from fixedformer.cli import main


def test_table_json_and_plot(capsys, tmp_path):
    picture = tmp_path / "bounds.png"
    assert main(["bounds", "--heads", "3", "--layers", "4", "-o", str(picture), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["layers"] == [1, 2, 3, 4]
    assert shown["lower bound, attention given, E and U chosen"] == [2, 3, 6, 9]
    assert shown["shared-attention machine"] == [3, 3, 9, 9]
    assert shown["lower bound, attention given, E chosen"] == [3, 9, 27, 81]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bounds", "--layers", "2", "--residual"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[-2:] == ["2", "3"]
    assert not any("shared-attention machine" in row for row in rows)


def test_refused(capsys):
    assert main(["bounds", "--heads", "0"]) == 2
    assert "heads must be a whole number" in capsys.readouterr().err
