"""What several files about `ggjit serve` share."""
import pytest


@pytest.fixture(scope="module")
def m():
    """The model inside the package, for several texts at once."""
    from helpers.served import loaded
    with loaded() as m:
        yield m


@pytest.fixture
def client(m):
    """An httpx client of a server of `m`."""
    from helpers.served import CHATML, serving
    with serving(m, **CHATML) as (client, _):
        yield client
