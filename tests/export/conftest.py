from pathlib import Path

import pytest
from export_tiny import make_base

from rlmake.export import fp8, writer


@pytest.fixture(params=["C", "torch"])
def kernels(request, monkeypatch) -> str:
    """Conversions in C, and by torch alone as where there was no compiler at installation."""
    if request.param == "torch":
        monkeypatch.setattr(writer, "_kernels", None)
        monkeypatch.setattr(fp8, "_kernels", None)
    elif writer._kernels is None:
        pytest.skip("installed without a C compiler")
    return request.param


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """The directory of the model that a run starts from."""
    return make_base(tmp_path_factory.mktemp("base") / "model")
