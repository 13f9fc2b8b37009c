"""The quick run with a stand-in for vLLM."""

import os
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.config import Config
from jaxrl_llm.rollouts.engines import Vllm
from tests.training import quick


def config(*, memory: Path, share: float | None = None) -> Config:
    """For tests.

    Args:
        memory: where weights are exchanged.
        share: of a GPU that the servers take.
    """
    engine = Vllm(python=os.environ["FAKE_PYTHON"], dtype="float32", memory=memory, share=share)
    return replace(quick.config(), engine=engine)
