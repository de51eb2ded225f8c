"""What the cuda_*.py share; they run in the simulator, in a process that test_cuda.py starts."""
import pytest

import ggjit as gg


@pytest.fixture
def gpu():
    return gg.init_backend("CUDA0")


@pytest.fixture
def failing():
    """{function of the driver: (status it returns, after how many calls)}"""
    from ggjit.cuda.simulated_driver import fail
    yield fail
    fail.clear()
