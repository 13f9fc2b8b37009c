"""`python -m jaxrl_llm`, the same program as `jaxrl-llm`."""

from jaxrl_llm.cli.main import entry

if __name__ == "__main__":
    entry()
