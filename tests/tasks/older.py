"""A worker for a model's programs, as on a kernel with an older Landlock, or (0) with none.

python -m tests.tasks.older FOLDER VERSION
"""

import sys

from jaxrl_llm.tasks import python as programs
from jaxrl_llm.tasks.workers import serve

if __name__ == "__main__":
    version = int(sys.argv[2])
    programs._landlock = lambda: version
    serve(programs._answer)
