"""A worker whose answer never comes."""

from jaxrl_llm.tasks.workers import serve


def answer() -> str:
    while True:
        pass


if __name__ == "__main__":
    serve(answer)
