"""What every test runs under, and the fixtures that several folders share."""

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter; looked at when Triton is imported

from interpreter import speed_up
from policies import make_policy

# A suite that was started in the background, or by nohup, ignores what stops a run: tests send it.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

if "TRITON_INTERPRET" in os.environ:
    speed_up()
torch.set_num_threads(1)  # the models are tiny: threads would wait for each other, and a fork would inherit them


@pytest.fixture
def policy():
    return make_policy()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """A model folder as `load_policy` takes it."""
    folder = tmp_path_factory.mktemp("model")
    policy = make_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)
