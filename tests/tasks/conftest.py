import pytest
from hypothesis import settings

from jaxrl_llm.tasks.math.worker import AnswerChecker

settings.register_profile("tasks", deadline=None)  # the machine may be busy
settings.load_profile("tasks")


@pytest.fixture(scope="session")
def checker():
    with AnswerChecker(workers=2) as pool:
        yield pool
