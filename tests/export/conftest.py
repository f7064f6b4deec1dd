from pathlib import Path

import pytest
from export_tiny import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """The directory of the model that a run starts from."""
    return make_base(tmp_path_factory.mktemp("base") / "model")
