"""The kind `import` in the plan: content counts, a pinned file need not be there, what is missing is named."""

from pathlib import Path

import pytest
from blake3 import blake3

from rlmake.build.registry import Registry
from rlmake.core.errors import ConfigError


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Write the source table of experiments/m.toml and give the run's fingerprint."""
    monkeypatch.chdir(tmp_path)
    Path("experiments").mkdir()

    def fingerprint(source: str) -> str:
        Path("experiments/m.toml").write_text(f'[experiment]\nkind = "import"\n[source]\n{source}\n')
        return Registry.load().work("m").fingerprint

    return fingerprint


def test_the_content_counts_and_a_pinned_file_may_be_missing(declare):
    Path("a.gguf").write_bytes(b"GGUF one")
    plain = declare('type = "gguf"\npath = "a.gguf"')
    pin = f'blake3 = "{blake3(b"GGUF one").hexdigest()}"'
    assert declare(f'type = "gguf"\npath = "a.gguf"\n{pin}') == plain
    Path("a.gguf").rename("b.gguf")
    assert declare('type = "gguf"\npath = "b.gguf"') == plain
    assert declare(f'type = "gguf"\npath = "none.gguf"\n{pin}') == plain
    Path("b.gguf").write_bytes(b"GGUF two")
    assert declare('type = "gguf"\npath = "b.gguf"') != plain
    with pytest.raises(ConfigError, match=r"experiments/m\.toml:6: source\.blake3: b\.gguf has another content"):
        declare(f'type = "gguf"\npath = "b.gguf"\n{pin}')


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('type = "gguf"\npath = "none.gguf"', "source.path: none.gguf: no such file or directory"),
        ('type = "local"\npath = "none"', "source.path: none: no such file or directory"),
        ('type = "hub"\nid = "a/b"', "source.revision"),
        ('type = "hub"\nid = "a/b"\nrevision = "main"', "source.revision"),
        ('type = "ggfu"\npath = "x"', "source"),
        ('type = "local"\npaht = "x"', "did you mean 'path'"),
    ],
)
def test_what_is_wrong_is_one_line(declare, source, said):
    with pytest.raises(ConfigError) as caught:
        declare(source)
    assert any(said in line for line in str(caught.value).splitlines()), str(caught.value)
    assert all(line.startswith("experiments/m.toml") for line in str(caught.value).splitlines())


def test_a_hub_model_is_its_revision(declare):
    one = declare(f'type = "hub"\nid = "a/b"\nrevision = "{"0" * 40}"')
    assert declare(f'type = "hub"\nid = "a/b"\nrevision = "{"1" * 40}"') != one
